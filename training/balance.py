"""How evenly each layer's experts are used: steered to a target, layer by layer.

Without any push late layers starve most of their experts; a fixed balance loss flattened every layer within 2,000
steps (the busiest third took 43% of the picks, 33% is flat), and even without one the load went on flattening. Models
of the size that this one stands in for are in between. So each layer has a weight of its own on its balance loss, of
either sign, which the host sets between steps in proportion to how far the busiest third's share is from the target.
"""

import torch
from torch import Tensor

GAIN = 0.1  # weight a unit of share
MOST = 0.02


class Balance:
    """`weights_L` float32 [L] multiplies each layer's balance loss; a captured step reads it where it lies."""

    def __init__(self, num_layers: int, start: float, target: float, device: torch.device):
        self.weights_L = torch.full((num_layers,), start, device=device)
        self.target = target

    def loss(self, losses: list[Tensor]) -> Tensor:
        return (self.weights_L[: len(losses)] * torch.stack(losses)).sum()

    def steer(self, shares: list[float]) -> list[float]:
        """Set the weights from the busiest third's shares of the layers that ran; returns the weights."""
        weights = self.weights_L.tolist()
        if self.target > 0:
            for layer, share in enumerate(shares):
                weights[layer] = min(MOST, max(-MOST, GAIN * (share - self.target)))
            self.weights_L.copy_(torch.tensor(weights))
        return weights

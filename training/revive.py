"""Bring back experts that no token picks: each becomes a copy of a busy one, slightly turned.

The balance loss alone cannot: an expert without picks gets almost no gradient. Runs between steps, on the host's word.
"""

import torch
from torch import Tensor, nn

from training.model import TinyModel
from training.optim import Optimizer

NOISE = 0.3  # of the copied router row's own spread


def moe_blocks(model: TinyModel) -> list[nn.Module]:
    """The trunk's blocks in order, then the MTP layer's."""
    layers = [*model.trunk.model.layers, *model.mtp.layers]
    return [layer.mlp for layer in layers]


def quiet_experts(counts_E: Tensor, top_k: int, per_tokens: int = 100_000, least: float = 10.0) -> Tensor:
    """Ids of experts with fewer than `least` picks in `per_tokens` tokens; none if the layer was not run."""
    tokens = int(counts_E.sum()) / top_k
    return (counts_E * per_tokens < least * tokens).nonzero().flatten()


@torch.no_grad()
def revive(
    model: TinyModel, optimizer: Optimizer, counts_LE: Tensor, generator: torch.Generator, least: float = 10.0
) -> list[int]:
    """Revive each layer's experts with fewer than `least` picks in 100,000 tokens; returns how many by layer."""
    revived = []
    for block, counts in zip(moe_blocks(model), counts_LE, strict=True):
        quiet = quiet_experts(counts, model.config.num_experts_per_tok, least=least)
        busy = counts.argsort(descending=True)[: len(quiet)]
        quiet = quiet[: len(busy)]
        if len(quiet):
            copy_experts(block, optimizer, busy, quiet, generator)
        revived.append(len(quiet))
    return revived


def copy_experts(
    block: nn.Module, optimizer: Optimizer, source: Tensor, target: Tensor, generator: torch.Generator
) -> None:
    parameters = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    source, target = source.to(parameters[0].device), target.to(parameters[0].device)
    for parameter in parameters:
        parameter[target] = parameter[source]
        for moment in optimizer.moments(parameter):
            moment[target] = 0
    rows = block.gate.weight[target]
    noise = torch.randn(rows.shape, generator=generator).to(rows.device)
    block.gate.weight[target] = rows + NOISE * rows.std(-1, keepdim=True) * noise

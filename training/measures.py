"""What is measured on router scores and losses: pure functions of tensors, shared by the evaluation and its tests.

Shape letters: T tokens, E experts, K picks a token, L layers.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

RESIDENT_SHARE = 0.33
TAIL = range(6, 10)  # ranks that a swap may touch, of 10 picks
POSITION_BINS = ((0, 512), (512, 2048), (2048, 8192))


def most_used(counts_LE: Tensor, share: float = RESIDENT_SHARE) -> Tensor:
    """Mask [L, E] of each layer's most used experts; among equal counts the smallest index."""
    keep = max(1, round(share * counts_LE.shape[1]))
    order = counts_LE.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    return torch.zeros_like(counts_LE, dtype=torch.bool).scatter_(1, order, True)


def picks_share(counts_LE: Tensor, resident_LE: Tensor) -> list[float]:
    """Share of each layer's picks that the resident experts take."""
    return ((counts_LE * resident_LE).sum(1) / counts_LE.sum(1)).tolist()


def dead_share(counts_LE: Tensor) -> list[float]:
    """Share of each layer's experts that were never picked."""
    return (counts_LE == 0).double().mean(1).tolist()


def margin_swaps(scores_TE: Tensor, resident_E: Tensor, top_k: int, margin: float) -> tuple[int, int]:
    """(tail cold picks, swaps) when a cold pick in the tail gives way to the best resident within `margin`."""
    ids = scores_TE.topk(top_k, dim=-1).indices
    candidates = scores_TE.masked_fill(~resident_E, -math.inf).scatter(1, ids, -math.inf)
    tail_cold = swaps = 0
    for rank in (rank for rank in TAIL if rank < top_k):
        expert = ids[:, rank]
        cold = ~resident_E[expert]
        best, substitute = candidates.max(dim=1)
        gap = scores_TE.gather(1, expert[:, None]).squeeze(1) - best
        swap = cold & (gap <= margin)
        tail_cold += int(cold.sum())
        swaps += int(swap.sum())
        rows = swap.nonzero().squeeze(1)
        candidates[rows, substitute[rows]] = -math.inf
    return tail_cold, swaps


def position_losses(losses: list[Tensor]) -> list[float]:
    """Mean loss by position bin over documents that fill every bin (each tensor holds one document's losses)."""
    last = POSITION_BINS[-1][1]
    full = [loss[:last] for loss in losses if len(loss) >= last * 0.97]
    return [float(torch.cat([loss[a:b] for loss in full]).mean()) for a, b in POSITION_BINS] if full else []


def largest_rise(values: list[float]) -> float:
    """The largest ratio of a value to the one before it; NaN without two values."""
    ratios = [b / a for a, b in pairwise(values)]
    return max(ratios, default=math.nan)


def smallest_rise(values: list[float]) -> float:
    ratios = [b / a if a else math.nan for a, b in pairwise(values)]
    return min(ratios, default=math.nan)

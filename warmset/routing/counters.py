"""What one routed layer-window is, and what is counted of it.

Counters are kept a row, so that the rows that are committed can be counted apart from all rows verified.
Shape letters: T rows, E experts, K picks a row, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warmset.errors import RowError

COUNTER_NAMES = ("tail_cold", "swaps", "cold_before", "cold_after", "dropped")
TAIL_COLD, SWAPS, COLD_BEFORE, COLD_AFTER, DROPPED = range(5)


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The picks of one layer for one window.

    ids_TK int32, best first, -1 for no pick; weights_TK float32, 0 there; own_ids_TK int32, the router's
    own picks, which heat is learned from; counters_T5 int64 in the order of COUNTER_NAMES; error_T
    int32, 1 for rows with fewer than K experts above -inf (ids -1, weights 0, counters 0); range_T float32,
    greatest minus least finite score, from CachePrior alone.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    own_ids_TK: Tensor
    counters_T5: Tensor
    error_T: Tensor
    range_T: Tensor | None = None

    @property
    def counters(self) -> Tensor:
        """int64 [5], over all rows."""
        return self.counters_T5.sum(dim=0)


def count_rows(
    own_TK: Tensor,
    ids_TK: Tensor,
    slot_E: Tensor,
    tail_T: Tensor | None = None,
    swaps_T: Tensor | None = None,
) -> Tensor:
    """counters_T5 int64. tail_T, swaps_T: cold picks in the tail and swaps, where the policy counts its own;
    otherwise the tail is every rank, and a swap is a pick outside the router's own set."""
    num_experts = slot_E.shape[0]
    cold_before_T = cold_picks(own_TK, slot_E).sum(dim=1)
    cold_after_T = cold_picks(ids_TK, slot_E).sum(dim=1)
    own_real_TK = (own_TK >= 0) & (own_TK < num_experts)
    real_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if swaps_T is None:
        swaps_T = (real_TK & ~is_among(ids_TK, own_TK)).sum(dim=1)
    dropped_T = own_real_TK.sum(dim=1) - real_TK.sum(dim=1)
    tail_T = cold_before_T if tail_T is None else tail_T
    return torch.stack([tail_T, swaps_T, cold_before_T, cold_after_T, dropped_T], dim=1).long()


def cold_picks(ids_TK: Tensor, slot_E: Tensor) -> Tensor:
    """bool [T, K]: the pick is an expert without a slot; padding (-1 or E) is none."""
    num_experts = slot_E.shape[0]
    real_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    return real_TK & (slot_E[ids_TK.clamp(0, num_experts - 1).long()] < 0)


def is_among(ids_TK: Tensor, others_TJ: Tensor) -> Tensor:
    """bool [T, K]: the id is one of the row's others."""
    return (ids_TK[:, :, None] == others_TJ[:, None, :]).any(dim=2)


def as_dict(counters_5: Tensor) -> dict[str, int]:
    """Counters by name, on the host (a sync where they lie on a GPU)."""
    return dict(zip(COUNTER_NAMES, counters_5.tolist(), strict=True))


def raise_for_errors(error_LT: Tensor, first_layer: int = 0) -> None:
    """RowError naming the first layer and row that could not be routed (a sync where it lies on a GPU)."""
    error_LT = error_LT.reshape(-1, error_LT.shape[-1])
    if bool(error_LT.any()):
        layer, row = (error_LT != 0).nonzero()[0].tolist()
        raise RowError(
            f"Layer {first_layer + layer}, row {row}: fewer than K experts have a score above -inf; "
            "the window was discarded."
        )

"""The margin swap alone, after the router's own top-k: one warp a row, the best resident by a shuffle tree.

For rank lo, lo+1, ..., hi in this order: a cold pick gives way to the resident that is not among the ids as they
are now, has the greatest score, and of these the smallest index, if it is at most the margin worse.

scores_TE float32 or bf16 [T, E]: selection scores; logits_TE the same [T, E]: what weights are made of; slot_E
int32 [E]; margin_L float32, lo_L, hi_L int32 [L]; ids_in_TK int32, repeats and padding (-1 or E) allowed,
weights_in_TK float32 [T, K]; norm_T2 float32 [T, 2] from the router. Out: ids_TK int32, weights_TK float32
[T, K]; counters_T5 int64 [T, 5]; error_T int32 [T], 0: the router marks errors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from warmset.routing import PolicyTable, Routed, RouterRule

from .common import lane_value, launch_swap, load_logit, mix, order_key, store_row


@triton.jit(do_not_specialize=["layer"])
def swap_warp_kernel(
    scores_ptr,
    logits_ptr,
    slot_ptr,
    margin_ptr,
    lo_ptr,
    hi_ptr,
    ids_in_ptr,
    weights_in_ptr,
    norm_ptr,
    ids_ptr,
    weights_ptr,
    counter_ptr,
    error_ptr,
    layer,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, 1 << BITS)
    lane = tl.arange(0, 32)
    score_ptr = scores_ptr + row.to(tl.int64) * E  # int64: rows times experts can pass 2**31
    logit_ptr = logits_ptr + row.to(tl.int64) * E
    slot = tl.load(slot_ptr + expert, mask=expert < E, other=-1)
    score = load_logit(score_ptr, expert, expert < E)
    margin = tl.load(margin_ptr + layer)
    lo = tl.load(lo_ptr + layer)
    hi = tl.load(hi_ptr + layer)
    at = row * K + lane
    own = tl.load(ids_in_ptr + at, mask=lane < K, other=-1)
    weights = tl.load(weights_in_ptr + at, mask=lane < K, other=0.0)
    real = (own >= 0) & (own < E)
    cold = tl.where(real, (tl.load(slot_ptr + own, mask=real, other=0) < 0).to(tl.int32), 0)
    own_score = load_logit(score_ptr, own, real)
    in_tail = tl.where((lane >= lo) & (lane <= hi), cold, 0)
    tail_bits = tl.sum(in_tail << lane, 0)
    key = tl.where((slot >= 0) & (score > float("-inf")), order_key(score), 0)
    ids = own
    swaps = 0
    # The second half of the test keeps the loads above the branch, where they overlap.
    if (tail_bits != 0) & (tl.max(key, 0) != 0):
        for rank in tl.static_range(K):
            taken = tl.sum(tl.where(lane == rank, own, 0), 0)
            key = tl.where(expert == taken, 0, key)
        for rank in range(lo, tl.minimum(hi, K - 1) + 1):
            if ((tail_bits >> rank) & 1) != 0:
                best, found = tl.max(key, 0, return_indices=True)  # the smallest index among equals
                if best != 0:
                    gap = lane_value(own_score, lane, rank) - load_logit(score_ptr, found, found >= 0)
                    if gap <= margin:
                        ids = tl.where(lane == rank, found, ids)
                        key = tl.where(expert == found, 0, key)  # the picked set changes; who left was cold
                        swaps += 1
    if swaps != 0:
        peak = 0.0
        total = 1.0
        if not SIGMOID and not RENORM:
            peak = tl.load(norm_ptr + row * 2)
            total = tl.load(norm_ptr + row * 2 + 1)
        weights = mix(logit_ptr, ids, lane, peak, total, SCALE, E, K, SIGMOID, RENORM)
    tl.store(ids_ptr + at, ids, mask=lane < K)
    tl.store(weights_ptr + at, weights, mask=lane < K)
    tl.store(error_ptr + row, 0)
    cold_before = tl.sum(cold, 0)
    store_row(counter_ptr, row, lane, tl.sum(in_tail, 0), swaps, cold_before, cold_before - swaps)


def swap_warp(
    scores_TE: Tensor,
    logits_TE: Tensor,
    slot_E: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    rule: RouterRule,
    table: PolicyTable,
    layer: int = 0,
    norm_T2: Tensor | None = None,
) -> Routed:
    """The margin swap of ids_TK, one warp a row. own_ids_TK is ids_TK, error_T is 0."""
    return launch_swap(
        swap_warp_kernel, scores_TE, logits_TE, slot_E, ids_TK, weights_TK, rule, table, layer, norm_T2
    )

"""The margin swap alone, in scalar code: one program a row walks the experts one by one, once a cold rank.

Readable and slow: the definition on the GPU. Arguments as in swap_warp.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from warmset.routing import PolicyTable, Routed, RouterRule

from .common import FLOAT_MAX, launch_swap, load_logit, mix, store_row


@triton.jit(do_not_specialize=["layer"])
def swap_serial_kernel(
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
    lane = tl.arange(0, 32)
    score_ptr = scores_ptr + row.to(tl.int64) * E  # int64: rows times experts can pass 2**31
    logit_ptr = logits_ptr + row.to(tl.int64) * E
    margin = tl.load(margin_ptr + layer)
    lo = tl.load(lo_ptr + layer)
    hi = tl.load(hi_ptr + layer)
    at = row * K + lane
    ids = tl.load(ids_in_ptr + at, mask=lane < K, other=-1)
    weights = tl.load(weights_in_ptr + at, mask=lane < K, other=0.0)
    real = (ids >= 0) & (ids < E)
    cold = tl.where(real, (tl.load(slot_ptr + ids, mask=real, other=0) < 0).to(tl.int32), 0)
    cold_before = tl.sum(cold, 0)
    tail_cold = 0
    swaps = 0
    for rank in range(lo, tl.minimum(hi, K - 1) + 1):
        if tl.sum(tl.where(lane == rank, cold, 0), 0) != 0:
            tail_cold += 1
            found = -1
            best = float("-inf")
            for f in range(E):
                if tl.load(slot_ptr + f) >= 0:
                    score = tl.load(score_ptr + f).to(tl.float32)
                    if score > best:  # never for NaN; strictly: the smallest index stays
                        score = tl.minimum(score, FLOAT_MAX)
                        if (score > best) & (tl.sum((ids == f).to(tl.int32), 0) == 0):
                            best = score
                            found = f
            e = tl.load(ids_in_ptr + row * K + rank)
            if found >= 0:  # noqa: SIM102
                if load_logit(score_ptr, e, e >= 0) - best <= margin:
                    ids = tl.where(lane == rank, found, ids)
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
    store_row(counter_ptr, row, lane, tail_cold, swaps, cold_before, cold_before - swaps)


def swap_serial(
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
    """The margin swap of ids_TK in scalar code. Arguments and result as in `swap_warp`."""
    return launch_swap(
        swap_serial_kernel, scores_TE, logits_TE, slot_E, ids_TK, weights_TK, rule, table, layer, norm_T2
    )

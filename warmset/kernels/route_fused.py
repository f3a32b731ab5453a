"""Top-k, policy, weights and counters of one layer in one launch, one warp a row.

    logits -> scores -> packed keys -> own pick -> swap or bias -> weights

Where 32-bit keys leave an order open that the result depends on, the row is routed again with 64-bit keys by the
same code (see packed): rare, slower, and the choice is always exact.

logits_TE float32 or bf16 [T, E]; bias_E float32 [E]; slot_E int32 [E]; value_L float32, lo_L, hi_L int32 [L];
mean_range_L float32 [L]. Out: own_TK, ids_TK int32, weights_TK float32 [T, K]; counters_T5 int64 [T, 5];
error_T int32 [T]; norm_T2 float32 [T, 2]; range_T float32 [T]; scores_TE float32 [T, E].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from warmset.routing import (
    AdditiveBias,
    CachePrior,
    Exact,
    MarginSwap,
    Policy,
    RouteContext,
    Routed,
    RouterRule,
)

from .common import (
    FLOAT_MAX,
    FP_OPTIONS,
    KEY_OF_MINUS_INF,
    empty_routed,
    from_key,
    has_norm,
    keep_groups,
    lane_value,
    load_logit,
    load_score,
    mix,
    order_key,
    rule_constants,
    softmax_total,
    store_row,
)
from .packed import expert_of, is_minus_inf, next_below, own_pick, pack, same_bits
from .route_cuda import cuda_reason, launch_cuda

FORM: Literal["triton", "cuda"] = "cuda"
"""What `route_fused` runs where both forms know the router and cuda-core is installed; both give the same bits."""

EXACT = tl.constexpr(0)
MARGIN = tl.constexpr(1)
BIAS = tl.constexpr(2)
PRIOR = tl.constexpr(3)


@triton.jit
def swap_margin(
    keys,
    lost,
    last,
    slot,
    own,
    own_score,
    tail_bits,
    margin,
    lo,
    hi,
    lane,
    logit_ptr,
    bias_ptr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """(ids, swaps, unsure) after the margin swap.

    The router's picks all have keys at `last` or above, so the best resident not picked is the next one below,
    and a substitute that was taken is passed in the same way. `after`, the next one, becomes `found` with a swap,
    and shows whether `found` was surely the best.
    """
    ids = own
    swaps = 0
    NEVER: tl.constexpr = 0xFFFFFFFFFFFFFFFF if SHIFT == 32 else 0xFFFFFFFF
    free = tl.where(slot >= 0, keys, NEVER)
    found = next_below(free, last)
    there = found < last
    lowest = last
    tied = last != last
    for rank in range(lo, tl.minimum(hi, K - 1) + 1):
        if SHIFT != BITS + 1:
            there = there & (not is_minus_inf(found, SHIFT))
        if there & (((tail_bits >> rank) & 1) != 0):
            expert = expert_of(found, BITS)
            found_score = load_score(logit_ptr, bias_ptr, expert, expert >= 0, SIGMOID, HAS_BIAS)
            after = next_below(free, found)
            tied = tied | ((after < found) & same_bits(after, found, SHIFT))
            lowest = found
            if lane_value(own_score, lane, rank) - found_score <= margin:
                ids = tl.where(lane == rank, expert, ids)
                swaps += 1
                there = after < found
                found = after
    if SHIFT == BITS + 1:
        unsure = (tied & (lost != 0)) | ((lowest >> SHIFT) == 0)
    else:
        unsure = last != last
    return ids, swaps, unsure


@triton.jit
def swap_bias(
    keys,
    kept,
    score,
    slot,
    own,
    beta,
    protect,
    expert,
    lane,
    K: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(ids, swaps, unsure): the first `protect` own picks, then the best others by score + beta where resident."""
    SHIFT: tl.constexpr = 32 if WIDE else BITS + 1
    biased = tl.minimum(tl.maximum(score + beta, -FLOAT_MAX), FLOAT_MAX)
    biased = tl.where((slot >= 0) & (score > float("-inf")), biased, score)
    biased_keys, lost = pack(biased, slot, expert, WIDE, False, BITS)
    rest = tl.where((protect > 0) & (keys >= kept), tl.zeros_like(biased_keys), biased_keys)
    last = tl.max(rest, 0)
    ids = own
    swaps = 0
    tied = last != last
    for rank in range(protect, K):
        found = expert_of(last, BITS)
        swaps += 1 - tl.max(tl.where(own == found, 1, 0), 0)
        ids = tl.where(lane == rank, found, ids)
        below = next_below(rest, last)
        tied = tied | same_bits(below, last, SHIFT)
        last = tl.where(rank < K - 1, below, last)
    ids = tl.where(swaps > 0, ids, own)  # the router's order stays where the set is the router's
    if WIDE:
        unsure = last != last
    else:
        unsure = (protect < K) & ((tied & (lost != 0)) | ((last >> SHIFT) == 0))
    return ids, swaps, unsure


@triton.jit
def route_row(
    score,
    slot,
    expert,
    lane,
    logit_ptr,
    bias_ptr,
    value,
    lo,
    hi,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POLICY: tl.constexpr,
    FROM_BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(own, ids, tail_cold, swaps, cold_before, in_error, unsure) of one row."""
    SHIFT: tl.constexpr = 32 if WIDE else (16 if FROM_BF16 else BITS + 1)
    keys, lost = pack(score, slot, expert, WIDE, FROM_BF16, BITS)
    own, cold_bits, last, kept, in_error, unsure = own_pick(keys, lost, lane, lo, K, BITS, SHIFT)
    cold = (cold_bits >> lane) & 1
    cold_before = tl.sum(cold, 0)
    tail_cold = cold_before
    ids = own
    swaps = 0
    if POLICY == MARGIN:
        own_score = load_score(logit_ptr, bias_ptr, own, lane < K, SIGMOID, HAS_BIAS)
        in_tail = tl.where((lane >= lo) & (lane <= hi), cold, 0)
        tail_bits = tl.sum(in_tail << lane, 0)
        tail_cold = tl.sum(in_tail, 0)
        if tail_bits != 0:
            ids, swaps, unsure_swap = swap_margin(
                keys,
                lost,
                last,
                slot,
                own,
                own_score,
                tail_bits,
                value,
                lo,
                hi,
                lane,
                logit_ptr,
                bias_ptr,
                K,
                BITS,
                SHIFT,
                SIGMOID,
                HAS_BIAS,
            )
            unsure = unsure | unsure_swap
    elif POLICY >= BIAS:
        ids, swaps, unsure_swap = swap_bias(
            keys, kept, score, slot, own, value, lo, expert, lane, K, BITS, WIDE
        )
        unsure = unsure | unsure_swap
    return own, ids, tail_cold, swaps, cold_before, in_error, unsure


@triton.jit(do_not_specialize=["layer"])
def route_fused_kernel(
    logits_ptr,
    bias_ptr,
    slot_ptr,
    value_ptr,
    lo_ptr,
    hi_ptr,
    mean_ptr,
    own_ptr,
    ids_ptr,
    weights_ptr,
    counter_ptr,
    error_ptr,
    norm_ptr,
    range_ptr,
    score_ptr,
    layer,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUM2: tl.constexpr,
    POLICY: tl.constexpr,
    FROM_BF16: tl.constexpr,
    WITH_SCORES: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, 1 << BITS)
    lane = tl.arange(0, 32)
    real = expert < E
    logit_ptr = logits_ptr + row.to(tl.int64) * E  # int64: rows times experts can pass 2**31
    slot = tl.load(slot_ptr + expert, mask=real, other=-1)
    score = load_score(logit_ptr, bias_ptr, expert, real, SIGMOID, HAS_BIAS)
    value = 0.0
    lo = 0
    hi = -1
    if POLICY != EXACT:
        value = tl.load(value_ptr + layer)
        lo = tl.load(lo_ptr + layer)
        hi = tl.load(hi_ptr + layer)
    tl.debug_barrier()  # the loads stay above: moved down to their use, they would be waited for there
    if TOP_GROUPS < NUM_GROUPS:
        score = keep_groups(score, expert, lane, E, NUM_GROUPS, TOP_GROUPS, SUM2)
    if WITH_SCORES:
        tl.store(score_ptr + row.to(tl.int64) * E + expert, score + 0.0, mask=real)  # + 0.0: -0.0 is 0.0
    if POLICY == PRIOR:
        value = value * tl.load(mean_ptr + layer)
        key = order_key(score)
        top = tl.max(key, 0)
        low = tl.min(tl.where(key > KEY_OF_MINUS_INF, key, 0xFFFFFFFF), 0)
        spread = tl.minimum(from_key(top) - from_key(low), FLOAT_MAX)
        tl.store(range_ptr + row, tl.where(top > KEY_OF_MINUS_INF, spread, 0.0))
    own, ids, tail_cold, swaps, cold_before, in_error, unsure = route_row(
        score,
        slot,
        expert,
        lane,
        logit_ptr,
        bias_ptr,
        value,
        lo,
        hi,
        K,
        BITS,
        SIGMOID,
        HAS_BIAS,
        POLICY,
        FROM_BF16,
        False,
    )
    if unsure:
        own, ids, tail_cold, swaps, cold_before, in_error, unsure = route_row(
            score,
            slot,
            expert,
            lane,
            logit_ptr,
            bias_ptr,
            value,
            lo,
            hi,
            K,
            BITS,
            SIGMOID,
            HAS_BIAS,
            POLICY,
            FROM_BF16,
            True,
        )
    peak = 0.0
    total = 1.0
    if not SIGMOID and not RENORM:
        peak, total = softmax_total(load_logit(logit_ptr, expert, real))
        tl.store(norm_ptr + row * 2, peak)
        tl.store(norm_ptr + row * 2 + 1, total)
    picked = lane < K
    own = tl.where(in_error, -1, own)
    ids = tl.where(in_error, -1, ids)
    weights = mix(logit_ptr, ids, lane, peak, total, SCALE, E, K, SIGMOID, RENORM)
    cold_after = cold_before - swaps
    if POLICY >= BIAS:
        cold_after = tl.sum((tl.load(slot_ptr + ids, mask=picked & (ids >= 0), other=0) < 0).to(tl.int32), 0)
    out = row * K + lane
    tl.store(own_ptr + out, own, mask=picked)
    tl.store(ids_ptr + out, ids, mask=picked)
    tl.store(weights_ptr + out, weights, mask=picked)
    tl.store(error_ptr + row, in_error.to(tl.int32))
    good = tl.where(in_error, 0, 1)
    store_row(counter_ptr, row, lane, tail_cold * good, swaps * good, cold_before * good, cold_after * good)


FUSED_POLICIES = {Exact: EXACT, MarginSwap: MARGIN, AdditiveBias: BIAS, CachePrior: PRIOR}
"""Policies that this kernel knows."""


@dataclass(kw_only=True)
class Handed:
    """What the router hands on to kernels that run after it; filled by `route_fused`.

    scores_TE float32: selection scores. norm_T2 float32: greatest logit and sum of exp(logit - greatest) over
    all experts, for softmax routers that do not renormalise.
    """

    scores_TE: Tensor | None = None
    norm_T2: Tensor | None = None


def route_fused(
    policy: Policy,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
    handed: Handed | None = None,
    form: Literal["triton", "cuda"] | None = None,
) -> Routed:
    """`policy.route` in one launch, for the policies in FUSED_POLICIES; logits_TE float32 or bf16, contiguous.

    form: None is FORM. "cuda" routes in Triton too where `route_cuda.cuda_reason` gives a reason.
    """
    if (form or FORM) == "cuda":
        num_experts, device = logits_TE.shape[1], logits_TE.device
        if cuda_reason(policy, rule, num_experts, device, with_scores=handed is not None) is None:
            context = context or RouteContext()
            table = None
            if isinstance(policy, MarginSwap):
                table = context.table
                if table is None:
                    table = policy.table(rule, num_layers=context.layer + 1, device=device)
            return launch_cuda(logits_TE, slot_E, rule, bias_E, table, context.layer)
    kind = FUSED_POLICIES[type(policy)]
    return launch_fused(kind.value, policy, logits_TE, slot_E, rule, bias_E, context, handed)


def launch_fused(
    kind: int,
    policy: Any,
    logits_TE: Tensor,
    slot_E: Tensor,
    rule: RouterRule,
    bias_E: Tensor | None,
    context: RouteContext | None,
    handed: Handed | None,
) -> Routed:
    """Runs the kernel with the numbers of any policy that has a table."""
    num_rows, num_experts = logits_TE.shape
    device = logits_TE.device
    context = context or RouteContext()
    table = context.table
    if table is None and kind != EXACT.value:
        table = policy.table(rule, num_layers=context.layer + 1, device=device)
    mean_range_L = context.mean_range_L
    if kind == PRIOR.value and mean_range_L is None:
        mean_range_L = torch.zeros(context.layer + 1, dtype=torch.float32, device=device)
    routed = empty_routed(num_rows, rule.top_k, device)
    range_T = torch.empty(num_rows, dtype=torch.float32, device=device) if kind == PRIOR.value else None
    norm_T2 = torch.empty(num_rows, 2, dtype=torch.float32, device=device) if has_norm(rule) else None
    scores_TE = None
    if handed is not None:
        scores_TE = torch.empty(num_rows, num_experts, dtype=torch.float32, device=device)
        handed.scores_TE, handed.norm_T2 = scores_TE, norm_T2
    if num_rows:
        route_fused_kernel[(num_rows,)](
            logits_TE,
            bias_E,
            slot_E,
            *((None, None, None) if table is None else (table.value_L, table.lo_L, table.hi_L)),
            mean_range_L,
            routed.own_ids_TK,
            routed.ids_TK,
            routed.weights_TK,
            routed.counters_T5,
            routed.error_T,
            norm_T2,
            range_T,
            scores_TE,
            context.layer,
            **rule_constants(rule, num_experts, bias_E),
            NUM_GROUPS=rule.num_groups,
            TOP_GROUPS=rule.top_groups,
            SUM2=rule.group_score == "sum2",
            POLICY=kind,
            FROM_BF16=logits_TE.dtype == torch.bfloat16 and rule.scoring == "softmax",
            WITH_SCORES=handed is not None,
            **FP_OPTIONS,
        )
    return replace(routed, range_T=range_T)

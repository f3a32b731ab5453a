"""Device functions that the routing kernels share, so that all of them compute the same bits.

    logits_TE --load_score--> score --order_key--> key (uint32, the order of floats) --> ids --mix--> weights

Every kernel gives one row to one warp: 2**BITS experts, at least 128, lie over the 32 lanes in groups of four, and
a tensor of 32 entries, `lane`, holds rank r in lane r. Float contraction is switched off at launch (FP_OPTIONS), or
the forms could round differently. Shape letters: T rows, E experts, K picks a row, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warmset.routing import PolicyTable, Routed, RouterRule

MAX_PICKS = 32
"""Rank r lies in lane r of a warp."""
MAX_EXPERTS = 2048
"""More than any router has; the registers of a warp must hold a row."""
MAX_GROUPS = 32

FP_OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
KEY_OF_MINUS_INF = tl.constexpr(0x00800000)
"""`order_key` of -inf. Only 0, for what is not there, is used below it."""


@triton.jit
def clean(x):
    """NaN is -inf, +inf the greatest finite float32."""
    return tl.minimum(tl.maximum(x, float("-inf")), FLOAT_MAX)  # maximum returns the operand that is no NaN


@triton.jit
def order_key(x):
    """uint32 in the order of the floats, the same for -0.0 and 0.0. No NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, 0 - bits, bits ^ 0x80000000)


@triton.jit
def from_key(key):
    """The float32 that `order_key` came from (0.0 for -0.0)."""
    return tl.where(key >= 0x80000000, key ^ 0x80000000, 0 - key).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_logit(logit_ptr, expert, real):
    """The cleaned float32 logit of experts of one row; -inf where not `real`."""
    return clean(tl.load(logit_ptr + expert, mask=real, other=float("-inf")).to(tl.float32))


@triton.jit
def load_score(logit_ptr, bias_ptr, expert, real, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The selection score of experts of one row, before groups; -inf where not `real`."""
    if SIGMOID:
        score = sigmoid(tl.load(logit_ptr + expert, mask=real, other=0.0).to(tl.float32))
        if HAS_BIAS:
            score += tl.load(bias_ptr + expert, mask=real, other=0.0)
        score = tl.where(real, clean(score), float("-inf"))
    else:
        score = load_logit(logit_ptr, expert, real)
    return score


@triton.jit
def lane_value(values, lane, rank):
    """The float32 that lane `rank` holds, in every lane (one REDUX)."""
    bits = tl.where(lane == rank, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def mix(
    logit_ptr,
    ids,
    lane,
    peak,
    total,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORM: tl.constexpr,
):
    """float32 weights of the picks in `ids` by the model's rule; sums run in rank order.

    peak, total: for softmax without renormalisation the greatest logit of the row and the sum of exp(logit -
    peak) over all experts, made once by the router and handed on.
    """
    real = (lane < K) & (ids >= 0) & (ids < E)
    if SIGMOID:
        part = tl.where(real, sigmoid(tl.load(logit_ptr + ids, mask=real, other=0.0).to(tl.float32)), 0.0)
        part = tl.where(part != part, 0.0, part)
    else:
        logit = load_logit(logit_ptr, ids, real)
        if RENORM:
            peak = from_key(tl.max(order_key(logit), 0))
            peak = tl.where(peak == float("-inf"), 0.0, peak)
        part = tl.exp(logit - peak)
    if RENORM:
        total = lane_value(part, lane, 0)
        for rank in tl.static_range(1, K):
            total += lane_value(part, lane, rank)
        if SIGMOID:
            total += 1e-20
    if SIGMOID and not RENORM:
        weight = part
    else:
        weight = part / total
    if SCALE != 1.0:
        weight = weight * SCALE
    return tl.where(real, weight, 0.0)


@triton.jit
def softmax_total(logit):
    """(peak, total) of one row: its greatest logit, and the sum of exp(logit - peak) over all experts."""
    peak = from_key(tl.max(order_key(logit), 0))
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(logit - peak), 0)


@triton.jit
def keep_groups(
    score,
    expert,
    lane,
    E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUM2: tl.constexpr,
):
    """The scores with -inf outside the TOP_GROUPS best groups of the row (at most 32 groups)."""
    size: tl.constexpr = E // NUM_GROUPS
    group = tl.minimum(expert // size, NUM_GROUPS - 1)  # padding joins the last: shifts stay in range
    key = order_key(score)
    nothing = tl.zeros_like(key)
    group_key = tl.zeros_like(lane).to(tl.uint32)
    for g in tl.static_range(NUM_GROUPS):
        inside = tl.where(group == g, key, nothing)
        top = tl.max(inside, 0)
        if SUM2 and size > 1:
            at = tl.min(tl.where(inside == top, expert, E), 0)
            second = tl.max(tl.where(expert == at, nothing, inside), 0)
            top = order_key(from_key(top) + from_key(second))
        group_key = tl.where(lane == g, top, group_key)
    kept = 0
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.min(tl.where(group_key == tl.max(group_key, 0), lane, 32), 0)
        kept = kept | (1 << at)
        group_key = tl.where(lane == at, 0, group_key)
    return tl.where(((kept >> group) & 1) == 1, score, float("-inf"))


@triton.jit
def store_row(counter_ptr, row, lane, tail_cold, swaps, cold_before, cold_after):
    """One row of counters_T5 int64; dropped is 0, no kernel drops picks."""
    value = tl.where(lane == 0, tail_cold, 0)
    value = tl.where(lane == 1, swaps, value)
    value = tl.where(lane == 2, cold_before, value)
    value = tl.where(lane == 3, cold_after, value)
    tl.store(counter_ptr + row * 5 + lane, value.to(tl.int64), mask=lane < 5)


def rule_constants(rule: RouterRule, num_experts: int, bias_E: Tensor | None) -> dict[str, Any]:
    """Compile-time constants of a router's rule."""
    return {
        "SCALE": rule.scale,
        "E": num_experts,
        "K": rule.top_k,
        "BITS": max(7, (num_experts - 1).bit_length()),
        "SIGMOID": rule.scoring == "sigmoid",
        "HAS_BIAS": bias_E is not None,
        "RENORM": rule.renormalize,
    }


def has_norm(rule: RouterRule) -> bool:
    """Whether weights need the sum over all experts."""
    return rule.scoring == "softmax" and not rule.renormalize


def empty_routed(num_rows: int, top_k: int, device: torch.device) -> Routed:
    """Memory for a kernel to write all of: a fill here would be a launch of its own in every captured graph."""
    return Routed(
        ids_TK=torch.empty(num_rows, top_k, dtype=torch.int32, device=device),
        weights_TK=torch.empty(num_rows, top_k, dtype=torch.float32, device=device),
        own_ids_TK=torch.empty(num_rows, top_k, dtype=torch.int32, device=device),
        counters_T5=torch.empty(num_rows, 5, dtype=torch.int64, device=device),
        error_T=torch.empty(num_rows, dtype=torch.int32, device=device),
    )


def launch_swap(
    kernel: Any,
    scores_TE: Tensor,
    logits_TE: Tensor,
    slot_E: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    rule: RouterRule,
    table: PolicyTable,
    layer: int,
    norm_T2: Tensor | None,
) -> Routed:
    """Runs a swap kernel over the rows of ids_TK; both have the same arguments."""
    num_rows, num_experts = scores_TE.shape
    routed = replace(empty_routed(num_rows, rule.top_k, scores_TE.device), own_ids_TK=ids_TK)
    if num_rows:
        kernel[(num_rows,)](
            scores_TE,
            logits_TE,
            slot_E,
            table.value_L,
            table.lo_L,
            table.hi_L,
            ids_TK,
            weights_TK,
            norm_T2,
            routed.ids_TK,
            routed.weights_TK,
            routed.counters_T5,
            routed.error_T,
            layer,
            **rule_constants(rule, num_experts, None),
            **FP_OPTIONS,
        )
    return routed

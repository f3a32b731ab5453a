"""WindowJoint: the margin swaps of a window's rows seen together, in one program.

`route_fused` makes the margin swap of every row; this kernel then works on its ids in place. R = the cold experts
that some row still picks: they are read anyway. A swap away from a member of R is taken back, and a swap that
stays takes the best member of R that its row has not picked, where it scores higher than the substitute.

scores_TE float32 [T, E]; logits_TE [T, E]; slot_E int32 [E]; own_TK int32 [T, K]; norm_T2 float32 [T, 2]. In and
out: ids_TK int32, weights_TK float32 [T, K]; counters_T5 int64 [T, 5].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from warmset.routing import RouteContext, Routed, RouterRule, WindowJoint

from .common import FP_OPTIONS, load_logit, mix, order_key, rule_constants
from .route_fused import MARGIN, Handed, launch_fused


@triton.jit
def lane_id(ids, lane, rank):
    """The id that lane `rank` holds, in every lane."""
    return tl.sum(tl.where(lane == rank, ids, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def window_joint_kernel(
    scores_ptr,
    logits_ptr,
    slot_ptr,
    own_ptr,
    norm_ptr,
    ids_ptr,
    weights_ptr,
    counter_ptr,
    num_rows,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr,
):
    expert = tl.arange(0, 1 << BITS)
    lane = tl.arange(0, 32)
    read = tl.zeros_like(expert)
    for row in range(num_rows):
        for rank in range(K):
            pick = tl.load(ids_ptr + row * K + rank)
            if pick >= 0:  # noqa: SIM102
                if tl.load(slot_ptr + pick) < 0:
                    read = tl.where(expert == pick, 1, read)
    for row in range(num_rows):
        at = row * K + lane
        own = tl.load(own_ptr + at, mask=lane < K, other=-1)
        ids = tl.load(ids_ptr + at, mask=lane < K, other=-1)
        swapped = tl.sum((own != ids).to(tl.int32) << lane, 0)
        if swapped != 0:
            score_ptr = scores_ptr + row * E
            stays = 0
            swaps = 0
            for rank in range(K):
                if ((swapped >> rank) & 1) != 0:
                    if tl.max(tl.where(expert == lane_id(own, lane, rank), read, 0), 0) != 0:
                        ids = tl.where(lane == rank, own, ids)
                    else:
                        stays = stays | (1 << rank)
                        swaps += 1
            if stays != 0:
                score = load_logit(score_ptr, expert, expert < E)
                key = tl.where(read != 0, order_key(score), 0)
                for rank in range(K):
                    key = tl.where(expert == lane_id(ids, lane, rank), 0, key)
                for rank in range(K):
                    if ((stays >> rank) & 1) != 0:
                        best, found = tl.max(key, 0, return_indices=True)  # the smallest index among equals
                        substitute = lane_id(ids, lane, rank)
                        if best > order_key(load_logit(score_ptr, substitute, substitute >= 0)):
                            ids = tl.where(lane == rank, found, ids)
                            key = tl.where(expert == found, 0, key)
            peak = 0.0
            total = 1.0
            if not SIGMOID and not RENORM:
                peak = tl.load(norm_ptr + row * 2)
                total = tl.load(norm_ptr + row * 2 + 1)
            # The same ids give the same bits, so a row whose swaps were all taken back has the router's weights.
            weights = mix(logits_ptr + row * E, ids, lane, peak, total, SCALE, E, K, SIGMOID, RENORM)
            cold = tl.load(slot_ptr + ids, mask=lane < K, other=0) < 0
            tl.store(ids_ptr + at, ids, mask=lane < K)
            tl.store(weights_ptr + at, weights, mask=lane < K)
            tl.store(counter_ptr + row * 5 + 1, swaps)
            tl.store(counter_ptr + row * 5 + 3, tl.sum(cold.to(tl.int32), 0))


def window_joint(
    policy: WindowJoint,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
) -> Routed:
    """`WindowJoint.route` in two launches: every row's margin swap, then the window as a whole."""
    handed = Handed()
    routed = launch_fused(MARGIN.value, policy, logits_TE, slot_E, rule, bias_E, context, handed)
    num_rows, num_experts = logits_TE.shape
    if num_rows:
        window_joint_kernel[(1,)](
            handed.scores_TE,
            logits_TE,
            slot_E,
            routed.own_ids_TK,
            handed.norm_T2,
            routed.ids_TK,
            routed.weights_TK,
            routed.counters_T5,
            num_rows,
            **rule_constants(rule, num_experts, None),
            **FP_OPTIONS,
        )
    return routed

"""The routing kernels in plain torch, under the same names and signatures; any device.

Choice and counters are the same as the kernels' from the same scores; weights agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warmset.routing import Policy, PolicyTable, RouteContext, Routed, RouterRule, WindowJoint, weights_of
from warmset.routing.counters import count_rows
from warmset.routing.rules import swap
from warmset.routing.scores import clean


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
    """The margin swap of ids_TK; rows without a swap keep weights_TK."""
    scores_TE = clean(scores_TE)
    ids_out_TK, swapped_TK, tail_T = swap(
        scores_TE, ids_TK, slot_E, table.value_L[layer], int(table.lo_L[layer]), int(table.hi_L[layer])
    )
    swaps_T = swapped_TK.sum(dim=1)
    changed_T1 = (swaps_T > 0)[:, None]
    return Routed(
        ids_TK=ids_out_TK,
        weights_TK=torch.where(changed_T1, weights_of(ids_out_TK, logits_TE, rule), weights_TK),
        own_ids_TK=ids_TK,
        counters_T5=count_rows(ids_TK, ids_out_TK, slot_E, tail_T, swaps_T),
        error_T=torch.zeros(ids_TK.shape[0], dtype=torch.int32, device=ids_TK.device),
    )


swap_warp = swap_serial


def route_fused(
    policy: Policy,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
) -> Routed:
    """Top-k, policy, weights and counters."""
    return policy.route(logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)


def window_joint(
    policy: WindowJoint,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
) -> Routed:
    """The margin swaps of a window's rows seen together."""
    return policy.route(logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)

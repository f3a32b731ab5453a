"""Which code routes: a kernel where one knows the policy and the device, plain torch elsewhere, and why.

Triton is imported with the first launch, never with this module.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from warmset.errors import PolicyError
from warmset.routing import (
    AdditiveBias,
    CachePrior,
    Exact,
    MarginSwap,
    Policy,
    RouteContext,
    Routed,
    RouterRule,
    WindowJoint,
)

Form = Literal["serial", "warp", "fused"]
FORMS: tuple[str, ...] = get_args(Form)
"""Forms of the margin swap on a GPU: see SPEC, section 6. The engine uses `fused`."""

KERNEL_POLICIES = (Exact, MarginSwap, AdditiveBias, CachePrior, WindowJoint)
MAX_PICKS, MAX_EXPERTS, MAX_GROUPS = 32, 2048, 32
"""A pick is a lane of a warp, a row lies in a warp's registers, a group is a bit of 32."""


def torch_reason(
    policy: Policy, rule: RouterRule, num_experts: int, device: torch.device, form: Form = "fused"
) -> str | None:
    """Why routing runs in plain torch; None where a kernel runs."""
    if form not in FORMS:
        raise PolicyError(f"the route kernel must be one of {', '.join(FORMS)}. Got {form!r}.")
    if device.type != "cuda":
        return f"device {device.type}"
    if torch.version.hip is not None:
        return "a GPU that is not NVIDIA's"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    if type(policy) not in KERNEL_POLICIES:
        return f"no kernel for the policy {type(policy).__name__}"
    if form != "fused" and type(policy) not in (MarginSwap, Exact):
        return f"the {form} kernel knows MarginSwap only"
    if rule.top_k > MAX_PICKS or num_experts > MAX_EXPERTS or rule.num_groups > MAX_GROUPS:
        return f"over {MAX_PICKS} picks, {MAX_EXPERTS} experts or {MAX_GROUPS} groups"
    return None


def route(
    policy: Policy,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
    form: Form = "fused",
) -> Routed:
    """`policy.route` by the fastest code that knows the policy on this device.

    form: which kernels make the margin swap. Can be captured in a CUDA graph once it has run, if the context
    brings a table.
    """
    if torch_reason(policy, rule, logits_TE.shape[1], logits_TE.device, form) is not None:
        return policy.route(logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)
    return route_by_kernel(policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context, form=form)


def route_by_kernel(
    policy: Policy,
    logits_TE: Tensor,
    slot_E: Tensor,
    *,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    context: RouteContext | None = None,
    form: Form = "fused",
) -> Routed:
    """`route` for the policies of `KERNEL_POLICIES`, on a GPU or under Triton's interpreter."""
    from warmset.kernels import route_fused as fused

    if logits_TE.dtype not in (torch.float32, torch.bfloat16):
        logits_TE = logits_TE.float()
    logits_TE = logits_TE.contiguous()
    if isinstance(policy, WindowJoint):
        from warmset.kernels.window_joint import window_joint

        return window_joint(policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)
    if form == "fused" or not isinstance(policy, MarginSwap):
        return fused.route_fused(policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)
    handed = fused.Handed()
    context = context or RouteContext()
    table = context.table
    if table is None:
        table = policy.table(rule, num_layers=context.layer + 1, device=logits_TE.device)
    own = fused.route_fused(
        Exact(), logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context, handed=handed
    )
    return swap_after(own, handed, logits_TE, slot_E, rule=rule, table=table, layer=context.layer, form=form)


def swap_after(own, handed, logits_TE, slot_E, *, rule, table, layer, form) -> Routed:
    """The margin swap by the kernel `form`, after the router's own pick."""
    from dataclasses import replace

    from warmset.kernels.swap_serial import swap_serial
    from warmset.kernels.swap_warp import swap_warp

    swap = swap_warp if form == "warp" else swap_serial
    swapped = swap(
        handed.scores_TE,
        logits_TE,
        slot_E,
        own.ids_TK,
        own.weights_TK,
        rule=rule,
        table=table,
        layer=layer,
        norm_T2=handed.norm_T2,
    )
    return replace(swapped, error_T=own.error_T)

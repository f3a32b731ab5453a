"""`warmset.route`: one call that routes rows of any engine, with every mistake named in one sentence.

Knows router scores and slots, no model. Imports neither transformers nor, before a GPU routes, triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from warmset.errors import PolicyError, WarmsetError
from warmset.kernels import dispatch
from warmset.routing import Exact, Policy, RouteContext, RouterRule

SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def route(
    scores: Tensor,
    slots: Tensor,
    *,
    topk: int,
    renormalize: bool = True,
    scoring_func: Literal["softmax", "sigmoid"] = "softmax",
    e_score_correction_bias: Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    policy: Policy | None = None,
    context: RouteContext | None = None,
    kernel: dispatch.Form = "fused",
) -> tuple[Tensor, Tensor, Tensor]:
    """Expert ids and mixing weights of any number of rows, with a policy that may prefer resident experts.

    Args:
        scores: router logits [T, E], float32, bfloat16 or float16, contiguous; T may be 0.
        slots: int32 [E], the slot of each expert, -1 where it has none; on the device of `scores`.
        topk: K, picks a row, 1 to E.
        renormalize: divide the K weights by their sum.
        scoring_func: `softmax` or `sigmoid`.
        e_score_correction_bias: float32 [E], added to sigmoid scores for the choice, never to the weights.
        num_expert_group, topk_group: groups of neighbouring experts, and how many of them a row may pick from; a
            group counts by its two best scores with a bias (DeepSeek-V3), by its best without (V2).
        routed_scaling_factor: factor of all weights.
        policy: such as `MarginSwap(margin=0.25)`; None is the router's own pick.
        context: the policy's numbers in device memory (`policy.table`) and the layer to read, for CUDA graphs.
        kernel: `fused`, `warp` or `serial`, for measurements of `MarginSwap` on a GPU.

    Returns:
        ids int32 [T, K], best first, -1 for no pick and in rows with fewer than K scores above -inf;
        weights float32 [T, K], 0 there; counters int64 [5] on the device: cold picks in the policy's tail, swaps,
        cold picks before and after, dropped picks, over all rows.

    Raises:
        ValueError: in one sentence, for a wrong shape, dtype, device, layout, number or policy.

    Example:
        >>> scores = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1, 0]])
        >>> slots = torch.tensor([-1, -1, -1, -1, -1, 0, 1, 2], dtype=torch.int32)
        >>> ids, weights, counters = route(scores, slots, topk=4, policy=MarginSwap(margin=2.5, ranks=(3, 3)))
        >>> ids
        tensor([[0, 1, 2, 5]], dtype=torch.int32)
    """
    if not isinstance(renormalize, bool):
        raise PolicyError(f"`renormalize` must be True or False. Got {renormalize!r}.")
    with _argument_names():
        rule = RouterRule(
            top_k=topk,
            renormalize=renormalize,
            scoring=scoring_func,
            scale=_number("routed_scaling_factor", routed_scaling_factor),
            num_groups=num_expert_group,
            top_groups=topk_group,
            group_score="max" if e_score_correction_bias is None else "sum2",
        )
    _check_tensor("scores", scores, "[T, E]", None, SCORE_DTYPES)
    num_experts = scores.shape[1]
    _check_tensor("slots", slots, f"[{num_experts}]", scores.device, (torch.int32,))
    if e_score_correction_bias is not None:
        if scoring_func != "sigmoid":
            raise PolicyError("`e_score_correction_bias` is for scoring_func='sigmoid'. Got 'softmax'.")
        expected = f"[{num_experts}]"
        _check_tensor(
            "e_score_correction_bias", e_score_correction_bias, expected, scores.device, (torch.float32,)
        )
    with _argument_names():
        rule.check(num_experts)
    if (
        context is not None
        and context.table is not None
        and not 0 <= context.layer < len(context.table.value_L)
    ):
        raise WarmsetError(
            f"`context.layer` must be 0 to {len(context.table.value_L) - 1}, the layers of its table. "
            f"Got {context.layer}."
        )
    policy = Exact() if policy is None else policy
    if not isinstance(policy, Policy) or isinstance(policy, type):
        raise PolicyError(f"`policy` must be an object with a method `route`, or None. Got {policy!r}.")
    routed = dispatch.route(
        policy, scores, slots, rule=rule, bias_E=e_score_correction_bias, context=context, form=kernel
    )
    return routed.ids_TK, routed.weights_TK, routed.counters


_NAMES = {
    "`top_k`": "`topk`",
    "`num_groups`": "`num_expert_group`",
    "`top_groups`": "`topk_group`",
    "`scoring`": "`scoring_func`",
    "`scale`": "`routed_scaling_factor`",
}


@contextmanager
def _argument_names() -> Iterator[None]:
    """Errors of the rule under the names that this call's arguments have."""
    try:
        yield
    except PolicyError as error:
        message = str(error)
        for inner, outer in _NAMES.items():
            message = message.replace(inner, outer)
        raise PolicyError(message) from None


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PolicyError(f"`{name}` must be a finite number. Got {value!r}.")
    return float(value)


def _check_tensor(
    name: str, value: Any, shape: str, device: torch.device | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    """WarmsetError unless `value` is a contiguous tensor of this shape, device and one of these dtypes."""
    if not isinstance(value, Tensor):
        raise WarmsetError(f"`{name}` must be a tensor {shape}. Got {type(value).__name__}.")
    matches = value.dim() == 2 if shape == "[T, E]" else list(value.shape) == [int(shape[1:-1])]
    if not matches:
        raise WarmsetError(f"`{name}` must have shape {shape}. Got {list(value.shape)}.")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise WarmsetError(f"`{name}` must be {names}. Got {str(value.dtype).removeprefix('torch.')}.")
    if device is not None and value.device != device:
        raise WarmsetError(f"`{name}` must be on {device}, like scores. Got {value.device}.")
    if not value.is_contiguous():
        raise WarmsetError(f"`{name}` must be contiguous. Got strides {list(value.stride())}.")

"""From router logits to selection scores, the router's own pick, and mixing weights.

Knows nothing of residency: everything here is what the model itself would do, with ties, NaN and infinities
settled. Shape letters: T rows, E experts, K picks a row, G groups of experts.

    logits_TE --selection_scores--> scores_TE --own_pick--> ids_TK --weights_of--> weights_TK
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from warmset.errors import PolicyError

FLOAT32_MAX = torch.finfo(torch.float32).max
NO_EXPERT = -1
"""Id of a pick that is not there: padding, or a row in error."""

SIGMOID_SUM_FLOOR = 1e-20
"""Added to the sum of sigmoid weights, as the models' own code does; keeps 0 / 0 away when all underflow."""


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How one model turns router logits into picks and weights; the same for all its layers."""

    top_k: int
    renormalize: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "sum2"] = "max"

    def __post_init__(self) -> None:
        if not _is_int(self.top_k) or self.top_k < 1:
            raise PolicyError(f"`top_k` must be a whole number of at least 1. Got {self.top_k!r}.")
        if self.scoring not in ("softmax", "sigmoid"):
            raise PolicyError(f"`scoring` must be 'softmax' or 'sigmoid'. Got {self.scoring!r}.")
        if not math.isfinite(self.scale):
            raise PolicyError(f"`scale` must be a finite number. Got {self.scale!r}.")
        if not _is_int(self.num_groups) or self.num_groups < 1:
            raise PolicyError(f"`num_groups` must be a whole number of at least 1. Got {self.num_groups!r}.")
        if not _is_int(self.top_groups) or not 1 <= self.top_groups <= self.num_groups:
            raise PolicyError(
                f"`top_groups` must be 1 to `num_groups` ({self.num_groups}). Got {self.top_groups!r}."
            )
        if self.group_score not in ("max", "sum2"):
            raise PolicyError(f"`group_score` must be 'max' or 'sum2'. Got {self.group_score!r}.")

    def check(self, num_experts: int) -> None:
        """Raises PolicyError where this rule cannot pick `top_k` of `num_experts` experts."""
        if self.top_k > num_experts:
            raise PolicyError(f"`top_k` must be at most the {num_experts} experts. Got {self.top_k}.")
        if num_experts % self.num_groups:
            raise PolicyError(f"`num_groups` must divide the {num_experts} experts. Got {self.num_groups}.")
        kept = num_experts // self.num_groups * self.top_groups
        if self.top_k > kept:
            raise PolicyError(
                f"`top_k` must be at most the {kept} experts of the kept groups. Got {self.top_k}."
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def clean(values: Tensor) -> Tensor:
    """float32 in which NaN is -inf, +inf the greatest finite number, and -0.0 is +0.0."""
    finite = torch.nan_to_num(values.float(), nan=-math.inf, posinf=FLOAT32_MAX, neginf=-math.inf)
    return finite + 0.0  # -0.0 + 0.0 is +0.0


def sigmoid(logits: Tensor) -> Tensor:
    """float32 1 / (1 + exp(-x)): written out because the kernels use this expression."""
    return 1.0 / (1.0 + torch.exp(-logits.float()))


def selection_scores(logits_TE: Tensor, rule: RouterRule, bias_E: Tensor | None = None) -> Tensor:
    """scores_TE float32, what the model's own router ranks by; -inf for experts that cannot be picked.

    logits_TE: any float dtype. bias_E: float32 correction bias of a sigmoid router, or None.
    """
    if rule.scoring == "softmax":
        if bias_E is not None:
            raise PolicyError("`bias_E` is for sigmoid routers: a softmax router ranks by its logits.")
        scores_TE = clean(logits_TE)
    else:
        scores_TE = sigmoid(logits_TE)
        if bias_E is not None:
            scores_TE = scores_TE + bias_E.float()
        scores_TE = clean(scores_TE)
    return keep_groups(scores_TE, rule) if rule.top_groups < rule.num_groups else scores_TE


def keep_groups(scores_TE: Tensor, rule: RouterRule) -> Tensor:
    """The same scores with -inf outside the `top_groups` best groups of each row."""
    num_rows, num_experts = scores_TE.shape
    scores_TGe = scores_TE.view(num_rows, rule.num_groups, num_experts // rule.num_groups)
    if rule.group_score == "max" or scores_TGe.shape[2] == 1:
        group_TG = scores_TGe.amax(dim=2)
    else:
        group_TG = scores_TGe.topk(2, dim=2).values.sum(dim=2)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG.scatter_(1, ranking(group_TG)[:, : rule.top_groups], True)
    return scores_TGe.masked_fill(~kept_TG[:, :, None], -math.inf).reshape(num_rows, num_experts)


def _keys(scores_TE: Tensor) -> Tensor:
    """Distinct int64 keys in the order of (score, smaller index): torch's topk promises no order of ties."""
    bits_TE = scores_TE.view(torch.int32)
    ordered_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE).long()
    index_E = torch.arange(scores_TE.shape[1], device=scores_TE.device)
    return ordered_TE * 2**32 - index_E


def ranking(scores_TE: Tensor) -> Tensor:
    """All experts of each row, best first, the smaller index first among equals; int64 [T, E]."""
    return _keys(scores_TE).argsort(dim=1, descending=True)


def own_pick(scores_TE: Tensor, top_k: int) -> Tensor:
    """ids_TK int32: the `top_k` greatest scores, best first, the smaller index first among equals.

    scores_TE: float32 without NaN or -0.0, as `selection_scores` leaves it. Experts at -inf can be among the
    ids: `router_pick` marks such rows.
    """
    return _keys(scores_TE).topk(top_k, dim=1).indices.int()


def router_pick(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids_TK int32, error_T bool): own picks; a row with fewer than K experts above -inf is in error."""
    ids_TK = own_pick(scores_TE, top_k)
    last_T = scores_TE.gather(1, ids_TK[:, -1:].long())[:, 0]
    error_T = last_T == -math.inf
    return ids_TK.masked_fill(error_T[:, None], NO_EXPERT), error_T


def weights_of(ids_TK: Tensor, logits_TE: Tensor, rule: RouterRule) -> Tensor:
    """weights_TK float32 of any picks by the model's own rule; 0 where an id is padding (-1 or E).

    Sums run in rank order, so the same picks give the same bits; the correction bias never enters.
    """
    logits_TE = clean(logits_TE)
    num_experts = logits_TE.shape[1]
    real_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    logit_TK = logits_TE.gather(1, ids_TK.clamp(0, num_experts - 1).long())
    logit_TK = logit_TK.masked_fill(~real_TK, -math.inf)
    if rule.scoring == "sigmoid":
        part_TK = sigmoid(logit_TK).masked_fill(~real_TK, 0.0)
        if not rule.renormalize:
            return part_TK * rule.scale
        return part_TK / (_rank_order_sum(part_TK) + SIGMOID_SUM_FLOOR) * rule.scale
    peak_T1 = (logit_TK if rule.renormalize else logits_TE).amax(dim=1, keepdim=True)
    peak_T1 = peak_T1.masked_fill(peak_T1 == -math.inf, 0.0)  # no pick at all: exp(-inf - 0) is 0, not NaN
    part_TK = torch.exp(logit_TK - peak_T1)
    if rule.renormalize:
        sum_T1 = _rank_order_sum(part_TK)
    else:
        sum_T1 = torch.exp(logits_TE - peak_T1).sum(dim=1, keepdim=True)
    return torch.where(real_TK, part_TK / sum_T1, 0.0) * rule.scale


def _rank_order_sum(part_TK: Tensor) -> Tensor:
    """Sum over ranks 0, 1, ... in this order, [T, 1]: torch.sum may add in another."""
    sum_T = part_TK[:, 0]
    for rank in range(1, part_TK.shape[1]):
        sum_T = sum_T + part_TK[:, rank]
    return sum_T[:, None]


def auto_margin(scores_NE: Tensor, top_k: int) -> float:
    """A quarter of the median gap between rank 0 and rank K-1 over N calibration rows, in score units."""
    best_NK = scores_NE.topk(max(2, top_k), dim=1).values
    gap_N = best_NK[:, 0] - best_NK[:, -1]
    gap_N = gap_N[torch.isfinite(gap_N)]
    if gap_N.numel() == 0:
        raise PolicyError("`auto` needs at least one calibration row with K finite scores. Got none.")
    return float(gap_N.median()) / 4

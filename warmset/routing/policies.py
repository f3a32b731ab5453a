"""Every routing policy as a value, in plain torch: the reference that kernels are tested against.

A policy is pure: (scores, residency, window context, numbers) -> (ids, weights, counters).
Shape letters: T rows, E experts, K picks a row, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from warmset.errors import PolicyError
from warmset.routing import rules
from warmset.routing.base import RuledPolicy
from warmset.routing.counters import cold_picks
from warmset.routing.params import as_float32, check_ranks, resolve_ranks
from warmset.routing.scores import RouterRule

DEFAULT_MARGIN = 0.25
"""In score units; holds for softmax routers. `auto_margin` measures one for the others."""


@dataclass(frozen=True, kw_only=True)
class Exact(RuledPolicy):
    """The router's own pick."""

    def _pick(self, scene, numbers):
        return scene.own_TK, None, None


@dataclass(frozen=True, kw_only=True)
class _Margin(RuledPolicy):
    margin: float | tuple[float, ...] = DEFAULT_MARGIN
    ranks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.margin, list | tuple):
            if not self.margin:
                raise PolicyError("`margin` must be one number, or one a layer. Got none.")
            object.__setattr__(self, "margin", tuple(self.margin))
        for margin in self._margins():
            as_float32("margin", margin)
        if self.ranks is not None:
            object.__setattr__(self, "ranks", check_ranks(self.ranks))

    def _margins(self) -> tuple[float, ...]:
        return self.margin if isinstance(self.margin, tuple) else (self.margin,)

    def check_layers(self, num_layers: int) -> None:
        if isinstance(self.margin, tuple) and len(self.margin) != num_layers:
            raise PolicyError(
                f"`margin` must be one number, or one for each of the {num_layers} layers. Got {len(self.margin)}."
            )

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        lo, hi, note = resolve_ranks(self.ranks, rule.top_k)
        margins = self._margins()
        if isinstance(self.margin, tuple) and layer >= len(margins):
            self.check_layers(layer + 1)
        margin = margins[layer] if isinstance(self.margin, tuple) else margins[0]
        return as_float32("margin", margin), lo, hi, [note] if note else []

    def _swap(self, scene, numbers):
        return rules.swap(scene.scores_TE, scene.own_TK, scene.slot_E, numbers.value, numbers.lo, numbers.hi)


@dataclass(frozen=True, kw_only=True)
class MarginSwap(_Margin):
    """A cold pick in the tail gives way to the best resident not picked, if that is at most `margin` worse.

    margin: score units, any finite number, or a tuple with one for each layer. ranks: (lo, hi), 0-based, inclusive;
    None is the last 40% of K.
    """

    def _pick(self, scene, numbers):
        ids_TK, swapped_TK, tail_T = self._swap(scene, numbers)
        return ids_TK, tail_T, swapped_TK.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class WindowJoint(_Margin):
    """MarginSwap, then swaps away from experts that the window reads anyway are taken back."""

    def _pick(self, scene, numbers):
        swapped_ids_TK, swapped_TK, tail_T = self._swap(scene, numbers)
        ids_TK, stays_TK = rules.join_window(
            scene.scores_TE, scene.own_TK, swapped_ids_TK, swapped_TK, scene.slot_E, numbers.lo, numbers.hi
        )
        return ids_TK, tail_T, stays_TK.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class RandomSwap(_Margin):
    """A control for the price: MarginSwap's rows and ranks, but each gets a random resident not picked."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("seed", self.seed, 0)

    def _pick(self, scene, numbers):
        _, swapped_TK, tail_T = self._swap(scene, numbers)
        num_rows = scene.own_TK.shape[0]
        position_T = scene.context.position_T
        if position_T is None:
            position_T = torch.arange(num_rows, device=scene.own_TK.device)
        ids_TK = rules.swap_at_random(
            scene.scores_TE,
            scene.own_TK,
            swapped_TK,
            scene.slot_E,
            position_T,
            scene.context.layer,
            self.seed,
        )
        return ids_TK, tail_T, swapped_TK.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class _Protect(RuledPolicy):
    protect: int = 1

    def __post_init__(self) -> None:
        _whole("protect", self.protect, 0)

    def _protected(self, rule: RouterRule) -> tuple[int, list[str]]:
        if self.protect <= rule.top_k:
            return self.protect, []
        return rule.top_k, [f"protect {self.protect} is {rule.top_k}: a row has {rule.top_k} picks"]


@dataclass(frozen=True, kw_only=True)
class AdditiveBias(_Protect):
    """Top-k of score + beta where resident; the router's first `protect` picks stay. beta: score units."""

    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        as_float32("beta", self.beta)

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        protect, notes = self._protected(rule)
        return as_float32("beta", self.beta), protect, -1, notes

    def _pick(self, scene, numbers):
        return (
            rules.add_bias(scene.scores_TE, scene.own_TK, scene.slot_E, numbers.value, numbers.lo),
            None,
            None,
        )


@dataclass(frozen=True, kw_only=True)
class CachePrior(_Protect):
    """AdditiveBias whose beta is `strength` times the layer's mean score range over past committed rows.

    Skliar et al., arXiv 2412.00099. The means come with the context (`RangeMeans`); without them beta is 0.
    """

    strength: float
    has_range: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        as_float32("strength", self.strength)

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        protect, notes = self._protected(rule)
        return as_float32("strength", self.strength), protect, -1, notes

    def _pick(self, scene, numbers):
        context = scene.context
        beta = torch.zeros_like(numbers.value)
        if context.mean_range_L is not None:
            beta = numbers.value * context.mean_range_L[context.layer]
        return rules.add_bias(scene.scores_TE, scene.own_TK, scene.slot_E, beta, numbers.lo), None, None


@dataclass(frozen=True, kw_only=True)
class MaxRank(_Protect):
    """The first `protect` picks stay; the rest are residents among the first `max_rank` of the ranking, in
    order, then the ranking itself."""

    max_rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("max_rank", self.max_rank, 0)

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        protect, notes = self._protected(rule)
        return 0.0, protect, min(self.max_rank, 2**31 - 1), notes

    def _pick(self, scene, numbers):
        ids_TK = rules.prefer_prefix(scene.scores_TE, scene.slot_E, numbers.lo, numbers.hi, scene.rule.top_k)
        return ids_TK, None, None


@dataclass(frozen=True, kw_only=True)
class CumulativeMass(_Protect):
    """MaxRank with the smallest prefix of the ranking whose weight mass reaches `mass` (0 to 1)."""

    mass: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= as_float32("mass", self.mass) <= 1.0:
            raise PolicyError(f"`mass` must be 0 to 1. Got {self.mass!r}.")

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        protect, notes = self._protected(rule)
        return as_float32("mass", self.mass), protect, -1, notes

    def _pick(self, scene, numbers):
        max_rank_T1 = rules.prefix_of_mass(scene.scores_TE, scene.logits_TE, scene.rule, numbers.value)
        ids_TK = rules.prefer_prefix(scene.scores_TE, scene.slot_E, numbers.lo, max_rank_T1, scene.rule.top_k)
        return ids_TK, None, None


@dataclass(frozen=True, kw_only=True)
class DropCold(RuledPolicy):
    """A cold pick whose weight is under `weight` is dropped; the others are weighed by the model's rule."""

    weight: float

    def __post_init__(self) -> None:
        as_float32("weight", self.weight)

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        return as_float32("weight", self.weight), 0, -1, []

    def _pick(self, scene, numbers):
        cold_TK = cold_picks(scene.own_TK, scene.slot_E)
        return rules.without(scene.own_TK, cold_TK & (scene.own_weights_TK < numbers.value)), None, None


@dataclass(frozen=True, kw_only=True)
class FewerPicks(RuledPolicy):
    """The router's first `k` picks, whatever is resident: the baseline at equal bytes."""

    k: int

    def __post_init__(self) -> None:
        _whole("k", self.k, 1)

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        if self.k <= rule.top_k:
            return 0.0, self.k, -1, []
        return 0.0, rule.top_k, -1, [f"k {self.k} is {rule.top_k}: a row has {rule.top_k} picks"]

    def _pick(self, scene, numbers):
        rank_K = torch.arange(scene.own_TK.shape[1], device=scene.own_TK.device)
        return rules.without(scene.own_TK, (rank_K >= numbers.lo).expand_as(scene.own_TK)), None, None


@dataclass(frozen=True, kw_only=True)
class ResidentOnly(RuledPolicy):
    """Top-k over the residents, all of them where there are fewer than K: a lower bound only."""

    def _pick(self, scene, numbers):
        resident_TE = scene.scores_TE.masked_fill(scene.slot_E < 0, -math.inf)
        return rules.pick_finite(resident_TE, scene.rule.top_k), None, None


def _whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise PolicyError(f"`{name}` must be a whole number of at least {least}. Got {value!r}.")

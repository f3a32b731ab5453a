"""What all policies share: the protocol, and the frame that turns a rule's picks into a `Routed`.

Nothing here waits for a GPU, so the plain form can be captured in a CUDA graph too.
Shape letters: T rows, E experts, K picks a row, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from warmset.routing.counters import Routed, count_rows, is_among
from warmset.routing.params import PolicyTable, RouteContext, score_range
from warmset.routing.scores import NO_EXPERT, RouterRule, router_pick, selection_scores, weights_of


@runtime_checkable
class Policy(Protocol):
    """What any policy can do, a user's own included."""

    def route(
        self,
        logits_TE: Tensor,
        slot_E: Tensor,
        *,
        rule: RouterRule,
        bias_E: Tensor | None = None,
        context: RouteContext | None = None,
    ) -> Routed:
        """Picks for one layer and window. slot_E int32: slot of each expert, -1 where it is cold."""
        ...


@dataclass(frozen=True)
class Numbers:
    """A policy's numbers for one layer; lo and hi are tensors where reading them would wait for a device."""

    value: Tensor
    lo: Tensor | int
    hi: Tensor | int


@dataclass(frozen=True, kw_only=True)
class RuledPolicy:
    """The part that all built-in policies share; a subclass says `_pick` and `numbers`."""

    has_range: ClassVar[bool] = False
    """Whether `Routed.range_T` is wanted."""

    def numbers(self, rule: RouterRule, layer: int = 0) -> tuple[float, int, int, list[str]]:
        """(value, lo, hi, notes) of one layer for a model with this rule; each note says what was capped."""
        return 0.0, 0, -1, []

    def check_layers(self, num_layers: int) -> None:
        """PolicyError where the policy has numbers for another number of layers."""

    def table(self, rule: RouterRule, *, num_layers: int, device: torch.device | str = "cpu") -> PolicyTable:
        """This policy's numbers in device memory, one entry a layer; change them there in place."""
        self.check_layers(num_layers)
        value, lo, hi, notes = self.numbers(rule)
        table = PolicyTable.full(num_layers, value, lo, hi, top_k=rule.top_k, device=device)
        for layer in range(1, num_layers):
            other = self.numbers(rule, layer)[0]
            if other != value:
                table.set_value(other, layer)
        table.notes.extend(notes)
        return table

    def route(
        self,
        logits_TE: Tensor,
        slot_E: Tensor,
        *,
        rule: RouterRule,
        bias_E: Tensor | None = None,
        context: RouteContext | None = None,
    ) -> Routed:
        """Picks for one layer and window. slot_E int32: slot of each expert, -1 where it is cold."""
        scores_TE = selection_scores(logits_TE, rule, bias_E)
        return self.route_scores(scores_TE, logits_TE, slot_E, rule=rule, context=context)

    def route_scores(
        self,
        scores_TE: Tensor,
        logits_TE: Tensor,
        slot_E: Tensor,
        *,
        rule: RouterRule,
        context: RouteContext | None = None,
    ) -> Routed:
        """The same from selection scores that are there already (float32, no NaN, no -0.0)."""
        own_TK, error_T = router_pick(scores_TE, rule.top_k)
        own_weights_TK = weights_of(own_TK, logits_TE, rule)
        scene = Scene(scores_TE, logits_TE, own_TK, own_weights_TK, slot_E, rule, context or RouteContext())
        ids_TK, tail_T, swaps_T = self._pick(scene, self._numbers(scene))
        # The router's order and bits stay where the set is the router's.
        same_T = (is_among(ids_TK, own_TK).all(dim=1) & (ids_TK != NO_EXPERT).all(dim=1)) | error_T
        ids_TK = torch.where(same_T[:, None], own_TK, ids_TK)
        weights_TK = own_weights_TK
        if same_T.is_cuda or not bool(same_T.all()):
            weights_TK = torch.where(same_T[:, None], own_weights_TK, weights_of(ids_TK, logits_TE, rule))
        counters_T5 = count_rows(own_TK, ids_TK, slot_E, tail_T, swaps_T).masked_fill(error_T[:, None], 0)
        return Routed(
            ids_TK=ids_TK,
            weights_TK=weights_TK.masked_fill(error_T[:, None], 0.0),
            own_ids_TK=own_TK,
            counters_T5=counters_T5,
            error_T=error_T.int(),
            range_T=score_range(scores_TE) if self.has_range else None,
        )

    def _numbers(self, scene: Scene) -> Numbers:
        table, layer, device = scene.context.table, scene.context.layer, scene.scores_TE.device
        if table is None:
            value, lo, hi, _ = self.numbers(scene.rule, layer)
            return Numbers(torch.tensor(value, dtype=torch.float32, device=device), lo, hi)
        lo_, hi_ = table.lo_L[layer], table.hi_L[layer]
        if device.type == "cpu":  # no device to wait for, and whole numbers let the loops be short
            return Numbers(table.value_L[layer], int(lo_), int(hi_))
        return Numbers(table.value_L[layer], lo_, hi_)

    def _pick(self, scene: Scene, numbers: Numbers) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(ids_TK, cold picks in the tail or None, swaps or None), each a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scene:
    """One layer of one window, as `_pick` sees it."""

    scores_TE: Tensor
    logits_TE: Tensor
    own_TK: Tensor
    own_weights_TK: Tensor
    slot_E: Tensor
    rule: RouterRule
    context: RouteContext

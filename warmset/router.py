"""In the places of a model's routers and experts: what they share, and how a layer of a window is routed.

`WarmRouter` takes the model's own logits and gives the router's own pick, or in decode windows the policy's;
`WarmExperts` hands the picks to the runner. `Routing` is what the routers of one model share. Knows modules, no
checkpoint and nothing of transformers' modelling code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from warmset.errors import PolicyError, RowError, first_line
from warmset.experts import ExpertRunner
from warmset.kernels import dispatch
from warmset.routing import (
    POLICIES,
    CachePrior,
    Exact,
    Policy,
    PolicyTable,
    RangeMeans,
    RouteContext,
    Routed,
    RouterRule,
    selection_scores,
    weights_of,
)
from warmset.routing.scores import router_pick


@dataclass(frozen=True, kw_only=True)
class MoeLayer:
    """One MoE layer: its number among the MoE layers, where it sits, and how its router routes."""

    index: int
    path: str
    rule: RouterRule


class Routing:
    """What the routers of a model share: the policy, whether it acts now, and what the last forward did.

    `acts` is False while the prompt is read. `made` holds one Routed a layer of the current forward. The
    policy's numbers lie in `table`, on the device, where they can be changed between windows.
    """

    def __init__(
        self,
        policy: Policy | None,
        rule: RouterRule,
        slot_LE: torch.Tensor,
        max_rows: int,
        form: dispatch.Form = "fused",
    ) -> None:
        self._rule = rule
        self._form = form
        self._max_rows = max_rows
        self.slot_LE = slot_LE
        self.acts = False
        self.made: list[Routed] = []
        self.kept_logits: list[torch.Tensor] | None = None
        self.position_T = torch.zeros(max_rows, dtype=torch.int64, device=slot_LE.device)
        self.static = False
        """Whether a window runs that no host may look into: rows in error stay in `made`, and nobody raises."""
        self.real_T: torch.Tensor | None = None
        """bool [T]: rows that are no padding, in such a window; None where all are real."""
        self.use(policy)

    def use(self, policy: Policy | None) -> None:
        """Route the windows that follow by this policy, which has learned nothing yet; None is off."""
        num_layers, num_experts = self.slot_LE.shape
        device, rule = self.slot_LE.device, self._rule
        self.policy: Policy = Exact() if policy is None else policy
        self._plain_reason = dispatch.torch_reason(self.policy, rule, num_experts, device, self._form)
        make_table = getattr(self.policy, "table", None)
        self.table: PolicyTable | None = None
        if make_table is not None:
            self.table = make_table(rule, num_layers=num_layers, device=device)
        self.means: RangeMeans | None = None
        if isinstance(self.policy, CachePrior):
            self.means = RangeMeans(num_layers, self._max_rows, device)

    @property
    def notes(self) -> list[str]:
        """What was capped, and on a GPU why no kernel routes, one sentence each."""
        notes = [] if self.table is None else [f"{note[:1].upper()}{note[1:]}." for note in self.table.notes]
        if self._plain_reason is not None and self.slot_LE.is_cuda:
            notes.append(f"Routing runs in plain torch, which is slower: {self._plain_reason}.")
        return notes

    def begin(self, positions: list[int]) -> None:
        """A decode window with rows at these positions begins: the policy acts, residency is as it is now."""
        self.acts = True
        self.made = []
        self.position_T[: len(positions)] = torch.tensor(positions)

    def begin_static(self, position_T: torch.Tensor, real_T: torch.Tensor | None) -> None:
        """As `begin`, without the host: positions int64 [T] on the device, and which rows are real."""
        self.acts = self.static = True
        self.made = []
        self.real_T = real_T
        self.position_T[: len(position_T)].copy_(position_T)

    def end_static(self) -> None:
        """The forward is over; `made` stays."""
        self.static, self.real_T = False, None

    @contextmanager
    def alone(self, position_T: torch.Tensor, real_T: torch.Tensor | None) -> Iterator[None]:
        """A static forward whose picks nobody asks about; whether the policy acts is afterwards as it was."""
        acts = self.acts
        self.begin_static(position_T, real_T)
        try:
            yield
        finally:
            self.end_static()
            self.acts, self.made = acts, []

    @property
    def runs_in_torch(self) -> bool:
        """Whether no kernel routes by this policy on this device."""
        return self._plain_reason is not None

    def route(self, layer: MoeLayer, logits_TE: torch.Tensor) -> Routed:
        num_rows = logits_TE.shape[0]
        if self.kept_logits is not None:
            self.kept_logits.append(logits_TE.clone())
        context = RouteContext(layer=layer.index, table=self.table, position_T=self.position_T[:num_rows])
        if self.means is not None:
            context.mean_range_L = self.means.mean_L
        routed = self._routed(layer, logits_TE, context)
        if self.means is not None:
            if routed.range_T is not None:
                self.means.observe_range(layer.index, routed.range_T)
            else:
                self.means.observe(layer.index, selection_scores(logits_TE, layer.rule))
        if self.real_T is not None:
            routed = replace(routed, ids_TK=routed.ids_TK.masked_fill(~self.real_T[:, None], -1))
        self.made.append(routed)
        return routed

    def _routed(self, layer: MoeLayer, logits_TE: torch.Tensor, context: RouteContext) -> Routed:
        slot_E = self.slot_LE[layer.index]
        if type(self.policy) in POLICIES.values():
            return dispatch.route(
                self.policy, logits_TE, slot_E, rule=layer.rule, context=context, form=self._form
            )
        name = type(self.policy).__qualname__
        try:
            routed = self.policy.route(logits_TE, slot_E, rule=layer.rule, context=context)
        except (Exception, SystemExit) as error:
            raise PolicyError(f"policy {name} failed in layer {layer.index}: {first_line(error)}") from error
        check_routed(routed, logits_TE, layer.rule.top_k, f"policy {name}, layer {layer.index}")
        return routed

    def commit(self, num_rows: int) -> None:
        """The first `num_rows` rows of the window are kept; what a policy learns from is learned now."""
        if self.means is not None:
            self.means.commit(num_rows)


def check_routed(routed: Any, logits_TE: torch.Tensor, top_k: int, who: str) -> None:
    """Refuse what a user's policy returned if it is no routing of these rows; PolicyError says what is wrong."""
    if not isinstance(routed, Routed):
        raise PolicyError(f"{who} must return a Routed. Got {type(routed).__name__}.")
    num_rows, num_experts = logits_TE.shape
    ids_TK, weights_TK = routed.ids_TK, routed.weights_TK
    for name, value in (("ids_TK", ids_TK), ("weights_TK", weights_TK)):
        if tuple(value.shape) != (num_rows, top_k):
            raise PolicyError(f"{who}: {name} must have shape {(num_rows, top_k)}. Got {tuple(value.shape)}.")
    if ids_TK.dtype not in (torch.int32, torch.int64):
        raise PolicyError(f"{who}: ids_TK must be int32. Got {ids_TK.dtype}.")
    if bool(((ids_TK < -1) | (ids_TK >= num_experts)).any()):
        raise PolicyError(f"{who}: ids must be -1 (no pick) to {num_experts - 1}. Got {ids_TK.tolist()}.")
    picked_TK = ids_TK.sort(dim=1).values
    if bool(((picked_TK[:, 1:] == picked_TK[:, :-1]) & (picked_TK[:, 1:] >= 0)).any()):
        raise PolicyError(f"{who}: an expert may be picked once a row. Got {ids_TK.tolist()}.")
    if not bool(torch.isfinite(weights_TK).all()):
        raise PolicyError(f"{who}: weights must be finite.")


class WarmRouter(nn.Module):
    """In the router's place: its own logits, then the router's own pick or the policy's."""

    def __init__(self, original: nn.Module, layer: MoeLayer, routing: Routing) -> None:
        super().__init__()
        self.original: Any = original
        self.layer = layer
        self._routing = routing

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The model's own logits [T, E]."""
        return F.linear(x_TH, self.original.weight)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits [T, E], weights [T, K] in the logits' dtype, ids [T, K] int32), as the original returns."""
        logits_TE = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]))
        if self._routing.acts:
            routed = self._routing.route(self.layer, logits_TE)
            ids_TK, weights_TK, error_T = routed.ids_TK, routed.weights_TK, routed.error_T
        else:
            ids_TK, error_T = router_pick(selection_scores(logits_TE, self.layer.rule), self.layer.rule.top_k)
            weights_TK = weights_of(ids_TK, logits_TE, self.layer.rule)
        if not self._routing.static and bool(error_T.any()):  # host sync: a row in error ends the window
            row = int(error_T.nonzero()[0])
            raise RowError(
                f"Layer {self.layer.index}, row {row}: fewer than {self.layer.rule.top_k} experts have a score "
                "above -inf, so the window was discarded.",
                row,
            )
        return logits_TE, weights_TK.to(logits_TE.dtype), ids_TK


class WarmExperts(nn.Module):
    """In the experts' place: runs the picks of its layer through the runner."""

    def __init__(self, layer: MoeLayer, runner: ExpertRunner) -> None:
        super().__init__()
        self.layer = layer
        self._runner = runner

    def forward(
        self, hidden_states: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self._runner.run(self.layer.index, hidden_states, top_k_ids, top_k_weights)

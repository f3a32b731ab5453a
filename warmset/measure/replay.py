"""Policies, admissions and slot counts over a recording, without the model.

    recorded window -> policy -> counters, cold experts -> admission -> the slots of the next window

Residency runs through the same `admission` as the engine's, and policies through the same `router.Routing`, so with
exact routing every counter is the engine's own, for any slots and admission, recorded or not. A policy's swap changes
what later layers would have scored, and a recording cannot know that: its counters are those of the policy's reference
over the recorded scores. Where too few scores were recorded to know even that, the answer is unknown.

Predicted times are the chain of docs/traces.md: a layer takes its other bytes, and then the longer of its residents
from fast memory and its cold experts over the link; experts that are brought in take their copies on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from warmset import profile
from warmset.admission import DEFAULT_BUDGET_BYTES, Admission, prior_of
from warmset.measure.recording import Recording
from warmset.profile import Profile
from warmset.residency import flat_rows
from warmset.router import MoeLayer, Routing
from warmset.routing import (
    COUNTER_NAMES,
    AdditiveBias,
    DropCold,
    Exact,
    FewerPicks,
    MarginSwap,
    MaxRank,
    Policy,
    RouterRule,
    WindowJoint,
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What times are predicted from: GB/s of fast memory, of cold experts read in place, of copies into slots; bytes
    of an expert (None: the recording's own, or those of the defaults) and of all else that a layer reads.

    Defaults: one H200 behind PCIe 5, and the layers of Qwen3-Next-80B-A3B in bfloat16.
    """

    fast_gbs: float = 4244.0
    cold_gbs: float = 48.0
    copy_gbs: float = 52.7
    expert_bytes: int | None = None
    layer_bytes: int = 98_500_000


DEFAULT_EXPERT_BYTES = 6_291_456


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The counters of one replay under the engine's names; per window where the name ends in _W.

    committed_5, verified_5: int64, in the order of `routing.COUNTER_NAMES`. moves: experts that were brought in, as
    far as a window saw them there. unknown: why nothing could be replayed; all else is empty then.
    """

    num_slots: int
    unknown: str | None = None
    rows: int = 0
    picks: int = 0
    committed_5: np.ndarray = field(default_factory=lambda: np.zeros(len(COUNTER_NAMES), np.int64))
    verified_5: np.ndarray = field(default_factory=lambda: np.zeros(len(COUNTER_NAMES), np.int64))
    layer_windows: int = 0
    distinct_experts: int = 0
    cold_experts: int = 0
    moves: int = 0
    expert_bytes: int = 0
    picks_W: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cold_picks_W: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    ms_W: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def windows(self) -> int:
        return len(self.ms_W)

    @property
    def hit_rate(self) -> float:
        return 1 - float(self.committed_5[3]) / self.picks

    def hit_rate_of(self, first: int, end: int) -> float:
        """Of windows first .. end - 1."""
        return 1 - float(self.cold_picks_W[first:end].sum() / self.picks_W[first:end].sum())

    @property
    def ms_per_window(self) -> float:
        return float(np.median(self.ms_W))

    def figures(self) -> dict[str, Any]:
        """The figures by name; None where unknown."""
        known = self.unknown is None
        shown: dict[str, Any] = {
            "slots": self.num_slots,
            "windows": self.windows,
            "rows": self.rows,
            "picks": self.picks,
            "hit_rate": self.hit_rate if known else None,
            "cold_experts_per_layer_window": self.cold_experts / self.layer_windows if known else None,
            "cold_experts": self.cold_experts,
            "distinct_experts": self.distinct_experts,
            "bytes_slow": self.cold_experts * self.expert_bytes,
            "moves": self.moves,
            "bytes_moved": self.moves * self.expert_bytes,
            "ms_per_window": self.ms_per_window if known else None,
            "routing": dict(zip(COUNTER_NAMES, self.committed_5.tolist(), strict=True)),
            "verified": dict(zip(COUNTER_NAMES, self.verified_5.tolist(), strict=True)),
        }
        if known:
            return {**shown, "unknown": None}
        return {key: value if key == "slots" else None for key, value in shown.items()} | {
            "unknown": self.unknown
        }


def replay(
    recorded: Recording,
    *,
    num_slots: int,
    policy: Policy | None = None,
    rule: str = "off",
    learned: Profile | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    rates: Rates | None = None,
) -> Replayed:
    """Run a recording through `num_slots` slots that `learned` fills (evenly spread without), under an admission rule.

    rule: `off`, `lfu` or `lru`. policy None: the router's own picks. `budget_bytes` counts experts of the recording's
    size, as the engine does.
    """
    assert rule in ("off", "lfu", "lru")
    unknown = None if policy is None else why_unknown(policy, recorded)
    if unknown is not None:
        return Replayed(num_slots=num_slots, unknown=unknown)
    return _Run(recorded, num_slots, policy, rule, learned, budget_bytes, rates or Rates()).result()


def expert_bytes_of(recorded: Recording, rates: Rates) -> int:
    """The size of an expert that a replay takes: the one asked for, the recording's own, or that of the defaults."""
    return rates.expert_bytes or recorded.expert_bytes or DEFAULT_EXPERT_BYTES


def why_unknown(policy: Policy, recorded: Recording) -> str | None:
    """Why a recording holds too few scores for a policy; None where they suffice."""
    margin = recorded.margin
    if margin is None or isinstance(policy, (Exact, FewerPicks)):
        return None
    if type(policy) in (MarginSwap, WindowJoint):
        margins = policy.margin  # type: ignore[attr-defined]
        needed = max(margins) if isinstance(margins, tuple) else margins
    elif type(policy) is AdditiveBias:
        needed = abs(policy.beta)
    elif type(policy) is DropCold and recorded.renormalize:
        return None
    elif type(policy) is MaxRank:
        least = int(recorded.count_NL.min())
        if policy.max_rank <= least:
            return None
        return f"it needs the first {policy.max_rank} ranks, and a row has {least} of them recorded"
    else:
        return f"it needs every score, and those within {margin:g} of the last pick were recorded"
    if needed <= margin:
        return None
    return f"it needs scores within {needed:g} of the last pick, and those within {margin:g} were recorded"


class _Run:
    """One replay: the residency, the counters, and a loop over windows."""

    def __init__(
        self,
        recorded: Recording,
        num_slots: int,
        policy: Policy | None,
        rule: str,
        learned: Profile | None,
        budget_bytes: int,
        rates: Rates,
    ) -> None:
        num_layers, num_experts = recorded.num_layers, recorded.num_experts
        self.recorded = recorded
        self.num_slots = num_slots
        self.rates = rates
        self.expert_bytes = expert_bytes_of(recorded, rates)
        chosen = (
            profile.spread_evenly(num_layers, num_experts, num_slots)
            if learned is None
            else learned.hottest(num_slots)
        )
        owners = [layer * num_experts + expert for layer, expert in chosen]
        self.slot_LE = torch.full((num_layers, num_experts), -1, dtype=torch.int32)
        self.slot_X = self.slot_LE.view(-1).numpy()
        self.slot_X[owners] = np.arange(len(owners))
        self.owners: list[int] = owners
        self.admission: Admission | None = None
        if rule != "off" and 0 < num_slots < num_layers * num_experts:
            self.admission = Admission(
                rule,
                num_layers=num_layers,
                num_experts=num_experts,
                owners=owners,
                expert_bytes=self.expert_bytes,
                budget_bytes=budget_bytes,
                prior=None if learned is None else prior_of(learned.counts_LE.ravel().tolist()),
                picks_a_row=num_layers * recorded.top_k,
            )
        self.route: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]] = (
            self._route_exactly if policy is None or type(policy) is Exact else self._policy_route(policy)
        )

    def result(self) -> Replayed:
        recorded, num_windows = self.recorded, len(self.recorded.windows)
        committed_5, verified_5 = (np.zeros(len(COUNTER_NAMES), np.int64) for _ in range(2))
        picks_W, cold_picks_W, ms_W = (np.zeros(num_windows, kind) for kind in (np.int64, np.int64, float))
        distinct = cold = moves = 0
        pending: list[Any] = []
        for number, (first, end, kept) in enumerate(recorded.windows):
            ids_TLK, counters_T5 = self.route(first, end, kept)
            distinct_L, cold_L = self._distinct(ids_TLK)
            distinct += int(distinct_L.sum())
            cold += int(cold_L.sum())
            committed_5 += counters_T5[:kept].sum(axis=0)
            verified_5 += counters_T5.sum(axis=0)
            picks_W[number] = (ids_TLK[:kept] >= 0).sum()
            cold_picks_W[number] = counters_T5[:kept, 3].sum()
            ms_W[number] = self._ms(distinct_L, cold_L, len(pending))
            if self.admission is not None:
                self._publish(pending)
                moves += len(pending)
                own_LTK = recorded.own_NLK[first : first + kept].transpose(1, 0, 2)
                pending = self.admission.after_window(flat_rows(own_LTK, recorded.num_experts))
                for arrival in pending:
                    if self.owners[arrival.slot] >= 0:
                        self.slot_X[self.owners[arrival.slot]] = -1
                    self.owners[arrival.slot] = -1
        return Replayed(
            num_slots=self.num_slots,
            rows=int(recorded.committed_N.sum()),
            picks=int(picks_W.sum()),
            committed_5=committed_5,
            verified_5=verified_5,
            layer_windows=num_windows * recorded.num_layers,
            distinct_experts=distinct,
            cold_experts=cold,
            moves=moves,
            expert_bytes=self.expert_bytes,
            picks_W=picks_W,
            cold_picks_W=cold_picks_W,
            ms_W=ms_W,
        )

    def _publish(self, arrivals: list[Any]) -> None:
        for arrival in arrivals:
            self.slot_X[arrival.expert] = arrival.slot
            self.owners[arrival.slot] = arrival.expert

    def _route_exactly(self, first: int, end: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [T, L, K] and counters [T, 5] of the router's own picks."""
        ids_TLK = self.recorded.own_NLK[first:end]
        cold_T = (self._slots_of(ids_TLK) < 0).sum(axis=(1, 2))
        counters_T5 = np.zeros((end - first, len(COUNTER_NAMES)), np.int64)
        counters_T5[:, [0, 2, 3]] = cold_T[:, None]
        return ids_TLK, counters_T5

    def _policy_route(self, policy: Policy) -> Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]:
        """The same by a policy, through what the engine's routers share."""
        recorded = self.recorded
        rule = RouterRule(top_k=recorded.top_k, renormalize=recorded.renormalize)
        most_rows = max(end - first for first, end, _ in recorded.windows)
        routing = Routing(policy, rule, self.slot_LE, max_rows=most_rows)
        layers = [MoeLayer(index=index, path="", rule=rule) for index in range(recorded.num_layers)]

        def route(first: int, end: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
            routing.begin(recorded.position_N[first:end].tolist())
            for layer in layers:
                routing.route(layer, torch.from_numpy(recorded.scores_TE(first, end, layer.index)))
            routing.commit(kept)
            ids_TLK = torch.stack([routed.ids_TK for routed in routing.made], dim=1).numpy()
            counters_T5 = torch.stack([routed.counters_T5 for routed in routing.made]).sum(dim=0).numpy()
            return ids_TLK, counters_T5

        return route

    def _slots_of(self, ids_TLK: np.ndarray) -> np.ndarray:
        """int32, the slot of each pick, -1 where it is cold; of padding the last expert's."""
        layers_L1 = np.arange(self.recorded.num_layers)[:, None] * self.recorded.num_experts
        return self.slot_X[ids_TLK + layers_L1]

    def _distinct(self, ids_TLK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distinct experts and cold ones among them that the rows of a window pick, int64 [L] each."""
        num_rows, num_layers, _ = ids_TLK.shape
        if num_rows == 1:  # a row picks no expert twice
            real_LK = ids_TLK[0] >= 0
            cold_LK = real_LK & (self._slots_of(ids_TLK)[0] < 0)
            return real_LK.sum(axis=1), cold_LK.sum(axis=1)
        picked_LE = np.zeros((num_layers, self.recorded.num_experts + 1), bool)
        layer_TLK = np.broadcast_to(np.arange(num_layers)[None, :, None], ids_TLK.shape)
        picked_LE[layer_TLK, ids_TLK] = True  # -1 falls into the last column
        picked_LE = picked_LE[:, :-1]
        return picked_LE.sum(axis=1), (picked_LE & (self.slot_LE.numpy() < 0)).sum(axis=1)

    def _ms(self, distinct_L: np.ndarray, cold_L: np.ndarray, copies: int) -> float:
        rates, size = self.rates, self.expert_bytes
        resident_sec_L = (distinct_L - cold_L) * size / (1e9 * rates.fast_gbs)
        cold_sec_L = cold_L * size / (1e9 * rates.cold_gbs)
        other_sec = self.recorded.num_layers * rates.layer_bytes / (1e9 * rates.fast_gbs)
        copy_sec = copies * size / (1e9 * rates.copy_gbs)
        return 1e3 * float(other_sec + np.maximum(resident_sec_L, cold_sec_L).sum() + copy_sec)

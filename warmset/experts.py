"""Runs the picked experts: on a GPU by the kernels of `device_experts`, elsewhere in plain torch, as follows.

Resident experts run from their slots, cold ones from staging: the first of a layer's cold experts are being read
together while the residents run, and each place is filled again as soon as its expert has run. The picks of all rows
are grouped by distinct expert, so a cold expert is read once however many rows picked it. A pick of -1 or E is
padding: no slot is looked up and it adds nothing. The weighted sum goes in rank order, in float32. Resident and cold
experts run the same operation on matrices of the same alignment, so the result does not depend on where an expert
lies. Knows no router, no policy and no model.

    x_TH        [T, H]   hidden states, compute dtype
    ids_TK      [T, K]   int, expert of each pick
    weights_TK  [T, K]   float32 or compute dtype
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from warmset.copies import Staging
from warmset.device_experts import DeviceExperts
from warmset.landing import num_stagings
from warmset.slots import Slots
from warmset.stages import StageClock
from warmset.store import Store


@dataclass
class ReadCounts:
    """What the experts of the counted windows read: distinct experts and bytes by tier."""

    layer_windows: int = 0
    distinct_experts: int = 0
    cold_experts: int = 0
    bytes_fast: int = 0
    bytes_slow: int = 0


@dataclass(frozen=True)
class _Group:
    expert: int
    picks: torch.Tensor  # int64, indices into the flattened [T * K] picks


class ExpertRunner:
    """The experts of all layers of one model, on one device."""

    def __init__(
        self,
        slots: Slots,
        store: Store,
        activation: Callable[[torch.Tensor], torch.Tensor],
        clock: StageClock,
        device_experts: DeviceExperts | None = None,
    ) -> None:
        self.slots = slots
        self.store = store
        self.device_experts = device_experts
        self._counts = ReadCounts()
        self._activation = activation
        self._clock = clock
        self._stagings: list[Staging] = []

    @property
    def counts(self) -> ReadCounts:
        """What was read since the counts were last replaced; asking may wait for the device."""
        if self.device_experts is not None:
            distinct, cold = self.device_experts.take_counts()
            self._add(distinct - cold, cold)
            self.store.bytes_read += cold * self.store.layout.payload_bytes
        return self._counts

    @counts.setter
    def counts(self, counts: ReadCounts) -> None:
        _ = self.counts  # what is still on the device belongs to the old ones
        self._counts = counts

    def count_captured(self, layer_windows: int, distinct: int, cold: int) -> None:
        """What captured windows read, which run without this object."""
        self._counts.layer_windows += layer_windows
        self._add(distinct - cold, cold)
        self.store.bytes_read += cold * self.store.layout.payload_bytes

    def run(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Sum over ranks of weight * expert(x): [T, H] in the dtype of `x_TH`."""
        if self.device_experts is not None:
            self._counts.layer_windows += 1
            return self.device_experts.run(layer, x_TH, ids_TK, weights_TK)
        num_rows, top_k = ids_TK.shape
        out_PH = x_TH.new_zeros(num_rows * top_k, x_TH.shape[1])
        resident, cold = self._split(layer, _groups(ids_TK, self.store.num_experts))
        stagings: list[Staging] = []
        if cold:
            with self._clock.stage("cold wait"):
                stagings = self._begin_first(layer, cold)
        with self._clock.stage("resident experts"):
            for group in resident:
                views = self.slots.views(self.slots.slot_of(layer, group.expert))
                self._run_one(views, group, x_TH, top_k, out_PH)
        if cold:
            with self._clock.stage("cold wait"):
                for number, group in enumerate(cold):
                    staging = stagings[number % len(stagings)]
                    staging.arrive()
                    self.store.bytes_read += self.store.layout.payload_bytes
                    self._run_one(staging.views, group, x_TH, top_k, out_PH)
                    if number + len(stagings) < len(cold):
                        staging.begin(self.store, layer, cold[number + len(stagings)].expert)
        self._counts.layer_windows += 1
        self._add(len(resident), len(cold))
        with self._clock.stage("combine"):
            return _combine(out_PH.view(num_rows, top_k, -1), weights_TK)

    def _begin_first(self, layer: int, cold: list[_Group]) -> list[Staging]:
        """Start to read as many cold experts as there may be staging for; one place for each."""
        count = min(len(cold), num_stagings(self.slots.layout.nbytes))
        while len(self._stagings) < count:
            self._stagings.append(Staging(self.store, self.slots.layout, self.slots.device))
        stagings = self._stagings[:count]
        for staging, group in zip(stagings, cold, strict=False):
            staging.begin(self.store, layer, group.expert)
        return stagings

    def _split(self, layer: int, groups: list[_Group]) -> tuple[list[_Group], list[_Group]]:
        resident = [group for group in groups if self.slots.slot_of(layer, group.expert) >= 0]
        cold = [group for group in groups if self.slots.slot_of(layer, group.expert) < 0]
        return resident, cold

    def _run_one(
        self,
        views: tuple[torch.Tensor, torch.Tensor],
        group: _Group,
        x_TH: torch.Tensor,
        top_k: int,
        out_PH: torch.Tensor,
    ) -> None:
        gate_up, down = views
        picks = group.picks.to(x_TH.device)
        gate, up = F.linear(x_TH[picks // top_k], gate_up).chunk(2, dim=-1)
        out_PH[picks] = F.linear(self._activation(gate) * up, down)

    def _add(self, num_resident: int, num_cold: int) -> None:
        counts = self._counts
        counts.distinct_experts += num_resident + num_cold
        counts.cold_experts += num_cold
        counts.bytes_fast += num_resident * self.slots.layout.payload_bytes
        counts.bytes_slow += num_cold * self.store.layout.payload_bytes


def _groups(ids_TK: torch.Tensor, num_experts: int) -> list[_Group]:
    """The distinct experts in ascending order, each with its picks; padding is left out."""
    ids_P = ids_TK.reshape(-1).to(device="cpu", dtype=torch.int64)  # host sync: the loop below is on the host
    order_P = torch.argsort(ids_P, stable=True)
    experts, counts = torch.unique_consecutive(ids_P[order_P], return_counts=True)
    groups = zip(experts.tolist(), order_P.split(counts.tolist()), strict=True)
    return [_Group(expert, picks) for expert, picks in groups if 0 <= expert < num_experts]


def _combine(out_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum in rank order, so that a row's bits do not depend on the other rows."""
    weights_TK = weights_TK.float()
    total_TH = out_TKH[:, 0].float() * weights_TK[:, :1]
    for rank in range(1, out_TKH.shape[1]):
        total_TH += out_TKH[:, rank].float() * weights_TK[:, rank : rank + 1]
    return total_TH.to(out_TKH.dtype)

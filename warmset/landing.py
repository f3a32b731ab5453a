"""Cold experts that no kernel can read where they are, brought to places on the device before it runs them.

    pageable part of an arena     copied from where it lies, neighbours as one copy
    files                         read into staging in host memory, several in flight, each copied on as it arrives

`expect` starts the reads and returns, so that resident experts are launched beside them; `land` copies on the current
stream. Knows no picks, no tables and no kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from warmset.checkpoint import ExpertLayout
from warmset.copies import Staging
from warmset.store import ArenaStore, Store

STAGING_BYTES = 64 << 20
MAX_STAGINGS = 16


def num_stagings(nbytes: int) -> int:
    """Experts of `nbytes` bytes that are read at once: at least two, so that one is read while one is used."""
    return max(2, min(MAX_STAGINGS, STAGING_BYTES // nbytes))


def staging_bytes(raw: ExpertLayout, compute: ExpertLayout) -> int:
    """Host bytes of the staging for a checkpoint's experts, in their own dtype and, where it differs, converted."""
    each = compute.nbytes if raw.dtype == compute.dtype else raw.nbytes + compute.nbytes
    return num_stagings(compute.nbytes) * each


class Landing:
    """Brings experts of one store to a device, in the compute `layout`."""

    def __init__(self, store: Store, layout: ExpertLayout, device: torch.device) -> None:
        self._store = store
        self._layout = layout
        self._device = device
        self._stagings: list[Staging] = []
        self._copied: list[torch.cuda.Event | None] = []
        self._expected: list[tuple[int, int]] = []

    def expect(self, layer: int, experts: list[int]) -> None:
        """Start to read the first of `experts`, which `land` is given next; nothing to do for an arena."""
        if isinstance(self._store, ArenaStore):
            return
        count = min(len(experts), num_stagings(self._layout.nbytes))
        while len(self._stagings) < count:
            host = torch.device("cpu")
            pinned = self._device.type == "cuda"
            self._stagings.append(Staging(self._store, self._layout, host, pinned=pinned))
            self._copied.append(None)
        self._expected = [(layer, expert) for expert in experts[:count]]
        for number, expert in enumerate(experts[:count]):
            self._begin(number, layer, expert)

    def land(self, layer: int, experts: list[int], places_BN: torch.Tensor) -> None:
        """Copy experts to places 0, 1, ... (uint8 [N, layout.nbytes]), there for the current stream."""
        if isinstance(self._store, ArenaStore):
            self._copy_runs(self._store, layer, experts, places_BN)
            return
        ahead = min(len(experts), num_stagings(self._layout.nbytes))
        if self._expected != [(layer, expert) for expert in experts[:ahead]]:
            self.expect(layer, experts)
        self._expected = []
        for number, place_B in enumerate(places_BN[: len(experts)]):
            staging = self._stagings[number % ahead]
            staging.arrive()
            for target, source in zip(self._layout.views(place_B), staging.views, strict=True):
                target.copy_(source, non_blocking=True)
            if self._device.type == "cuda":
                self._copied[number % ahead] = torch.cuda.current_stream(self._device).record_event()
            if number + ahead < len(experts):
                self._begin(number % ahead, layer, experts[number + ahead])

    def _begin(self, number: int, layer: int, expert: int) -> None:
        copied, self._copied[number] = self._copied[number], None
        if copied is not None:  # host sync: the staging is still being copied from
            copied.synchronize()
        self._stagings[number].begin(self._store, layer, expert)

    def _copy_runs(self, arena: ArenaStore, layer: int, experts: list[int], places_BN: torch.Tensor) -> None:
        breaks = [0] + [index for index in range(1, len(experts)) if experts[index] != experts[index - 1] + 1]
        for first, end in pairwise([*breaks, len(experts)] if experts else []):
            row = arena.row(layer, experts[first])
            for begin, stop in arena.same_memory(row, row + end - first):
                place = first + begin - row
                places_BN[place : place + stop - begin].copy_(arena.arena_NB[begin:stop], non_blocking=True)

"""The fast tier: a fixed number of slots, and the table that says which expert lies in which.

    storage_SB   uint8 [slots, layout.nbytes]   one allocation, on the compute device
    table_LE     int32 [L, E]                   slot of each expert, -1 where it is cold (host)
    owner        slot -> (layer, expert)        the reverse map

and `AddressTable`, which says for each (layer, expert) where a kernel may read it: in its slot, or in the pinned
arena. Both device tables are rewritten in place, so a captured graph follows them.

All layers share the slots. Slots change only between windows; this module copies bytes and keeps the maps in
step, it does not decide who comes in (profile, admission) and does not compute (experts).
"""

from __future__ import annotations

import torch

from warmset.checkpoint import ExpertLayout
from warmset.store import Store, aligned_bytes


class Slots:
    """`num_slots` places of `layout` on `device`, for `num_layers` x `num_experts` experts."""

    def __init__(
        self,
        *,
        num_slots: int,
        layout: ExpertLayout,
        num_layers: int,
        num_experts: int,
        device: torch.device,
    ) -> None:
        assert 0 <= num_slots <= num_layers * num_experts, num_slots
        self.layout = layout
        self.device = device
        self.num_slots = num_slots
        self.storage_SB = aligned_bytes(num_slots * layout.nbytes, device).view(num_slots, layout.nbytes)
        self.table_LE = torch.full((num_layers, num_experts), -1, dtype=torch.int32)
        self.device_table_LE = self.table_LE.to(device)
        self.owner: list[tuple[int, int] | None] = [None] * num_slots
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = [
            layout.views(self.storage_SB[slot]) for slot in range(num_slots)
        ]

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.layout.nbytes

    def slot_of(self, layer: int, expert: int) -> int:
        return int(self.table_LE[layer, expert])

    def views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [2I, H] and down [H, I] of the expert in `slot`, in the slots' dtype."""
        return self._views[slot]

    def fill(self, chosen: list[tuple[int, int]], store: Store, progress=None) -> None:
        """Put `chosen` (layer, expert) pairs into slots 0, 1, ... and forget what lay there before.

        The pair list may be shorter than the slots; the rest stay free. Bytes are read in the checkpoint's
        dtype and converted once to the slots' own.
        """
        assert len(chosen) <= self.num_slots and len(set(chosen)) == len(chosen)
        self.table_LE.fill_(-1)
        self.owner = [None] * self.num_slots
        staging = Staging(store.layout, self.layout, self.device)
        for slot, (layer, expert) in enumerate(chosen):
            staging.load(store, layer, expert)
            for target, source in zip(self.views(slot), staging.views, strict=True):
                target.copy_(source)
            self.table_LE[layer, expert] = slot
            self.owner[slot] = (layer, expert)
            if progress is not None:
                progress(slot + 1, len(chosen))
        self.device_table_LE.copy_(self.table_LE)

    def check_contents(self, store: Store) -> None:
        """Each slot holds its expert's own bytes; a debug mode, since it reads every resident expert again."""
        staging = Staging(store.layout, self.layout, self.device)
        counted = store.bytes_read
        for slot, owner in enumerate(self.owner):
            if owner is None:
                continue
            staging.load(store, *owner)
            for held, source in zip(self.views(slot), staging.views, strict=True):
                assert torch.equal(held, source), f"slot {slot} does not hold expert {owner}"
        store.bytes_read = counted

    def check_integrity(self) -> None:
        """Table, reverse map and device table agree; called by tests after each step."""
        assert torch.equal(self.device_table_LE.cpu(), self.table_LE), "device table differs"
        resident = [tuple(pair) for pair in (self.table_LE >= 0).nonzero().tolist()]
        owners = [owner for owner in self.owner if owner is not None]
        assert sorted(resident) == sorted(owners), "table and reverse map differ"
        for slot, owner in enumerate(self.owner):
            assert owner is None or self.slot_of(*owner) == slot, f"slot {slot} is claimed twice"


class AddressTable:
    """Where a kernel may read each expert: int64 [L, E], on the host and on the device.

    The slot's address where the expert is resident, else the arena's where that is pinned and readable, else 0:
    such an expert must be copied to the device before a kernel runs it.
    """

    def __init__(self, slots: Slots, store: Store) -> None:
        self._slots = slots
        self._store = store
        self.table_LE = torch.zeros(slots.table_LE.shape, dtype=torch.int64)
        self.device_table_LE = torch.zeros_like(self.table_LE, device=slots.device)
        self.rewrite()

    def _expected(self) -> torch.Tensor:
        slots = self._slots
        base = slots.storage_SB.data_ptr() if slots.num_slots else 0
        in_slot_LE = base + slots.table_LE.long() * slots.layout.nbytes
        return torch.where(slots.table_LE >= 0, in_slot_LE, self._store.addresses())

    def rewrite(self) -> None:
        """Follow the slots; between windows only."""
        self.table_LE.copy_(self._expected())
        self.device_table_LE.copy_(self.table_LE)

    @property
    def all_readable(self) -> bool:
        """Whether no expert ever needs a copy before it runs."""
        return bool((self._store.addresses() != 0).all())

    def check_integrity(self) -> None:
        """The tables say what slots and store say; entries of experts that are copied first are left out."""
        assert torch.equal(self.table_LE, self._expected()), "address table is stale"
        known = self.table_LE != 0
        assert torch.equal(self.device_table_LE.cpu()[known], self.table_LE[known]), "device addresses differ"


class Staging:
    """One aligned place a cold expert is read into: checkpoint bytes in, compute-dtype matrices out.

    `views` are gate_up [2I, H] and down [H, I] on the compute device, in the slots' dtype and alignment, so
    that a cold expert runs the same arithmetic as a resident one.
    """

    def __init__(self, raw: ExpertLayout, compute: ExpertLayout, device: torch.device) -> None:
        self._convert = raw.dtype != compute.dtype
        # A device copy converts nothing: a dtype change goes through the host.
        self._raw_B = aligned_bytes(raw.nbytes, "cpu" if self._convert else device)
        self._raw_views = raw.views(self._raw_B)
        self.views = (
            compute.views(aligned_bytes(compute.nbytes, device)) if self._convert else self._raw_views
        )

    def load(self, store: Store, layer: int, expert: int) -> None:
        store.read(layer, expert, self._raw_B)
        if self._convert:
            for target, source in zip(self.views, self._raw_views, strict=True):
                target.copy_(source)

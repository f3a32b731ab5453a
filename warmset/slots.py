"""The fast tier: a fixed number of slots, and the tables that say which expert lies in which.

    slabs        uint8 [n, layout.nbytes] each   the slots' memory, on the compute device
    table_LE     int32 [L, E]                    slot of each expert, -1 where it is cold (host)
    owner        slot -> (layer, expert)         the reverse map, None where the slot is free
    pending      moves whose bytes are under way: their slots are in no table

and `AddressTable`, which says for each (layer, expert) where a kernel may read it: in its slot, or in the pinned
arena. Both device tables are rewritten in place, so a captured graph follows them.

All layers share the slots. Slots change only between windows: `start` takes the former owners out of the tables and
lets copies run beside the windows that follow, `finish` puts the new ones in. Memory comes in slabs, so that
`resize` gives some of it back without a second copy of the rest. This module copies bytes and keeps the maps in step;
it does not decide who comes in (profile, admission) and does not compute (experts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from warmset.checkpoint import ExpertLayout
from warmset.copies import Copies, Copy, Staging
from warmset.store import Store, aligned_bytes

SLAB_BYTES = 256 << 20
FILL_AHEAD = 8
"""Copies that are under way at once while slots are filled."""


@dataclass(frozen=True)
class Move:
    """Expert (layer, expert) is to lie in `slot`."""

    slot: int
    layer: int
    expert: int

    @property
    def pair(self) -> tuple[int, int]:
        return self.layer, self.expert


class Slots:
    """`num_slots` places of `layout` on `device`, for `num_layers` x `num_experts` experts.

    checked: a debug mode. Each slot is compared with its source after every fill and move, and `check_integrity`
    compares it with the checksum it had then.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        layout: ExpertLayout,
        num_layers: int,
        num_experts: int,
        device: torch.device,
        checked: bool = False,
    ) -> None:
        assert 0 <= num_slots <= num_layers * num_experts, num_slots
        self.layout = layout
        self.device = device
        self.num_slots = num_slots
        self.checked = checked
        self.bytes_moved = 0
        """Checkpoint bytes that moves have brought in; the store counts them among its own too."""
        self.table_LE = torch.full((num_layers, num_experts), -1, dtype=torch.int32)
        self.device_table_LE = self.table_LE.to(device)
        self.owner: list[tuple[int, int] | None] = [None] * num_slots
        self.on_change: list[Callable[[], None]] = []
        """Called after the tables changed: with them change addresses."""
        self._slab_rows = max(1, SLAB_BYTES // layout.nbytes)
        self.slabs: list[torch.Tensor] = []
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._take_memory(num_slots)
        self._copies = Copies(layout, device)
        self._under_way: list[tuple[Move, Copy, Store]] = []
        self._checksums: dict[int, int] = {}
        self._all_resident = False

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.layout.nbytes

    @property
    def pending(self) -> list[Move]:
        """Moves that were started and not finished, in the order they were started."""
        return [move for move, _, _ in self._under_way]

    @property
    def all_resident(self) -> bool:
        """Whether every expert has a slot and lies in it; changes with a resize at most, never with a move."""
        return self._all_resident

    def slot_of(self, layer: int, expert: int) -> int:
        return int(self.table_LE[layer, expert])

    def slot_B(self, slot: int) -> torch.Tensor:
        """The slot's memory, uint8 [layout.nbytes] on the device."""
        return self.slabs[slot // self._slab_rows][slot % self._slab_rows]

    def views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [2I, H] and down [H, I] of the expert in `slot`, in the slots' dtype."""
        return self._views[slot]

    def addresses(self) -> torch.Tensor:
        """int64 [num_slots] on the host: where each slot begins."""
        stride = self.layout.nbytes
        parts = [slab.data_ptr() + stride * torch.arange(len(slab), dtype=torch.int64) for slab in self.slabs]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    # -- filling ----------------------------------------------------------------------------------------------

    def fill(self, chosen: list[tuple[int, int]], store: Store, progress=None) -> None:
        """Put `chosen` (layer, expert) pairs into slots 0, 1, ... and forget what lay there before.

        The pair list may be shorter than the slots; the rest stay free. Bytes are read in the checkpoint's
        dtype and converted once to the slots' own.
        """
        assert len(chosen) <= self.num_slots and len(set(chosen)) == len(chosen)
        self._drain()
        self.table_LE.fill_(-1)
        self.owner = [None] * self.num_slots
        self._checksums.clear()
        moves = [Move(slot, *pair) for slot, pair in enumerate(chosen)]
        begun: list[Copy] = []
        try:
            for number, move in enumerate(moves):
                while len(begun) < min(len(moves), number + FILL_AHEAD):
                    begun.append(self._begin(moves[len(begun)], store))
                begun[number].wait()
                self._enter(move, store)
                if progress is not None:
                    progress(number + 1, len(moves))
        finally:
            self._settle(begun)
            self.publish()

    # -- moves ------------------------------------------------------------------------------------------------

    def start(self, moves: list[Move], store: Store) -> None:
        """Begin to bring experts in; between windows only, on the stream that runs the windows.

        The former owner of each slot leaves the tables at once. The expert enters them with `finish`; until then
        it is cold and the slot is nobody's. Every expert must be cold and not under way, every slot not awaited.
        """
        awaited, coming = {move.slot for move in self.pending}, {move.pair for move in self.pending}
        for move in moves:
            assert 0 <= move.slot < self.num_slots and move.slot not in awaited, move
            assert self.slot_of(*move.pair) < 0 and move.pair not in coming, move
            awaited.add(move.slot)
            coming.add(move.pair)
        if not moves:
            return
        for move in moves:
            self._leave(move.slot)
        self.publish()
        for move in moves:
            self._under_way.append((move, self._begin(move, store), store))

    def finish(self) -> list[Move]:
        """Wait for every copy that was started, then enter them in the tables; between windows only.

        What was started between windows n and n+1 is resident from the boundary after n+1 on, however fast the
        copies were, so that a replay without a model counts the same. A copy that failed leaves its slot free;
        the others are entered, then the error is raised.
        """
        done: list[Move] = []
        failed: BaseException | None = None
        under_way, self._under_way = self._under_way, []
        for move, copy, store in under_way:
            try:
                copy.wait()
            except Exception as error:
                failed = failed or error
                continue
            self._enter(move, store)
            self.bytes_moved += store.layout.payload_bytes
            store.bytes_read += store.layout.payload_bytes
            done.append(move)
        if done:
            self.publish()
        if failed is not None:
            raise failed
        return done

    def _begin(self, move: Move, store: Store) -> Copy:
        return self._copies.begin(store, move.layer, move.expert, self.slot_B(move.slot))

    def _settle(self, copies: list[Copy]) -> None:
        """Wait for copies whose result nobody wants any more: their memory is written to until then."""
        for copy in copies:
            try:
                copy.wait()
            except Exception:
                continue

    def _drain(self) -> None:
        self._settle([copy for _, copy, _ in self._under_way])
        self._under_way = []

    def _enter(self, move: Move, store: Store) -> None:
        assert self.owner[move.slot] is None
        if self.checked:
            self._compare(move, store, Staging(store, self.layout, self.device))
            self._checksums[move.slot] = self._checksum(move.slot)
        self.table_LE[move.layer, move.expert] = move.slot
        self.owner[move.slot] = move.pair

    def _leave(self, slot: int) -> None:
        owner, self.owner[slot] = self.owner[slot], None
        self._checksums.pop(slot, None)
        if owner is not None:
            self.table_LE[owner] = -1

    def publish(self) -> None:
        """Let the device and whoever follows the tables see them as they are."""
        self.device_table_LE.copy_(self.table_LE)
        self._all_resident = bool((self.table_LE >= 0).all())
        for changed in self.on_change:
            changed()

    # -- memory -----------------------------------------------------------------------------------------------

    def resize(self, num_slots: int, store: Store, keep: list[tuple[int, int]] | None = None) -> None:
        """Have `num_slots` slots from now on, giving memory back or taking more; between windows only.

        keep: the residents that stay, the most wanted first, as far as they find a place (None: all, those in
        the lowest slots first). New slots are free. Copies under way are finished first. Addresses change: tables
        are rewritten in place, and `on_change` is called.
        """
        assert 0 <= num_slots <= self.table_LE.numel(), num_slots
        self.finish()
        resident = [owner for owner in self.owner if owner is not None]
        wanted = resident if keep is None else [pair for pair in keep if self.slot_of(*pair) >= 0]
        stay = set(list(dict.fromkeys(wanted))[:num_slots])
        for slot, owner in enumerate(self.owner):
            if owner is not None and owner not in stay:
                self._leave(slot)
        self._close_ranks(num_slots)
        self._take_memory(num_slots)
        self.owner = (self.owner + [None] * num_slots)[:num_slots]
        self.num_slots = num_slots
        self.publish()
        if self.checked:
            self.check_contents(store)

    def _close_ranks(self, num_slots: int) -> None:
        """Move the experts of slots that go into free ones that stay."""
        free = (slot for slot in range(min(num_slots, self.num_slots)) if self.owner[slot] is None)
        for slot in range(num_slots, self.num_slots):
            owner = self.owner[slot]
            if owner is None:
                continue
            place = next(free)
            self.slot_B(place).copy_(self.slot_B(slot))
            self.table_LE[owner] = place
            self.owner[place], self.owner[slot] = owner, None
            if slot in self._checksums:
                self._checksums[place] = self._checksums.pop(slot)

    def _take_memory(self, num_slots: int) -> None:
        """Slabs for `num_slots` slots: whole ones stay as they are, the last is as large as it must be."""
        rows, nbytes = self._slab_rows, self.layout.nbytes
        sizes = [min(rows, num_slots - first) for first in range(0, num_slots, rows)]
        if self.slabs and self.device.type == "cuda":  # host sync: kernels may still read what is given back
            torch.cuda.synchronize(self.device)
        self._views = []
        del self.slabs[len(sizes) :]
        for index, size in enumerate(sizes):
            old = self.slabs[index] if index < len(self.slabs) else None
            if old is not None and len(old) == size:
                continue
            new = aligned_bytes(size * nbytes, self.device).view(size, nbytes)
            if old is None:
                self.slabs.append(new)
            else:
                held = min(size, len(old))
                new[:held].copy_(old[:held])
                self.slabs[index] = new
            del old
        self._views = [self.layout.views(slot_B) for slab in self.slabs for slot_B in slab]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- checks -----------------------------------------------------------------------------------------------

    def check_contents(self, store: Store) -> None:
        """Each slot holds its expert's own bytes; a debug mode, since it reads every resident expert again."""
        staging = Staging(store, self.layout, self.device)
        for slot, owner in enumerate(self.owner):
            if owner is not None:
                self._compare(Move(slot, *owner), store, staging)

    def _compare(self, move: Move, store: Store, staging: Staging) -> None:
        staging.load(store, move.layer, move.expert)
        for held, source in zip(self.views(move.slot), staging.views, strict=True):
            same = torch.equal(held.view(torch.uint8), source.view(torch.uint8))
            assert same, f"slot {move.slot} does not hold expert {move.pair}"

    def _checksum(self, slot: int) -> int:
        words_N = self.slot_B(slot).view(torch.int64)
        odd_N = 2 * torch.arange(len(words_N), device=self.device) + 1
        return int((words_N * odd_N).sum())

    def check_integrity(self) -> None:
        """Tables, reverse map, free slots and pending moves agree; when `checked`, each slot's checksum too.

        Called by tests after each step and by idle loops; raises AssertionError.
        """
        assert torch.equal(self.device_table_LE.cpu(), self.table_LE), "device table differs"
        assert len(self.owner) == len(self._views) == self.num_slots == sum(map(len, self.slabs))
        resident = [tuple(pair) for pair in (self.table_LE >= 0).nonzero().tolist()]
        owners = [owner for owner in self.owner if owner is not None]
        assert sorted(resident) == sorted(owners), "table and reverse map differ"
        for slot, owner in enumerate(self.owner):
            assert owner is None or self.slot_of(*owner) == slot, f"slot {slot} is claimed twice"
        pending = self.pending
        assert len({move.slot for move in pending}) == len({move.pair for move in pending}) == len(pending)
        for move in pending:
            assert self.owner[move.slot] is None, f"slot {move.slot} is awaited and owned"
            assert self.slot_of(*move.pair) < 0, f"expert {move.pair} is awaited and resident"
        if self.checked:
            for slot, owner in enumerate(self.owner):
                same = owner is None or self._checksums[slot] == self._checksum(slot)
                assert same, f"slot {slot} no longer holds what was put there"


class AddressTable:
    """Where a kernel may read each expert: int64 [L, E], on the host and on the device.

    The slot's address where the expert is resident, else the arena's where that is pinned and readable, else 0:
    such an expert must be copied to the device before a kernel runs it. Follows the slots by itself.
    """

    def __init__(self, slots: Slots, store: Store) -> None:
        self._slots = slots
        self._store = store
        self.table_LE = torch.zeros(slots.table_LE.shape, dtype=torch.int64)
        self.device_table_LE = torch.zeros_like(self.table_LE, device=slots.device)
        self.rewrite()
        slots.on_change.append(self.rewrite)

    def _expected(self) -> torch.Tensor:
        table_LE = self._slots.table_LE
        if self._slots.num_slots == 0:
            return self._store.addresses()
        in_slot_LE = self._slots.addresses()[table_LE.long().clamp(min=0)]
        return torch.where(table_LE >= 0, in_slot_LE, self._store.addresses())

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

"""Slots that change between windows: moves, other sizes, failures, and 10,000 windows against a dense reference."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from disk_files import random_experts, write_experts
from helpers import decode_with_logits, open_engine

from warmset import slots as slots_module
from warmset.checkpoint import ExpertLayout
from warmset.errors import CheckpointError
from warmset.experts import ExpertRunner
from warmset.routing import Exact, MarginSwap, RouteContext, RouterRule
from warmset.slots import AddressTable, Move, Slots
from warmset.stages import StageClock
from warmset.store import ArenaStore, FileStore

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K = 2, 7, 3
LAYOUT = ExpertLayout(hidden=12, width=10, dtype=torch.float32)
NAN = float("nan")
RULE = RouterRule(top_k=TOP_K, renormalize=True)


@dataclass
class World:
    experts_LE: list
    expert_map: object

    def slots(self, num_slots: int, **settings) -> Slots:
        made = Slots(
            num_slots=num_slots, layout=LAYOUT, num_layers=LAYERS, num_experts=EXPERTS, device=CPU, **settings
        )
        for slab in made.slabs:
            slab.view(torch.float32).fill_(NAN)
        return made

    def holds(self, slots: Slots) -> bool:
        """Whether every resident lies in its slot, byte for byte."""
        return all(
            torch.equal(held, source)
            for slot, owner in enumerate(slots.owner)
            if owner is not None
            for held, source in zip(slots.views(slot), self.experts_LE[owner[0]][owner[1]], strict=True)
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    experts_LE = random_experts(LAYERS, EXPERTS, LAYOUT)
    file = tmp_path_factory.mktemp("slots") / "experts"
    return World(experts_LE, write_experts(file, experts_LE, LAYOUT))


class HeldBack(FileStore):
    """Files whose reads wait for `go`, and then fail for the experts in `broken`."""

    def __init__(self, expert_map) -> None:
        super().__init__(expert_map, "released")
        self.go = threading.Event()
        self.broken: set[tuple[int, int]] = set()

    def begin(self, layer, expert, out_B):
        reading = super().begin(layer, expert, out_B)
        store, wait = self, reading.wait

        class Slow:
            def wait(self) -> None:
                store.go.wait(10)
                wait()
                if (layer, expert) in store.broken:
                    raise CheckpointError("the file ended early")

        return Slow()


def test_a_move_takes_the_old_owner_out_at_once_and_the_new_one_in_with_finish(world):
    slots, store = world.slots(3), HeldBack(world.expert_map)
    store.go.set()
    slots.fill([(0, 0), (1, 1)], store)
    store.go.clear()
    store.reset_counts()
    slots.start([Move(0, 1, 4), Move(2, 0, 6)], store)
    slots.check_integrity()
    assert slots.slot_of(0, 0) == -1, "the former owner is out"
    assert slots.slot_of(1, 4) == -1 == slots.slot_of(0, 6), "the new ones are not in yet"
    assert slots.owner == [None, (1, 1), None] and len(slots.pending) == 2
    assert slots.bytes_moved == store.bytes_read == 0
    store.go.set()
    assert slots.finish() == [Move(0, 1, 4), Move(2, 0, 6)]
    slots.check_integrity()
    assert slots.owner == [(1, 4), (1, 1), (0, 6)] and world.holds(slots)
    assert slots.bytes_moved == store.bytes_read == 2 * LAYOUT.payload_bytes
    assert slots.finish() == [] and slots.pending == []
    assert torch.equal(slots.device_table_LE, slots.table_LE)


def test_a_read_that_fails_leaves_its_slot_free_and_the_tables_whole(world):
    slots, store = world.slots(3, checked=True), HeldBack(world.expert_map)
    store.go.set()
    slots.fill([(0, 0), (0, 1), (0, 2)], store)
    store.broken = {(1, 3)}
    slots.start([Move(0, 1, 3), Move(1, 1, 2)], store)
    with pytest.raises(CheckpointError, match="ended early"):
        slots.finish()
    slots.check_integrity()
    assert slots.owner == [None, (1, 2), (0, 2)] and slots.pending == [] and world.holds(slots)
    store.broken = {(1, 5)}
    with pytest.raises(CheckpointError, match="ended early"):
        slots.fill([(1, 0), (1, 5), (1, 6)], store)
    slots.check_integrity()
    assert slots.owner == [(1, 0), None, None]


@pytest.mark.parametrize(
    "moves",
    [
        [Move(3, 1, 0)],  # no such slot
        [Move(0, 0, 1)],  # resident already
        [Move(0, 1, 0), Move(0, 1, 2)],  # one slot twice
        [Move(0, 1, 0), Move(1, 1, 0)],  # one expert twice
        [Move(2, 1, 0)],  # the slot is awaited
        [Move(0, 1, 6)],  # the expert is under way
    ],
)
def test_moves_that_cannot_be_are_refused_whole(world, moves):
    slots, store = world.slots(3), FileStore(world.expert_map)
    slots.fill([(0, 0), (0, 1)], store)
    slots.start([Move(2, 1, 6)], store)
    with pytest.raises(AssertionError):
        slots.start(moves, store)
    slots.check_integrity()
    assert slots.owner == [(0, 0), (0, 1), None] and slots.finish() == [Move(2, 1, 6)]


@pytest.mark.parametrize("source", ["files", "other dtype", "arena"])
def test_every_way_of_a_copy_brings_the_same_bytes(world, tmp_path, source):
    """C11: straight into the slot, through staging with another dtype, out of an arena; checked after each."""
    if source == "other dtype":
        narrow = LAYOUT.with_dtype(torch.float16)
        stored = [[tuple(m.half() for m in pair) for pair in row] for row in world.experts_LE]
        store = FileStore(write_experts(tmp_path / "half", stored, narrow), "direct")
        expected = World([[tuple(m.float() for m in pair) for pair in row] for row in stored], None)
    else:
        store, expected = FileStore(world.expert_map, "direct"), world
        store = ArenaStore(store) if source == "arena" else store
    slots = world.slots(5, checked=True)
    slots.fill([(0, expert) for expert in range(4)], store)
    slots.start([Move(slot, 1, slot + 2) for slot in range(5)], store)
    slots.finish()
    slots.check_integrity()
    assert slots.owner == [(1, slot + 2) for slot in range(5)] and expected.holds(slots)


def test_what_begins_in_inference_mode_may_end_outside_of_it(world):
    """Windows run in inference mode, copies in threads of their own, which do not."""
    slots, store = world.slots(4), ArenaStore(FileStore(world.expert_map))
    with torch.inference_mode():
        slots.resize(6, store)
        slots.start([Move(5, 0, 1)], store)
    slots.finish()
    slots.start([Move(5, 0, 2)], store)
    with torch.inference_mode():
        slots.finish()
        slots.resize(14, store)
    slots.fill([(1, 1)], store)
    assert world.holds(slots)
    slots.check_integrity()


def test_the_checks_see_what_they_are_for(world):
    store = FileStore(world.expert_map)

    def fresh() -> Slots:
        slots = world.slots(4, checked=True)
        slots.fill([(0, 0), (0, 1), (1, 1)], store)
        slots.check_integrity()
        return slots

    def overwrite(slots: Slots) -> None:
        slots.views(1)[1][3, 3] += 1

    def swap_owners(slots: Slots) -> None:
        slots.owner[0], slots.owner[1] = slots.owner[1], slots.owner[0]

    def stale_device(slots: Slots) -> None:
        slots.device_table_LE[0, 0] = -1

    def lost(slots: Slots) -> None:
        slots.owner[2] = None

    def awaited_and_owned(slots: Slots) -> None:
        slots.start([Move(3, 1, 5)], store)
        slots.owner[3] = (0, 5)
        slots.table_LE[0, 5] = slots.device_table_LE[0, 5] = 3

    for damage in (overwrite, swap_owners, stale_device, lost, awaited_and_owned):
        slots = fresh()
        damage(slots)
        with pytest.raises(AssertionError):
            slots.check_integrity()
    slots = fresh()
    overwrite(slots)
    with pytest.raises(AssertionError, match="slot 1 does not hold"):
        slots.check_contents(store)


@pytest.mark.parametrize("slab_slots", [1, 3, 100])
def test_slots_shrink_and_grow_with_their_experts(world, monkeypatch, slab_slots):
    monkeypatch.setattr(slots_module, "SLAB_BYTES", slab_slots * LAYOUT.nbytes)
    slots, store = world.slots(8, checked=True), FileStore(world.expert_map)
    table = AddressTable(slots, store)
    slots.fill([(0, expert) for expert in range(7)], store)
    slots.start([Move(7, 1, 3), Move(2, 1, 2)], store)
    slots.resize(5, store)  # copies under way are finished first
    assert slots.owner == [(0, 0), (0, 1), (1, 2), (0, 3), (0, 4)] and slots.nbytes == 5 * LAYOUT.nbytes
    slots.resize(2, store, keep=[(1, 6), (0, 4), (0, 1), (0, 3)])
    assert sorted(slots.owner) == [(0, 1), (0, 4)], "the most wanted of those that are resident"
    slots.resize(6, store)
    assert slots.owner[2:] == [None] * 4
    slots.start([Move(5, 1, 0)], store)
    slots.finish()
    for size in (0, 14, 6):
        before = [owner for owner in slots.owner if owner is not None]
        slots.resize(size, store)
        assert size == 0 or [owner for owner in slots.owner if owner is not None] == before
        assert world.holds(slots) and sum(map(len, slots.slabs)) == size
        slots.check_integrity()
        table.check_integrity()
    assert all(slots.slot_B(slot).data_ptr() % 128 == 0 for slot in range(6))
    assert slots.addresses().tolist() == [slots.slot_B(slot).data_ptr() for slot in range(6)]


def resize_and_measure(folder: str) -> list[int]:
    """Resident bytes with 128 slots of 3 MiB, after shrinking to 16, and after growing back."""
    layout = ExpertLayout(hidden=512, width=512, dtype=torch.float32)
    store = FileStore(write_experts(Path(folder) / "experts", random_experts(1, 1, layout), layout))
    slots = Slots(num_slots=128, layout=layout, num_layers=1, num_experts=200, device=CPU)
    found = []
    for number in (128, 16, 128):
        slots.resize(number, store)
        for slab in slots.slabs:
            slab.fill_(1)
        found.append(psutil.Process().memory_info().rss)
    return found


def test_memory_of_slots_that_go_comes_back(tmp_path):
    """In a process of its own: what other tests hold and let go would be counted too."""
    code = "import sys, test_slots; print(test_slots.resize_and_measure(sys.argv[1]))"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    full, shrunk, again = json.loads(answer.stdout)
    assert full - shrunk >= 0.95 * 112 * 3 * 2**20
    assert abs(again - full) <= 0.05 * full


def test_tokens_are_the_same_while_slots_shrink_grow_and_move(checkpoints, prompt_ids):
    """C10, C31: an engine whose cache changes at every window, against one that holds everything."""
    expected, expected_logits = decode_with_logits(
        open_engine(checkpoints["qwen3_next"], "all"), prompt_ids, 24
    )
    engine = open_engine(checkpoints["qwen3_next"], "50%", check_slots=True)
    slots, store, step, number = engine.slots, engine.store, engine.windows.step, 0

    def changing(sequence, token):
        nonlocal number
        slots.finish()
        if number % 4 == 0:
            slots.resize((16, 3, 0, 32, 9)[number // 4 % 5], store)
        cold = [tuple(pair) for pair in (slots.table_LE < 0).nonzero().tolist()]
        slots.start(
            [Move(s, *pair) for s, pair in zip(range(0, slots.num_slots, 3), cold, strict=False)], store
        )
        number += 1
        return step(sequence, token)

    engine.windows.step = changing
    tokens, logits = decode_with_logits(engine, prompt_ids, 24)
    assert tokens == expected and torch.equal(logits, expected_logits)
    assert number == 23 and slots.bytes_moved > 0


# -- 10,000 windows -----------------------------------------------------------------------------------------------


def dense(world: World, layer: int, x_TH, ids_TK, weights_TK) -> torch.Tensor:
    """Every expert on every row in float64, weighted; nothing is grouped, cached or skipped."""
    gate_up = torch.stack([pair[0] for pair in world.experts_LE[layer]]).double()
    down = torch.stack([pair[1] for pair in world.experts_LE[layer]]).double()
    gate, up = torch.einsum("th,eih->tei", x_TH.double(), gate_up).chunk(2, dim=-1)
    out_TEH = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    mixed_TE = torch.zeros(len(x_TH), EXPERTS, dtype=torch.float64)
    mixed_TE.scatter_add_(1, ids_TK.long(), weights_TK.double())
    return torch.einsum("te,teh->th", mixed_TE, out_TEH)


class Fuzz:
    """One cache through its life: each window routes, runs, moves and now and then changes size."""

    def __init__(self, world: World, store: FileStore, seed: int) -> None:
        self.world, self.store = world, store
        self.generator = torch.Generator().manual_seed(seed)
        self.slots = world.slots(self.draw(0, LAYERS * EXPERTS), checked=seed % 4 == 0)
        self.table = AddressTable(self.slots, store)
        order = torch.randperm(LAYERS * EXPERTS, generator=self.generator).tolist()
        chosen = [divmod(index, EXPERTS) for index in order[: self.draw(0, self.slots.num_slots)]]
        self.slots.fill(chosen, store)
        self.runner = ExpertRunner(self.slots, store, F.silu, StageClock(CPU, enabled=False))
        self.cold = 0

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def between_windows(self) -> None:
        slots = self.slots
        slots.finish()
        if self.draw(0, 19) == 0:
            slots.resize(self.draw(0, LAYERS * EXPERTS), self.store)
        if slots.num_slots and self.draw(0, 1):
            cold = (slots.table_LE < 0).nonzero().tolist()
            count = min(len(cold), slots.num_slots, self.draw(1, 3))
            places = torch.randperm(slots.num_slots, generator=self.generator)[:count].tolist()
            picked = torch.randperm(len(cold), generator=self.generator)[:count].tolist()
            slots.start([Move(s, *cold[p]) for s, p in zip(places, picked, strict=True)], self.store)
        awaited = {move.slot for move in slots.pending}
        for slot, owner in enumerate(slots.owner):
            if owner is None and slot not in awaited:
                slots.slot_B(slot).view(torch.float32).fill_(NAN)

    def window(self) -> None:
        self.between_windows()
        held = self.slots.table_LE.clone()
        policy = MarginSwap(margin=0.5) if self.draw(0, 2) == 0 else Exact()
        for layer in range(LAYERS):
            rows = self.draw(1, 4)
            logits_TE = torch.randn(rows, EXPERTS, generator=self.generator)
            x_TH = torch.randn(rows, LAYOUT.hidden, generator=self.generator)
            routed = policy.route(
                logits_TE, self.slots.device_table_LE[layer], rule=RULE, context=RouteContext(layer=layer)
            )
            self.cold += len({e for e in routed.ids_TK.flatten().tolist() if held[layer, e] < 0})
            got = self.runner.run(layer, x_TH, routed.ids_TK, routed.weights_TK)
            expected = dense(self.world, layer, x_TH, routed.ids_TK, routed.weights_TK)
            assert float((got.double() - expected).abs().max()) < 2e-6, (
                "another result, or free memory was read"
            )
        assert torch.equal(self.slots.table_LE, held), "residency changed inside a window"
        self.slots.check_integrity()
        self.table.check_integrity()


@pytest.mark.parametrize("mode", ["kept", "released", "direct"])
def test_fuzzed_windows_against_a_dense_reference(world, mode):
    """C09, C10: 10,000 windows over the three ways to read a file."""
    store = FileStore(world.expert_map, mode)
    windows = 3334 if mode == "kept" else 3333
    for seed in range(windows // 50 + 1):
        fuzz = Fuzz(world, store, seed)
        for number in range(min(50, windows - 50 * seed)):
            try:
                fuzz.window()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, window {number}: {error}") from error
        assert fuzz.runner.counts.cold_experts == fuzz.cold
        fuzz.slots.finish()
        assert world.holds(fuzz.slots)


def test_a_copy_that_is_slow_changes_nothing(world):
    """C10: 50 ms before a copy ends, an eviction at every boundary: the results of a cache that never changes."""
    store = HeldBack(world.expert_map)
    store.go.set()
    slots, still = world.slots(3), world.slots(3)
    for cache in (slots, still):
        cache.fill([(0, 0), (0, 1), (0, 2)], store)
    runners = [
        ExpertRunner(cache, FileStore(world.expert_map), F.silu, StageClock(CPU)) for cache in (slots, still)
    ]
    generator = torch.Generator().manual_seed(1)
    for number in range(12):
        store.go.clear()
        cold = (slots.table_LE < 0).nonzero().tolist()
        slots.start([Move(number % 3, *cold[number % len(cold)])], store)
        for layer in range(LAYERS):
            x_TH = torch.randn(2, LAYOUT.hidden, generator=generator)
            ids_TK = torch.rand(2, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
            weights_TK = torch.rand(2, TOP_K, generator=generator)
            one, other = (runner.run(layer, x_TH, ids_TK, weights_TK) for runner in runners)
            assert torch.equal(one, other)
        threading.Timer(0.05, store.go.set).start()
        start = time.perf_counter()
        slots.finish()
        assert time.perf_counter() - start >= 0.03, "finish did not wait"
        slots.check_integrity()
        assert world.holds(slots)

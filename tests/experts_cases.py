"""Cases for the expert kernels, run on a CPU in Triton's interpreter and on a GPU by the same code.

As a program: `python experts_cases.py NAME ...` runs cases on the CPU and prints {name: null or the traceback} as
JSON. The interpreter is chosen when triton is imported, so the caller sets TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from disk_files import write_experts

from warmset import device_experts, store
from warmset.checkpoint import ExpertLayout, Segment
from warmset.device_experts import DeviceExperts
from warmset.slots import AddressTable, Move, Slots
from warmset.stages import StageClock
from warmset.store import ArenaStore, CudaPin, FileStore, Store

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Blank:
    """A source of experts without files: the arena is filled by the test."""

    def __init__(self, layers: int, experts: int, layout: ExpertLayout) -> None:
        self.num_layers, self.num_experts, self.layout = layers, experts, layout

    def in_file_order(self) -> Iterator[tuple[int, int, Segment]]:
        return iter(())


class Pinner:
    """Pins up to `limit` bytes: for real on a GPU, by saying so on a CPU."""

    def __init__(self, limit: float, device: torch.device) -> None:
        self.left = limit
        self.real = CudaPin(device) if device.type == "cuda" else None

    def pin(self, address: int, num_bytes: int) -> bool:
        self.left -= num_bytes
        return self.left >= 0 and (self.real is None or self.real.pin(address, num_bytes))

    def unpin(self, address: int) -> None:
        if self.real is not None:
            self.real.unpin(address)


class World:
    """Experts in an arena and in slots; free slots and buffers are NaN, so that whatever reads them shows."""

    def __init__(
        self,
        *,
        device: torch.device,
        experts: int = 16,
        hidden: int = 40,
        width: int = 24,
        layers: int = 2,
        dtype: torch.dtype = torch.float32,
        resident: list[tuple[int, int]] = (),
        free_slots: int = 0,
        pin_bytes: float = 1e18,
        activation: str = "silu",
        seed: int = 0,
    ) -> None:
        self.device, self.activation = device, activation
        self.generator = torch.Generator().manual_seed(seed)
        self.layout = ExpertLayout(hidden=hidden, width=width, dtype=dtype)
        self.pinner = Pinner(pin_bytes, device)
        self.arena = ArenaStore(
            Blank(layers, experts, self.layout), pin=self.pinner.pin, unpin=self.pinner.unpin
        )
        self.arena.readable = True
        for row_B in self.arena.arena_NB:
            row_B.view(dtype).fill_(NAN)  # padding too: nothing may read it
            for matrix in self.layout.views(row_B):
                values = torch.randn(matrix.shape, generator=self.generator)
                matrix.copy_(values * matrix.shape[1] ** -0.5)
        resident = list(resident)
        self.slots = Slots(
            num_slots=len(resident) + free_slots,
            layout=self.layout,
            num_layers=layers,
            num_experts=experts,
            device=device,
        )
        self.forget_slots()
        self.slots.fill(resident, self.arena)
        self.slots.check_integrity()
        self.slots.check_contents(self.arena)
        self.use_store(self.arena)
        self.arena.bytes_read = 0

    def use_store(self, store: Store) -> None:
        self.store = store
        self.table = AddressTable(self.slots, store)
        clock = StageClock(self.device, enabled=False)
        self.run_on = DeviceExperts(self.slots, store, self.table, self.activation, clock)
        if self.device.type == "cpu":  # few programs: the interpreter runs them one by one
            self.use(cold_programs=2)

    def forget_slots(self) -> None:
        for slab in self.slots.slabs:
            slab.view(self.layout.dtype).fill_(NAN)

    def use(self, **changes) -> None:
        self.run_on.tiles = dataclasses.replace(self.run_on.tiles, **changes)

    def input(self, rows: int, top_k: int, padding: float = 0.0):
        """x [T, H], ids [T, K] distinct within a row with some padding, weights [T, K]."""
        generator, experts = self.generator, self.arena.num_experts
        x_TH = torch.randn(rows, self.layout.hidden, generator=generator).to(self.layout.dtype)
        order = torch.rand(rows, experts, generator=generator).argsort(1)
        ids_TK = order[:, :top_k].int()
        pad = torch.rand(rows, top_k, generator=generator) < padding
        ids_TK = torch.where(pad, torch.where(ids_TK % 2 == 0, -1, experts), ids_TK).int()
        weights_TK = torch.rand(rows, top_k, generator=generator)
        return x_TH, ids_TK, weights_TK

    def run(self, x_TH, ids_TK, weights_TK, layer: int = 1) -> torch.Tensor:
        """The kernels' answer, on the CPU; whatever a kernel must write is NaN before."""
        for space in self.run_on._spaces.values():
            space.h_PI.fill_(NAN)
            space.y_PH.fill_(NAN)
        device = self.device
        out_TH = self.run_on.run(layer, x_TH.to(device), ids_TK.to(device), weights_TK.to(device))
        for space in self.run_on._spaces.values():
            assert not space.arrived_N.any(), "arrivals are left over"
        return out_TH.cpu()

    def expected(self, x_TH, ids_TK, weights_TK, layer: int = 1) -> torch.Tensor:
        from warmset.kernels.experts_reference import run_window

        rows = torch.arange(len(self.arena.arena_NB)).view(self.table.table_LE.shape)
        return run_window(
            x_TH, ids_TK, weights_TK, self.arena.arena_NB.data_ptr() + rows * self.layout.nbytes,
            layer=layer, width=self.layout.width, activation=self.activation,
            down_offset=self.layout.down_offset // self.layout.dtype.itemsize,
        )  # fmt: skip

    def check(self, *rows, layer: int = 1) -> torch.Tensor:
        got, expected = self.run(*rows, layer=layer), self.expected(*rows, layer=layer)
        assert got.dtype == self.layout.dtype and not got.isnan().any(), "NaN: free memory was read"
        scale = max(float(expected.norm()), 1e-30)
        error = float((got.double() - expected).norm()) / scale
        assert error < TOLERANCE[self.layout.dtype], f"relative error {error}"
        self.slots.check_integrity()
        self.table.check_integrity()
        return got


def some(layers: int, experts: int, count: int, seed: int = 0) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(layers * experts, generator=generator)[:count].tolist()
    return [divmod(index, experts) for index in order]


def dtypes(device: torch.device) -> list[torch.dtype]:
    # The interpreter computes with numpy, which has no bfloat16.
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device.type == "cuda" else [])


# -- cases --------------------------------------------------------------------------------------------------------


def odd_sizes(device: torch.device) -> None:
    """Tail tiles, prime counts, one expert, one row, K = E, many experts with no row."""
    for experts, top_k, hidden, width, rows in (
        (1, 1, 8, 8, 1),  # one of everything
        (7, 7, 33, 17, 2),  # K = E, nothing divides a tile
        (257, 3, 16, 8, 3),  # more experts than 8 bits count, nearly all without a row
        (5, 2, 136, 40, 8),  # more than one step along k
        (3, 2, 128, 16, 5),  # whole tiles: the loads without masks
    ):
        resident = some(2, experts, experts)
        world = World(
            device=device, experts=experts, hidden=hidden, width=width, resident=resident, free_slots=1
        )
        world.check(*world.input(rows, top_k))


def every_dtype_and_activation(device: torch.device) -> None:
    for dtype in dtypes(device):
        for activation in ("silu", "gelu", "gelu_tanh", "relu"):
            world = World(device=device, dtype=dtype, activation=activation, resident=some(2, 16, 10))
            world.check(*world.input(3, 4))


def any_residency(device: torch.device) -> None:
    """C09, C11, C12: any slots, pinned, partly pinned or pageable memory: the same bits, and the right ones."""
    for rows in (1, 4):
        seen = []
        for count, free, pin in ((0, 0, 1e18), (0, 3, 0), (9, 2, 0), (16, 0, 1e5), (32, 0, 1e18)):
            world = World(device=device, resident=some(2, 16, count), free_slots=free, pin_bytes=pin)
            world.generator.manual_seed(rows)
            seen.append(world.check(*world.input(rows, 4)))
        assert all(torch.equal(other, seen[0]) for other in seen[1:])


def a_row_alone_and_among_others(device: torch.device) -> None:
    """A row's bits depend neither on T nor on the other rows nor on its place."""
    for dtype in dtypes(device):
        world = World(device=device, dtype=dtype, resident=some(2, 16, 12), hidden=136, width=16)
        x_TH, ids_TK, weights_TK = world.input(8, 4, padding=0.1)
        among = world.run(x_TH, ids_TK, weights_TK)
        for row in range(8) if device.type == "cuda" else (0, 3, 7):
            part = slice(row, row + 1)
            assert torch.equal(world.run(x_TH[part], ids_TK[part], weights_TK[part])[0], among[row]), row
        pair = torch.tensor([6, 1])
        assert torch.equal(world.run(x_TH[pair], ids_TK[pair], weights_TK[pair]), among[pair])


def many_rows(device: torch.device) -> None:
    """Up to 64 rows in one launch, with the bits of a row alone; more go the way of a prompt."""
    world = World(device=device, experts=6, resident=some(2, 6, 5))
    for rows in (17, 64):
        x_TH, ids_TK, weights_TK = world.input(rows, 2, padding=0.1)
        among = world.check(x_TH, ids_TK, weights_TK)
        for row in (0, rows - 1):
            part = slice(row, row + 1)
            assert torch.equal(world.run(x_TH[part], ids_TK[part], weights_TK[part])[0], among[row]), row


def padding_and_no_rows(device: torch.device) -> None:
    """C07: picks of -1 or E add nothing; a row of them alone is 0; no row at all is no row."""
    world = World(device=device, resident=some(2, 16, 8))
    world.check(*world.input(4, 4, padding=0.5))
    x_TH, ids_TK, weights_TK = world.input(2, 4)
    for pad in (-1, 16):
        assert not world.run(x_TH, torch.full_like(ids_TK, pad), weights_TK).any()
    assert world.run(x_TH[:0], ids_TK[:0], weights_TK[:0]).shape == (0, 40)
    assert world.run_on.take_counts()[0] > 0 and world.run_on.take_counts() == (0, 0)


def figures_are_asked_for_outside_of_inference(device: torch.device) -> None:
    """Windows run under inference mode, their figures are taken and set to zero where there is none: twice."""
    world = World(device=device)
    rows = world.input(2, 2)
    for _ in range(2):
        with torch.inference_mode():
            world.run(*rows)
        distinct = len({*rows[1].flatten().tolist()})
        with torch.inference_mode(False):
            assert world.run_on.take_counts() == (distinct, distinct) and world.run_on.take_counts() == (0, 0)
            world.run_on.reset()


def shared_picks_are_read_once(device: torch.device) -> None:
    """C13: four rows all on {3, 9}, cold: two experts are read, and counted."""
    world = World(device=device)
    x_TH, _, weights_TK = world.input(4, 2)
    world.check(x_TH, torch.tensor([[3, 9], [9, 3], [3, 9], [3, 9]], dtype=torch.int32), weights_TK)
    assert world.run_on.take_counts() == (2, 2)


def fewer_slots_than_a_window_needs(device: torch.device) -> None:
    """C12: sixteen experts in one window, with 8, 3, 0 and 16 slots; C09: no slot changes."""
    ids_TK = torch.arange(16, dtype=torch.int32).view(4, 4)
    for count in (8, 3, 0, 16):
        world = World(device=device, resident=[(1, expert) for expert in range(count)])
        x_TH, _, weights_TK = world.input(4, 4)
        owner = list(world.slots.owner)
        world.check(x_TH, ids_TK, weights_TK)
        assert world.slots.owner == owner and world.run_on.take_counts() == (16, 16 - count)


def tables_are_followed(device: torch.device) -> None:
    """C50: slots and tables overwritten in place, even under a captured graph: the new expert's result."""
    world = World(device=device, resident=[(1, expert) for expert in range(8)])
    rows = world.input(3, 4)
    moved = [tensor.to(device) for tensor in rows]
    if device.type == "cuda":
        world.run(*rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TH = world.run_on.run(1, *moved)
        replay = graph.replay
    else:

        def replay() -> None:
            out_TH.copy_(world.run_on.run(1, *moved))

        out_TH = torch.empty_like(rows[0])
    replay()
    before = out_TH.clone().cpu()
    world.forget_slots()
    world.slots.fill([(1, expert) for expert in range(15, 8, -1)], world.arena)
    world.table.rewrite()
    replay()
    assert torch.equal(out_TH.cpu(), before), "other residents, other bits"
    world.arena.arena_NB.view(world.layout.dtype).mul_(0.5)
    world.slots.fill([(1, expert) for expert in range(4, 12)], world.arena)
    world.table.rewrite()
    replay()
    expected = world.expected(*rows)
    assert (out_TH.cpu().double() - expected).norm() < 1e-5 * expected.norm()


def a_prompt(device: torch.device) -> None:
    """C14: more rows than a window: right, each distinct cold expert read once, slots untouched, any memory."""
    for dtype in dtypes(device):
        seen = []
        for count, pin in ((0, 1e18), (13, 0), (13, 3e4), (32, 1e18)):
            world = World(device=device, dtype=dtype, resident=some(2, 16, count), pin_bytes=pin, hidden=72)
            world.generator.manual_seed(5)
            rows = world.input(70, 4, padding=0.05)
            held = [slab.clone() for slab in world.slots.slabs]
            seen.append(world.check(*rows))
            assert all(map(torch.equal, world.slots.slabs, held))
            picked = {expert for expert in rows[1].flatten().tolist() if 0 <= expert < 16}
            cold = [expert for expert in picked if world.slots.slot_of(1, expert) < 0]
            assert world.arena.bytes_read == len(cold) * world.layout.payload_bytes
        assert all(torch.equal(other, seen[0]) for other in seen[1:])


def every_tiling(device: torch.device) -> None:
    from warmset.kernels.experts import TILES

    for tiles in TILES.values():
        world = World(device=device, resident=some(2, 16, 10), hidden=264, width=40)
        world.run_on.tiles = dataclasses.replace(tiles, cold_programs=3)
        for rows in (1, 2):
            world.check(*world.input(rows, 3, padding=0.2))


def on_disk(arena: ArenaStore, folder: str) -> FileStore:
    """The arena's experts as a file."""
    experts_LE = [
        [arena.layout.views(arena.view(layer, expert)) for expert in range(arena.num_experts)]
        for layer in range(arena.num_layers)
    ]
    return FileStore(write_experts(Path(folder) / "experts", experts_LE, arena.layout), "direct")


def from_files(device: torch.device) -> None:
    """C11: experts on disk, a host step between router and experts: the bits of experts in pinned memory."""
    for rows, residents in ((3, 9), (3, 0), (70, 13), (2, 32)):
        world = World(device=device, resident=some(2, 16, residents))
        window = world.input(rows, 4, padding=0.1)
        expected = world.check(*window)
        with tempfile.TemporaryDirectory() as folder:
            world.use_store(on_disk(world.arena, folder))
            assert torch.equal(world.check(*window), expected)
            world.store.close()


def another_size(device: torch.device) -> None:
    """C50: slots shrunk and grown, experts moved in, in memory and from disk: the same bits without a new runner."""
    with tempfile.TemporaryDirectory() as folder:
        for files in (False, True):
            world = World(device=device, resident=some(2, 16, 32))
            window = world.input(3, 4)
            expected = world.check(*window)
            if files:
                world.use_store(on_disk(world.arena, folder))
            for size in (20, 3, 0, 5, 17):
                world.slots.resize(size, world.store)
                assert torch.equal(world.check(*window), expected), size
                cold = [tuple(pair) for pair in (world.slots.table_LE < 0).nonzero().tolist()]
                free = [slot for slot, owner in enumerate(world.slots.owner) if owner is None]
                moves = [Move(slot, *pair) for slot, pair in zip(free, reversed(cold), strict=False)]
                world.slots.start(moves, world.store)
                assert torch.equal(world.check(*window), expected), "a window beside the copies"
                assert world.slots.finish() == moves
                assert torch.equal(world.check(*window), expected)
                world.slots.check_contents(world.store)
            world.store.close()


def probe(device: torch.device) -> None:
    """Pinned memory is asked for by reading it, and what it held is put back."""
    from warmset.kernels.experts_probe import can_read

    world = World(device=device)
    held = world.arena.arena_NB.clone()
    assert can_read(world.arena.arena_NB.view(-1), device)
    assert torch.equal(world.arena.arena_NB, held)
    assert not can_read(world.arena.arena_NB.view(-1)[:0], device)


def fuzz(device: torch.device, windows: int = 8) -> None:
    """Random worlds and windows, a few windows a world; the first failing one is named by its seed."""
    for seed in range(windows):
        # A GPU compiles for each size, so there a few sizes take turns; the interpreter takes new ones each time.
        size = seed % 3 if device.type == "cuda" else seed
        generator = torch.Generator().manual_seed(1000 + size)

        def draw(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        experts = (3, 8, 13, 40)[draw(0, 3)]
        world = World(
            device=device,
            experts=experts,
            hidden=draw(1, 50),
            width=draw(1, 40),
            resident=some(2, experts, seed * 7 % (2 * experts - 1), seed),
            free_slots=seed % 3,
            pin_bytes=(1e18, 0, 2e4)[seed // 2 % 3],
            seed=seed,
        )
        top_k = draw(1, min(experts, 6))
        for layer in (0, 1):
            rows = world.input(1 + (5 * seed + 3 * layer) % 9, top_k, padding=0.1)
            try:
                world.check(*rows, layer=layer)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, layer {layer}: {error}") from error


def long_fuzz(device: torch.device) -> None:
    fuzz(device, windows=400)


QUICK = (
    odd_sizes, every_dtype_and_activation, any_residency, a_row_alone_and_among_others, many_rows,
    padding_and_no_rows, figures_are_asked_for_outside_of_inference, shared_picks_are_read_once,
    fewer_slots_than_a_window_needs, tables_are_followed, a_prompt, from_files, another_size, probe, fuzz,
)  # fmt: skip
SLOW = (every_tiling, long_fuzz)
CASES = {case.__name__: case for case in (*QUICK, *SLOW)}


def small_parts() -> None:
    """Parts of pinned memory and groups of copies so small that every boundary is met."""
    store.PIN_PART_BYTES = 1
    device_experts.GROUP_BYTES = 3 * 9000


def products_row_by_row() -> None:
    """The interpreter's products without a BLAS: OpenBLAS for Haswell rounds a row by its place among the others."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def dot(a, b, d, input_precision, max_num_imprecise_acc):
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    interpreter_builder.create_dot = dot


def main() -> None:
    small_parts()
    products_row_by_row()
    answers = {}
    for name in sys.argv[1:]:
        try:
            CASES[name](torch.device("cpu"))
            answers[name] = None
        except Exception:
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

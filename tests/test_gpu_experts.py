"""The expert kernels on a GPU: the interpreter's cases, bfloat16 too, and what only a GPU can show."""

from __future__ import annotations

import dataclasses

import experts_cases
import pytest
import torch
from conftest import FAMILIES
from experts_cases import NAN

from warmset import device_experts, memory, store
from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.slots import Move

pytestmark = pytest.mark.gpu


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(store, "PIN_PART_BYTES", 1)
    monkeypatch.setattr(device_experts, "GROUP_BYTES", 27_000)


@pytest.mark.parametrize("name", sorted(experts_cases.CASES))
def test_case(name, small_parts):
    with torch.inference_mode():
        experts_cases.CASES[name](torch.device("cuda:0"))


def test_bits_at_the_size_of_a_real_model():
    """Resident, cold and pageable experts, a row alone and among others: the same bits, in bfloat16."""
    device = torch.device("cuda:0")
    seen: dict[int, torch.Tensor] = {}
    for count, pin in ((32, 1e18), (0, 1e18), (13, 1e18), (13, 0)):
        world = experts_cases.World(
            device=device, experts=32, layers=1, hidden=2048, width=512, dtype=torch.bfloat16,
            resident=[(0, expert) for expert in range(count)], pin_bytes=pin,
        )  # fmt: skip
        for rows in (1, 4, 8, 33):
            world.generator.manual_seed(rows)
            x_TH, ids_TK, weights_TK = world.input(rows, 10)
            got = world.run(x_TH, ids_TK, weights_TK, layer=0)
            for row in range(min(rows, 8)):
                part = slice(row, row + 1)
                alone = world.run(x_TH[part], ids_TK[part], weights_TK[part], layer=0)
                assert torch.equal(alone[0], got[row]), (rows, row)
            if rows not in seen:
                seen[rows] = got
                if rows <= 4:
                    expected = world.expected(x_TH, ids_TK, weights_TK, layer=0)
                    assert (got.double() - expected).norm() < 1e-2 * expected.norm()
            assert torch.equal(got, seen[rows]), (count, pin, rows)
        world.arena.close()


@pytest.mark.parametrize("rows", [1, 4])
def test_kernels_that_start_early_wait_for_what_they_need(rows):
    """Layers in a row, some picks cold, under a graph, with and without other kernels between: same bits."""
    from warmset.kernels.experts import TILES

    device, layers = torch.device("cuda:0"), 6
    resident = [(layer, expert) for layer in range(layers) for expert in range(14)]
    world = experts_cases.World(
        device=device, experts=16, layers=layers, hidden=2048, width=512, dtype=torch.bfloat16,
        resident=resident,
    )  # fmt: skip
    x_TH, _, weights_TK = (tensor.to(device) for tensor in world.input(rows, 6))
    ids = [world.input(rows, 6)[1].to(device) for _ in range(layers)]

    def window() -> torch.Tensor:
        out_TH = x_TH
        for layer in range(layers):
            out_TH = x_TH + world.run_on.run(layer, out_TH, ids[layer], weights_TK)
        return out_TH

    def alone() -> list[torch.Tensor]:  # no other kernel between two layers
        return [world.run_on.run(layer, x_TH, ids[layer], weights_TK) for layer in range(layers)]

    for tiles in [tiles for tiles in TILES.values() if tiles.early]:
        world.run_on.tiles = dataclasses.replace(tiles, early=False)
        expected = [window(), *alone()]
        world.run_on.tiles = tiles
        assert all(map(torch.equal, [window(), *alone()], expected)), tiles.name
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [*alone(), window()]
        for _ in range(20):
            for space in world.run_on._spaces.values():
                space.h_PI.fill_(NAN)
                space.y_PH.fill_(NAN)
            graph.replay()
            assert all(map(torch.equal, got, [*expected[1:], expected[0]])), tiles.name
    world.arena.close()


def open_on_gpu(folder, slots: str, **settings) -> TokenEngine:
    """Experts stay where they are, so that a test can say what is resident, unless it asks for admission."""
    settings = {"admission": "off", **settings}
    return TokenEngine(
        EngineConfig(model=str(folder), slots=SlotsRequest(text=slots), device="cuda", **settings)
    )


def tokens_of(engine: TokenEngine, ids: list[int], count: int = 12) -> list[int]:
    return list(engine.decode(ids, SamplingConfig(max_new_tokens=count)))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_runs_the_kernels_and_a_long_prompt_leaves_the_slots_alone(checkpoints, family):
    engine = open_on_gpu(checkpoints[family], "33%", dtype="bfloat16")
    assert engine.runner.device_experts is not None and engine.store.readable
    held = [slab.clone() for slab in engine.slots.slabs]
    prompt = [(7 * index) % 8000 for index in range(200)]
    few = tokens_of(engine, prompt)
    assert all(map(torch.equal, engine.slots.slabs, held))
    assert engine.stats()["bytes_slow"] > 0
    assert few == tokens_of(open_on_gpu(checkpoints[family], "all", dtype="bfloat16"), prompt)


def test_experts_on_disk_give_the_tokens_of_the_arena(checkpoints, prompt_ids, monkeypatch):
    """C11: two segments a layer, a host step between; slots from none to some, moved and resized as it goes."""
    expected = tokens_of(open_on_gpu(checkpoints["qwen3_next"], "33%", dtype="bfloat16"), prompt_ids)
    monkeypatch.setattr(memory, "cgroup_left_bytes", lambda: 1)
    for slots in ("0", "33%"):
        engine = open_on_gpu(checkpoints["qwen3_next"], slots, dtype="bfloat16", check_slots=True)
        assert isinstance(engine.store, store.FileStore) and engine.runner.device_experts is not None
        assert any("host step" in note for note in engine.notes)
        assert tokens_of(engine, prompt_ids) == expected
        engine.slots.resize(9, engine.store)
        cold = (engine.slots.table_LE < 0).nonzero().tolist()[:9]
        engine.slots.start([Move(slot, *pair) for slot, pair in enumerate(cold)], engine.store)
        assert tokens_of(engine, prompt_ids) == expected, "while copies run"
        assert len(engine.slots.finish()) == 9
        engine.slots.check_integrity()
        assert tokens_of(engine, prompt_ids) == expected
        engine.close()


@pytest.mark.parametrize("delayed", ["compute", "copy"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_c10_a_slow_stream_changes_no_token(checkpoints, prompt_ids, graphs, delayed):
    """Residents follow the text by lru, several moves a window, while windows or copies are held up by 5 ms each."""
    folder, settings = checkpoints["qwen3_next"], {"dtype": "bfloat16", "graphs": graphs}
    expected = tokens_of(open_on_gpu(folder, "33%", **settings), prompt_ids, 60)
    for slots in ("1", "33%"):
        engine = open_on_gpu(folder, slots, admission="lru", **settings)
        copies, after_window = engine.slots._copies, engine.residency.after_window

        def hold_up(own, num_rows, copies=copies, after_window=after_window):
            if delayed == "copy":
                with torch.cuda.stream(copies._stream):
                    torch.cuda._sleep(10_000_000)
            after_window(own, num_rows)
            if delayed == "compute":
                torch.cuda._sleep(10_000_000)

        engine.residency.after_window = hold_up
        assert tokens_of(engine, prompt_ids, 60) == expected
        assert slots == "1" or engine.stats()["admission"]["moves"] > 10
        engine.slots.check_integrity()
        engine.close()


def test_pinning_refused_after_some_bytes_gives_the_same_tokens_and_one_message(
    checkpoints, prompt_ids, monkeypatch
):
    expected = tokens_of(open_on_gpu(checkpoints["qwen3_moe"], "33%"), prompt_ids)
    monkeypatch.setattr(store, "PIN_PART_BYTES", 1)
    real = store.CudaPin.pin
    for allowed in (0, 1):
        calls = []

        def pin(self, address, num_bytes, calls=calls, allowed=allowed):
            calls.append(num_bytes)
            return len(calls) <= allowed and real(self, address, num_bytes)

        monkeypatch.setattr(store.CudaPin, "pin", pin)
        engine = open_on_gpu(checkpoints["qwen3_moe"], "33%")
        assert sum("ulimit" in note for note in engine.notes) == 1 and not engine.store.pinned
        assert tokens_of(engine, prompt_ids) == expected


def test_a_refused_registration_is_not_blamed_on_the_next_kernel():
    pin = store.CudaPin(torch.device("cuda:0"))
    memory = store.aligned_bytes(8192, to=4096)
    assert pin.pin(memory.data_ptr(), 8192)
    assert not pin.pin(memory.data_ptr(), 8192)  # already pinned: refused
    assert float(torch.ones(8, device="cuda").sum()) == 8
    pin.unpin(memory.data_ptr())


def test_vram_is_a_limit_and_the_sum_is_said(checkpoints):
    engine = open_on_gpu(checkpoints["qwen3_moe"], "auto", vram="6GiB")
    assert any("--vram 6.00" in note and "slots" in note for note in engine.notes)
    with pytest.raises(WarmsetError, match="slots do not fit"):
        open_on_gpu(checkpoints["qwen3_moe"], "1", vram="100MiB")

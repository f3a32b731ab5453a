"""The expert kernels on a GPU: the interpreter's cases, bfloat16 too, and what only a GPU can show."""

from __future__ import annotations

import experts_cases
import pytest
import torch
from conftest import FAMILIES

from warmset import device_experts, store
from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError

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


def open_on_gpu(folder, slots: str, **settings) -> TokenEngine:
    return TokenEngine(
        EngineConfig(model=str(folder), slots=SlotsRequest(text=slots), device="cuda", **settings)
    )


def tokens_of(engine: TokenEngine, ids: list[int], count: int = 12) -> list[int]:
    return list(engine.decode(ids, SamplingConfig(max_new_tokens=count)))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_runs_the_kernels_and_a_long_prompt_leaves_the_slots_alone(checkpoints, family):
    engine = open_on_gpu(checkpoints[family], "33%", dtype="bfloat16")
    assert engine.runner.device_experts is not None and engine.store.readable
    held = engine.slots.storage_SB.clone()
    prompt = [(7 * index) % 8000 for index in range(200)]
    few = tokens_of(engine, prompt)
    assert torch.equal(engine.slots.storage_SB, held)
    assert engine.stats()["bytes_slow"] > 0
    assert few == tokens_of(open_on_gpu(checkpoints[family], "all", dtype="bfloat16"), prompt)


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

"""On a GPU: exact mode does not depend on residency, transformers agrees, and nothing sits on another device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.routing import MarginSwap

pytestmark = pytest.mark.gpu

TOKENS = 16


def run(folder, slots: str, ids, policy=None, dtype="float32"):
    """Led by the host, window by window, so that logits can be recorded (`test_gpu_windows` has captured windows)."""
    config = EngineConfig(
        model=str(folder),
        slots=SlotsRequest(text=slots),
        device="cuda",
        dtype=dtype,
        graphs="off",
        stages=True,
    )
    engine = TokenEngine(config, policy)
    seen = []
    step = engine.windows.step

    def recording(sequence, token):
        logits_V = step(sequence, token)
        seen.append(logits_V.clone())
        return logits_V

    engine.windows.step = recording
    tokens = list(engine.decode(ids, SamplingConfig(max_new_tokens=TOKENS)))
    engine.slots.check_integrity()
    return tokens, torch.stack(seen), engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bit_identical_for_every_number_of_slots(checkpoints, prompt_ids, family, dtype):
    runs = [run(checkpoints[family], slots, prompt_ids, dtype=dtype)[:2] for slots in ("0", "33%", "all")]
    for tokens, logits in runs[1:]:
        assert tokens == runs[0][0] and torch.equal(logits, runs[0][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_transformers_own(checkpoints, prompt_ids, family):
    from transformers import AutoModelForCausalLM, DynamicCache

    tokens, ours, _ = run(checkpoints[family], "33%", prompt_ids)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32).cuda().eval()
    cache, step, theirs = DynamicCache(config=model.config), list(prompt_ids), []
    with torch.inference_mode():
        for token in tokens:
            logits_V = model(torch.tensor([step], device="cuda"), cache=cache, use_cache=True).logits[0, -1]
            theirs.append(logits_V)
            assert int(logits_V.argmax()) == token
            step = [token]
    assert torch.allclose(ours, torch.stack(theirs[1:]), rtol=0, atol=2e-5 * float(ours.abs().max()))


def test_the_policy_saves_cold_reads_and_the_arena_is_pinned(checkpoints, prompt_ids):
    _, _, off = run(checkpoints["qwen4_exp"], "33%", prompt_ids)
    _, _, on = run(checkpoints["qwen4_exp"], "33%", prompt_ids, MarginSwap(margin=4.0))
    assert on.store.pinned
    assert on.stats()["routing"]["swaps"] > 0
    assert on.stats()["bytes_slow"] < off.stats()["bytes_slow"]


@pytest.mark.alone
def test_stages_add_up_to_the_window(checkpoints, prompt_ids):
    _, _, engine = run(checkpoints["qwen4_exp"], "33%", prompt_ids)
    measured = sum(sum(window.values()) for window in engine.clock.windows_ms)
    assert measured == pytest.approx(engine.run.decode_ms, rel=0.1)


def test_the_last_device_holds_everything(checkpoints, prompt_ids):
    last = torch.cuda.device_count() - 1
    if last == 0:
        pytest.skip("needs two GPUs")
    before = torch.cuda.memory_allocated(0)
    config = EngineConfig(
        model=str(checkpoints["qwen3_moe"]), slots=SlotsRequest(text="33%"), device=f"cuda:{last}"
    )
    engine = TokenEngine(config)
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=4)))
    assert torch.cuda.memory_allocated(0) == before


def test_the_command_line_decodes_there(checkpoints):
    words = f"generate {checkpoints['qwen4_exp']} --prompt Experts --slots 33% --route-resident 9 --stages --json -"
    answer = subprocess.run(
        [sys.executable, "-m", "warmset", *words.split(), "--device", "cuda"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["device"], found["new_tokens"], found["dtype"]) == ("cuda:0", 150, "float32")
    assert found["graphs"]["used"] and found["routing"]["swaps"] > 0 and found["stages"]["total"] > 0

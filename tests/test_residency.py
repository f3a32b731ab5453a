"""Residency is real: cold bytes are read when they are picked, resident ones are not, memory follows the slots."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import make_config, save_random
from helpers import open_engine

from warmset import checkpoint as ckpt
from warmset.profile import Identity, Profile, save_profile

LAST_LAYER = 1


def write_nan(engine, layer: int, expert: int) -> None:
    """Overwrite one expert's bytes on disk, under the engine's feet."""
    stored = torch.full((1,), float("nan"), dtype=engine.prepared.experts.layout.dtype)
    for segment in engine.prepared.experts.segments[layer][expert]:
        value = bytes(stored.view(torch.uint8).tolist()) * (segment.nbytes // stored.element_size())
        with open(segment.file, "r+b") as stream:
            stream.seek(segment.offset)
            stream.write(value)


def one_window(engine, prompt_ids):
    """Logits of one window after a prompt of one token, and the experts that the last layer picked in it.

    The prompt is one token whose own picks are known too: prompt and window read the files alike.
    """
    sequence = engine.windows.start()
    engine.windows.read_prompt(sequence, prompt_ids[:1])
    logits = engine.windows.step(sequence, prompt_ids[1])
    return logits, set(engine.windows._routing.made[LAST_LAYER].ids_TK[0].tolist())


def test_nan_in_a_cold_expert_reaches_the_output_and_in_a_resident_one_does_not(
    checkpoints, prompt_ids, copy_of
):
    engine = open_engine(copy_of(checkpoints["qwen3_moe"]), "50%", admission="off")
    clean, picked = one_window(engine, prompt_ids)
    resident = {expert for expert in picked if engine.slots.slot_of(LAST_LAYER, expert) >= 0}
    cold = picked - resident
    assert resident and cold, "the test needs a window with both kinds"

    for expert in resident:
        write_nan(engine, LAST_LAYER, expert)
    same, _ = one_window(engine, prompt_ids)
    assert torch.equal(same, clean)

    write_nan(engine, LAST_LAYER, min(cold))
    damaged, _ = one_window(engine, prompt_ids)
    assert torch.isnan(damaged).any()


MEASURE = """
import json, resource, sys
from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
engine = TokenEngine(EngineConfig(model=sys.argv[1], slots=SlotsRequest(text=sys.argv[2]), device="cpu"))
list(engine.decode([5, 6, 7, 8], SamplingConfig(max_new_tokens=4)))
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak_bytes": peak * 1024, "expert_bytes": engine.slots.layout.nbytes,
                  "experts": engine.prepared.experts.num_layers * engine.prepared.experts.num_experts,
                  "slots": engine.slots.num_slots}))
"""


def measure(folder, slots: str) -> dict:
    command = [sys.executable, "-c", MEASURE, str(folder), slots]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.slow
def test_peak_memory_of_ten_percent_lies_below_all_by_the_absent_experts(tmp_path):
    """A checkpoint of over 1 GB: at 10% the peak is lower by at least 90% of the absent experts' bytes."""
    config = make_config("qwen3_moe")
    config.hidden_size, config.moe_intermediate_size, config.num_experts = 512, 512, 350
    folder = save_random(tmp_path / "big", config, scale=1.0, max_shard_size="400MB")
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) >= 1_000_000_000
    few, every = measure(folder, "10%"), measure(folder, "all")
    absent = (every["slots"] - few["slots"]) * few["expert_bytes"]
    assert every["peak_bytes"] - few["peak_bytes"] >= 0.9 * absent


def test_slots_are_filled_from_the_profile_hottest_first(checkpoints, tmp_path):
    import numpy as np

    engine = open_engine(checkpoints["qwen3_moe"], "0")
    identity: Identity = engine.identity()
    counts = np.zeros((2, 16))
    counts[1, 7], counts[0, 3], counts[1, 2] = 9, 5, 4
    save_profile(Profile(identity=identity, counts_LE=counts), tmp_path / "p.json")
    engine = open_engine(checkpoints["qwen3_moe"], 3, profile=str(tmp_path / "p.json"))
    assert engine.slots.owner == [(1, 7), (0, 3), (1, 2)]
    assert engine.notes == []


def test_slots_hold_the_checkpoints_bytes(checkpoints):
    engine = open_engine(checkpoints["mixtral"], "all")
    tensors = ckpt.open_checkpoint(checkpoints["mixtral"]).tensors
    assert len(tensors) > 0
    from safetensors.torch import load_file

    stored = load_file(checkpoints["mixtral"] / "model.safetensors")
    for layer in range(2):
        for expert in range(8):
            gate_up, down = engine.slots.views(engine.slots.slot_of(layer, expert))
            base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            assert torch.equal(gate_up, torch.cat([stored[f"{base}.w1.weight"], stored[f"{base}.w3.weight"]]))
            assert torch.equal(down, stored[f"{base}.w2.weight"])
            assert gate_up.data_ptr() % 64 == 0 and down.data_ptr() % 64 == 0

"""The embedded model: it loads anywhere, its text is transformers' own, and what ships beside it belongs to it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from helpers import decode_with_logits, open_engine

import warmset
from warmset.checkpoint import open_checkpoint
from warmset.measure.recording import load_recording
from warmset.models import BUILTIN, BUILTIN_PROFILES, DATA

FOLDER = BUILTIN["builtin:tiny"]
PLAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
ids = tokenizer("When a query is executed, the server", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=24, do_sample=False)[0][ids.input_ids.shape[1]:]))
"""


def test_plain_transformers_loads_it_and_greedy_text_is_the_same():
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(FOLDER)], capture_output=True, text=True, check=True
    )
    assert "mtp" not in done.stderr.lower() and "unexpected" not in done.stderr.lower(), done.stderr
    engine = warmset.Engine.load("builtin:tiny", slots="33%")
    ours = "".join(engine.stream("When a query is executed, the server", max_new_tokens=24))
    assert ours.strip() == done.stdout.strip()
    assert engine.notes == [], "the shipped profile must belong to the model"


def test_the_option_swaps_and_reads_fewer_cold_experts():
    engine = warmset.Engine.load("builtin:tiny", slots="33%", policy=warmset.MarginSwap(margin=0.25))
    list(engine.stream("The expert cache", max_new_tokens=30))
    seen = engine.stats()["routing"]
    assert seen["swaps"] > 0 and seen["cold_after"] < seen["cold_before"]


@pytest.mark.parametrize("slots", ["0", "all"])
def test_residency_changes_no_bit(slots, prompt_ids):
    reference = decode_with_logits(open_engine("builtin:tiny", "33%"), prompt_ids, 8)
    other = decode_with_logits(open_engine("builtin:tiny", slots), prompt_ids, 8)
    assert reference[0] == other[0] and torch.equal(reference[1], other[1])


def test_size_and_shape():
    shards = list(FOLDER.glob("*.safetensors"))
    assert sum(shard.stat().st_size for shard in shards) <= 40_000_000
    assert max(shard.stat().st_size for shard in shards) < 15_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (512, 10)
    assert config["indexer_budget"] == config["max_position_embeddings"] == 8192
    assert "full_attention" in config["layer_types"] and config["ple_layer_ids"]
    names = open_checkpoint(FOLDER).tensors
    assert {"mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"} <= set(names)


def test_profiles_and_trace_belong_to_the_model():
    fingerprint = open_checkpoint(FOLDER).fingerprint()
    for name in ("mix", "code"):
        profile = json.loads(BUILTIN_PROFILES["builtin:tiny"].with_name(f"profile-{name}.json").read_text())
        assert profile["fingerprint"] == fingerprint and profile["text"] == name
    trace = load_recording(DATA / "trace.safetensors")
    assert trace.fingerprint == fingerprint and trace.kinds == ("prose", "code")
    assert (trace.committed_N.sum(), trace.num_layers, trace.num_experts) == (1200, 4, 512)


def test_a_third_resident_by_the_profile_takes_most_picks():
    """What the profile is for: chosen on training text, 33% of the experts hit well over 33% of held-out picks."""
    engine = warmset.Engine.load("builtin:tiny", slots="33%")
    prompts = json.loads((DATA / "prompts.json").read_text())
    list(engine.stream(prompts["prose"][0], max_new_tokens=40))
    assert engine.stats()["hit_rate"] > 0.55

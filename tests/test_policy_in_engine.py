"""MarginSwap in decode windows: the laws of the counters, and where it must not act."""

from __future__ import annotations

import pytest
import torch
from helpers import decode_with_logits, open_engine

import warmset
from warmset.errors import RowError
from warmset.routing import MarginSwap

TOKENS = 24


def counters(engine) -> dict[str, int]:
    return engine.stats()["routing"]


@pytest.mark.parametrize("slots", ["10%", "33%", "60%"])
def test_laws_of_the_counters(checkpoints, prompt_ids, slots):
    engine = open_engine(checkpoints["qwen4_exp"], slots, MarginSwap(margin=4.0))
    decode_with_logits(engine, prompt_ids, TOKENS)
    seen = counters(engine)
    assert 0 < seen["swaps"] <= seen["tail_cold"]
    assert seen["cold_after"] == seen["cold_before"] - seen["swaps"]
    assert seen["dropped"] == 0
    picks = engine.windows.counts.picks
    assert picks == (TOKENS - 1) * 2 * 4  # windows x layers x K
    assert engine.stats()["hit_rate"] == pytest.approx(1 - seen["cold_after"] / picks)


@pytest.mark.parametrize("slots", ["0", "all"])
def test_nothing_to_swap_is_the_exact_result(checkpoints, prompt_ids, slots):
    off = decode_with_logits(open_engine(checkpoints["qwen3_moe"], slots), prompt_ids, TOKENS)
    engine = open_engine(checkpoints["qwen3_moe"], slots, MarginSwap(margin=100.0))
    on = decode_with_logits(engine, prompt_ids, TOKENS)
    assert counters(engine)["swaps"] == 0
    assert off[0] == on[0] and torch.equal(off[1], on[1])


def test_a_margin_that_allows_nothing_is_the_exact_result(checkpoints, prompt_ids):
    off = decode_with_logits(open_engine(checkpoints["qwen3_moe"], "33%"), prompt_ids, TOKENS)
    engine = open_engine(checkpoints["qwen3_moe"], "33%", MarginSwap(margin=-1e30))
    on = decode_with_logits(engine, prompt_ids, TOKENS)
    assert counters(engine)["swaps"] == 0 and counters(engine)["tail_cold"] > 0
    assert torch.equal(off[1], on[1])


def test_the_prompt_always_uses_the_routers_own_pick(checkpoints, prompt_ids):
    """One new token comes from the prompt alone: no window runs, so no policy can have acted on it."""
    off = open_engine(checkpoints["qwen4_exp"], "10%")
    on = open_engine(checkpoints["qwen4_exp"], "10%", MarginSwap(margin=100.0, ranks=(0, 3)))
    first = off.windows.read_prompt(off.windows.start(), prompt_ids)
    second = on.windows.read_prompt(on.windows.start(), prompt_ids)
    assert torch.equal(first, second)
    assert counters(on)["tail_cold"] == 0


def test_swaps_change_the_output_and_fewer_cold_experts_are_read(checkpoints, prompt_ids):
    off = open_engine(checkpoints["qwen4_exp"], "33%")
    on = open_engine(checkpoints["qwen4_exp"], "33%", MarginSwap(margin=100.0, ranks=(0, 3)))
    before = decode_with_logits(off, prompt_ids, TOKENS)
    after = decode_with_logits(on, prompt_ids, TOKENS)
    assert not torch.equal(before[1], after[1])
    key = "cold_experts_per_layer_window"
    assert on.stats()[key] < off.stats()[key]
    assert on.stats()["bytes_slow"] < off.stats()["bytes_slow"]


def test_ranks_past_k_are_capped_and_said(checkpoints):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", MarginSwap(margin=1.0, ranks=(2, 99)))
    assert any("3" in note and "99" in note for note in engine.notes)


@pytest.mark.parametrize(
    "text",
    [
        "exact",
        "additive-bias:beta=1.0",
        "cache-prior:strength=0.5",
        "max-rank:max-rank=8",
        "cumulative-mass:mass=0.9",
        "window-joint:margin=1.0",
        "drop-cold:weight=0.2",
        "fewer-picks:k=2",
        "resident-only",
        "random-swap:margin=1.0",
    ],
)
def test_every_policy_runs_through_the_decode_path(checkpoints, prompt_ids, text):
    engine = open_engine(checkpoints["qwen3_moe"], "40%", warmset.parse_policy(text))
    tokens, logits = decode_with_logits(engine, prompt_ids, 8)
    assert len(tokens) == 8 and torch.isfinite(logits).all()
    seen = counters(engine)
    assert seen["cold_after"] <= seen["cold_before"]
    if text == "fewer-picks:k=2":
        assert seen["dropped"] == 7 * 2 * 2
    if text == "resident-only":
        assert seen["cold_after"] == 0


def test_c01_a_row_that_cannot_be_routed_names_layer_and_row(checkpoints, prompt_ids):
    """NaN logits end the window with an error that says where."""
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    router = engine.windows._trunk.model.layers[1].mlp.gate
    router.original.weight.fill_(float("nan"))
    with pytest.raises(RowError, match=r"Layer 1, row 0"):
        decode_with_logits(engine, prompt_ids, 4)

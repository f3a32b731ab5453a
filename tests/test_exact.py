"""Exact mode: the logits are transformers' own, and do not depend on what is resident."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from helpers import decode_with_logits, open_engine, transformers_logits

TOKENS = 12


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_and_logits_are_transformers_own(checkpoints, prompt_ids, family):
    folder = checkpoints[family]
    engine = open_engine(folder, "33%")
    tokens, ours = decode_with_logits(engine, prompt_ids, TOKENS)
    arms = {name: transformers_logits(folder, prompt_ids, TOKENS, name) for name in ("eager", "grouped_mm")}
    spread = (arms["eager"][1] - arms["grouped_mm"][1]).abs().max()
    for name, (theirs_tokens, theirs) in arms.items():
        allowed = max(1e-6 * theirs.abs().max(), 2 * spread)
        assert tokens == theirs_tokens, name
        assert (ours - theirs).abs().max() <= allowed, name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bit_identical_for_every_number_of_slots(checkpoints, prompt_ids, family):
    runs = {
        slots: decode_with_logits(open_engine(checkpoints[family], slots), prompt_ids, TOKENS)
        for slots in ("0", "10%", "33%", "100%")
    }
    first_tokens, first = runs["0"]
    for slots, (tokens, logits) in runs.items():
        assert tokens == first_tokens, slots
        assert torch.equal(logits, first), slots


def test_two_runs_of_one_engine_are_bit_identical(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    once = decode_with_logits(engine, prompt_ids, TOKENS)
    again = decode_with_logits(engine, prompt_ids, TOKENS)
    assert once[0] == again[0] and torch.equal(once[1], again[1])


def test_c12_one_row_with_fewer_slots_than_picks(checkpoints, prompt_ids):
    """C12, one row: E=16, K=4 with 8, 3, 0 and 16 slots a layer is the dense result: cold ones are read in place."""
    runs = [
        decode_with_logits(open_engine(checkpoints["qwen3_moe"], 2 * slots), prompt_ids, TOKENS)[1]
        for slots in (16, 8, 3, 0)
    ]
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def test_c45_hidden_equal_to_width_and_to_twice_the_width(tmp_path, prompt_ids):
    """C45: shapes that could be mistaken for one another give transformers' logits all the same."""
    from conftest import make_config, save_random

    for width in (16, 32):
        config = make_config("qwen3_moe")
        config.moe_intermediate_size = width
        folder = save_random(tmp_path / str(width), config)
        tokens, ours = decode_with_logits(open_engine(folder, "50%"), prompt_ids, 6)
        theirs_tokens, theirs = transformers_logits(folder, prompt_ids, 6, "eager")
        assert tokens == theirs_tokens
        assert torch.allclose(ours, theirs, rtol=0, atol=3e-6 * float(theirs.abs().max()))


def test_bfloat16_also_does_not_depend_on_residency(checkpoints, prompt_ids):
    runs = [
        decode_with_logits(open_engine(checkpoints["qwen3_next"], slots, dtype="bfloat16"), prompt_ids, 8)
        for slots in ("0", "40%", "all")
    ]
    assert all(torch.equal(runs[0][1], logits) for _, logits in runs[1:])


def test_a_small_indexer_budget_is_not_skipped(checkpoints, prompt_ids):
    """Past its budget an indexer changes the result, so only one whose budget covers the context may be left out."""
    full, sparse = (
        decode_with_logits(open_engine(checkpoints[family], "all"), prompt_ids, 4)[1]
        for family in ("qwen4_exp", "qwen4_exp_sparse")
    )
    assert not torch.equal(full, sparse)

"""Traces: what is recorded is what the routers scored; files are whole, or refused by name."""

from __future__ import annotations

import pytest
import torch
from helpers import open_engine

from warmset.errors import WarmsetError
from warmset.measure.trace import load_trace, record_trace, save_trace
from warmset.routing import Exact, RouterRule


@pytest.fixture
def trace(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    return record_trace(engine, [("prose", prompt_ids[:5]), ("code", prompt_ids[5:])])


def test_a_trace_holds_every_row_layer_and_score(trace, checkpoints, prompt_ids):
    assert trace.scores_NLE.shape == (len(prompt_ids), 2, 16)
    assert trace.kinds == ("prose", "code") and trace.kind_N.tolist() == [0] * 5 + [1] * (len(prompt_ids) - 5)
    assert trace.rows_of("prose").shape[0] == 5


def test_replayed_picks_are_the_engines_own(trace, checkpoints, prompt_ids):
    """Top-k over the stored scores is what the router picked in the window, ties of float16 apart."""
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    sequence = engine.windows.start()
    rule = RouterRule(top_k=trace.top_k, renormalize=trace.renormalize)
    slot_E = torch.full((16,), -1, dtype=torch.int32)
    same = total = 0
    for row, token in enumerate(prompt_ids[:5]):
        engine.windows.step(sequence, token)
        for layer, routed in enumerate(engine.windows._routing.made):
            replayed = Exact().route(trace.scores_NLE[row, layer][None].float(), slot_E, rule=rule)
            same += int((replayed.ids_TK == routed.ids_TK).sum())
            total += trace.top_k
    assert same >= 0.95 * total


def test_round_trip(trace, tmp_path):
    save_trace(trace, tmp_path / "a.safetensors")
    again = load_trace(tmp_path / "a.safetensors")
    assert torch.equal(again.scores_NLE, trace.scores_NLE) and again.kinds == trace.kinds
    assert (again.top_k, again.fingerprint) == (trace.top_k, trace.fingerprint)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100]
)
def test_a_broken_file_is_refused_by_name(trace, tmp_path, damage):
    path = tmp_path / "a.safetensors"
    save_trace(trace, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WarmsetError, match=r"a\.safetensors"):
        load_trace(path)


def test_another_safetensors_file_is_refused(checkpoints):
    with pytest.raises(WarmsetError, match="warmset-trace"):
        load_trace(checkpoints["olmoe"] / "model.safetensors")


def test_a_policy_is_refused(checkpoints, prompt_ids):
    from warmset.routing import MarginSwap

    engine = open_engine(checkpoints["qwen3_moe"], "33%", MarginSwap(margin=1.0))
    with pytest.raises(WarmsetError, match="off"):
        record_trace(engine, [("prose", prompt_ids)])

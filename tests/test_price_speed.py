"""`warmset price --speed`: legs by margin and tail, whose price they stand beside, and bad input before any work."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from warmset import cli
from warmset.cli.price_speed import Timing
from warmset.errors import WarmsetError
from warmset.measure.price import speed
from warmset.measure.price.speed import (
    ONE_A_WINDOW,
    SpeedBench,
    SpeedRequest,
    check_trace,
    default_tails,
    leg_name,
    prices_of,
    read_prices,
    rehearsal_trace,
    run_speed,
)
from warmset.measure.price.table import speed_rows, speed_table
from warmset.measure.recording import Recording, ranked, save_recording
from warmset.measure.whole_input import WHOLE_SHAPES, read_trace, tile_trace

CPU = torch.device("cpu")
ALONE = ["off", "margin0_5_ranks3_3", "margin9_ranks3_3", "margin0_5_ranks1_3", "margin9_ranks1_3"]
runner = CliRunner()


def request(folder, **changes) -> SpeedRequest:
    trace = changes.pop("trace", None) or rehearsal_trace("tiny", folder)
    given = {"shape": "tiny", "rows": 4, "margins": [0.5, 9.0], "tails": [(3, 3), (1, 3)], "slots": 24}
    return SpeedRequest(**{**given, **changes}, trace=trace)


def marked(margin: float | None = None) -> Recording:
    """Windows of 4, 2, 4 and 4 rows, of which 3, 1, 4 and 2 were kept."""
    scores_NLE = np.random.default_rng(0).normal(size=(14, 2, 16)).astype(np.float32)
    expert_P, score_P, count_NL = ranked(scores_NLE, 4, margin)
    sizes, kept = (4, 2, 4, 4), (3, 1, 4, 2)
    return Recording(
        expert_P=expert_P, score_P=score_P, count_NL=count_NL,
        window_N=np.repeat(np.arange(4), sizes).astype(np.uint32),
        committed_N=np.concatenate([np.arange(n) < k for n, k in zip(sizes, kept, strict=True)]).astype(np.uint8),
        position_N=np.arange(14, dtype=np.uint32), kind_N=np.zeros(14, dtype=np.uint8), kinds=("prose",),
        num_experts=16, top_k=4, renormalize=True, margin=margin, expert_bytes=None, model="none", fingerprint="none",
    )  # fmt: skip


def arm(policy: str, kl: float) -> dict:
    return {
        "policy": policy, "argmax_same": 0.9, "kl": kl, "excess_kl": kl - 0.001, "excess_kl_interval": [0.0, 1.0],
        "loss_change": 0.01, "bytes_saved": 0.1, "swaps_by_layer_and_rank": [[0] * 10] * 2,
    }  # fmt: skip


def prices(*arms: dict) -> dict:
    about = {"text": "t", "token_hash": "h", "positions": 7, "rows": 4, "resident": 1, "experts_total": 3}
    return {"policies": list(arms), **about}


# -- legs -----------------------------------------------------------------------------------------------------


def test_a_rehearsal_by_margin_and_tail(tmp_path):
    found = run_speed(request(tmp_path), CPU)
    assert found["failed"] == []
    legs = found["results"]["legs"]
    assert list(legs) == ALONE
    cold = {name: leg["cold_experts"] for name, leg in legs.items()}
    assert cold["off"] > cold["margin9_ranks3_3"] > cold["margin9_ranks1_3"], "a wider tail saves more"
    assert cold["margin0_5_ranks1_3"] > cold["margin9_ranks1_3"], "and so does a larger margin"
    assert legs["off"]["swaps"] == 0 < legs["margin0_5_ranks3_3"]["swaps"]
    for leg in legs.values():
        assert leg["tokens_per_sec"] == pytest.approx(1e3 / leg["ms"])
        assert leg["cold_wait_ms"] == leg["stages"]["stages"]["cold wait"] > 0
    assert found["results"]["speed"] == {
        "rounds": 1, "committed_per_window": 1.0, "committed_from": ONE_A_WINDOW,
    }  # fmt: skip
    assert found["config"]["tails"] == [[3, 3], [1, 3]] and found["config"]["slots"] == 24


def test_tokens_a_second_are_those_that_the_trace_kept(tmp_path):
    save_recording(marked(), tmp_path / "marked.safetensors")
    asked = request(tmp_path, trace=tmp_path / "marked.safetensors", margins=[9.0], tails=[(3, 3)])
    results = run_speed(asked, CPU)["results"]
    assert results["speed"]["committed_per_window"] == 3.0, "of windows of four rows: 3, 4 and 2"
    assert results["legs"]["off"]["tokens_per_sec"] == pytest.approx(3e3 / results["legs"]["off"]["ms"])


@pytest.mark.parametrize("margin", [None, 0.5])
def test_a_recording_is_tiled_by_its_own_windows(tmp_path, margin):
    recorded = marked(margin)
    save_recording(recorded, tmp_path / "marked.safetensors")
    trace, marks = read_trace(tmp_path / "marked.safetensors")
    assert marks is not None
    tiled = tile_trace(trace, WHOLE_SHAPES["tiny"].experts, 4, 20, 10, None, marks=marks)
    assert tiled.logits_WLTE.shape[0] == 3
    for window, first in enumerate((0, 6, 10)):
        own_TK = np.sort(recorded.score_P[recorded._begin_NL[first : first + 4, 0][:, None] + np.arange(4)])
        top_TK = tiled.logits_WLTE[window, 0].topk(4, dim=-1).values.sort(dim=-1).values
        assert np.allclose(top_TK, own_TK, atol=2e-3)
    if margin is not None:
        left_out = trace.scores_NLE < torch.from_numpy(recorded.score_P).min() - 10
        assert int((~left_out).sum()) == len(recorded.expert_P)


def test_legs_that_the_time_does_not_reach_are_named(tmp_path, monkeypatch):
    def spent(bench, leg, rows, run=SpeedBench._run_leg):
        run(bench, leg, rows)
        bench._end = 0.0

    monkeypatch.setattr(SpeedBench, "_run_leg", spent)
    found = run_speed(request(tmp_path), CPU)
    assert found["failed"] == ALONE[1:] and list(found["results"]["legs"]) == ["off"]
    assert run_speed(request(tmp_path, budget_sec=1e-9), CPU)["failed"] == ["setup"]


def test_a_round_begins_only_when_it_will_end_in_time(tmp_path, monkeypatch):
    """Two legs of 100 ms a window: 18 windows each with slack take 4.32 s."""
    from types import SimpleNamespace

    bench = SpeedBench(request(tmp_path), CPU)
    legs = {name: SimpleNamespace(window_ms=[50.0, 100.0]) for name in ("off", "on")}
    assert not bench._another_round_fits(legs), "a rehearsal has one"
    bench.device = torch.device("cuda")
    monkeypatch.setattr(speed.time, "perf_counter", lambda: 100.0)
    for end, fits in ((104.3, False), (104.4, True)):
        bench._end = end
        assert bench._another_round_fits(legs) is fits


def test_default_tails():
    assert default_tails(10) == [(6, 9), (4, 9), (8, 9)]
    assert default_tails(4) == [(3, 3), (1, 3), (2, 3)]
    assert default_tails(2) == [(1, 1)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shape": "huge"}, "shape must be one of qwen3-next-80b"),
        ({"rows": 3}, "rows must be of 1, 4, 8. Got 3"),
        ({"tails": [(2, 4)]}, "ranks must be LO-HI of 0 to 3. Got '2-4'"),
        ({"margins": [0.5, 0.5]}, "margins and ranks must be different"),
        ({"margins": [0.1 * n for n in range(12)]}, "margins x ranks must be 1 to 23 legs. Got 24"),
        ({"slots": 65}, "slots must be 0 to 64"),
        ({"budget_sec": 0.0}, "budget-sec must be above 0"),
    ],
)
def test_bad_requests_are_refused(tmp_path, changes, sentence):
    with pytest.raises(WarmsetError, match=sentence):
        request(tmp_path, **changes)


def test_a_trace_that_does_not_fit_is_refused_before_any_work(tmp_path):
    save_recording(marked(0.5), tmp_path / "marked.safetensors")
    check_trace(request(tmp_path, trace=tmp_path / "marked.safetensors", margins=[0.25, 0.5]))
    for changes, sentence in (
        ({"margins": [0.25, 0.75]}, "--margins must be at most 0.5, down to which .* Got 0.75"),
        ({"shape": "qwen3-next-80b"}, "--trace must have 512 experts and 10 picks a row. Got 16 and 4"),
        ({"trace": tmp_path / "none.safetensors"}, "cannot be read"),
    ):
        with pytest.raises(WarmsetError, match=sentence):
            check_trace(request(tmp_path, **{"trace": tmp_path / "marked.safetensors", **changes}))


# -- prices ---------------------------------------------------------------------------------------------------


def test_prices_are_joined_by_margin_and_ranks():
    given = prices(
        arm("margin:margin=0.25", 0.1), arm("margin:margin=0.1/0.3", 0.2), arm("resident-only", 0.3)
    )
    given["other_ranks"] = [arm("margin:margin=0.25,ranks=4-9", 0.4)]
    found = prices_of(given)
    assert {name: figures["kl"] for name, figures in found.items()} == {
        "margin0_25_ranks6_9": 0.1, "margin0_25_ranks4_9": 0.4,
    }  # fmt: skip


def test_the_table_has_gain_and_price_and_says_what_is_unknown():
    figures = {"cold_experts": 1.87, "cold_wait_ms": 9.3, "ms": 21.85, "tokens_per_sec": 45.77}
    legs = {
        "off": {"margin": None, "ranks": None, **figures},
        leg_name(0.25, (6, 9)): {"margin": 0.25, "ranks": [6, 9], **figures},
        leg_name(0.5, (6, 9)): {"margin": 0.5, "ranks": [6, 9], **figures, "cold_wait_ms": None},
    }
    header, rows = speed_rows(legs, prices_of(prices(arm("margin:margin=0.25", 0.1))))
    assert len(header) == len(rows[0])
    gain = ["1.87", "9.30", "21.85", "45.8"]
    assert rows[0] == ["off", "-", "100.0%", "0", "0", "0", *gain]
    assert rows[1] == ["0.25", "6-9", "90.0%", "0.10000", "0.09900", "+0.0100", *gain]
    assert rows[2] == ["0.5", "6-9", "-", "-", "-", "-", "1.87", "-", "21.85", "45.8"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(speed_table(legs, {}))
    assert "tokens a second" in " ".join(console.export_text().split())


def test_prices_are_read_from_an_answer_or_a_record(tmp_path):
    answer, record, bad = (tmp_path / name for name in ("answer.json", "record.json", "bad.json"))
    answer.write_text(json.dumps(prices(arm("margin:margin=0.25", 0.1))))
    record.write_text(json.dumps({"name": "price", "results": prices(arm("margin:margin=0.25", 0.1))}))
    assert read_prices(answer) == read_prices(record)
    for text in ("[]", "{}", '{"policies": [{}]}', '{"results": 3}', '{"policies": 3}'):
        bad.write_text(text)
        with pytest.raises(WarmsetError, match=r"bad\.json is nothing that `warmset price --json` wrote"):
            read_prices(bad)
    bad.write_text("{")
    with pytest.raises(WarmsetError, match="cannot be read"):
        read_prices(bad)


# -- the command ----------------------------------------------------------------------------------------------


def test_the_command_writes_one_record_with_both(tmp_path, monkeypatch):
    figures = {"cold_experts": 1.87, "cold_wait_ms": 9.3, "ms": 21.85, "tokens_per_sec": 45.77}
    asked: list[SpeedRequest] = []

    def timed(self):
        asked.append(self.request)
        legs = {"off": {"margin": None, "ranks": None, **figures}}
        legs[leg_name(0.25, (6, 9))] = {"margin": 0.25, "ranks": [6, 9], **figures}
        return {"config": {"slots": 8083}, "results": {"legs": legs, "speed": {"rounds": 2}}, "failed": []}

    monkeypatch.setattr(Timing, "run", timed)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "p.json").write_text(json.dumps(prices(arm("margin:margin=0.25", 0.1))))
    words = "price --speed --device cpu --margins 0.25 --ranks 6-9,8-9 --window 8 --shape-slots 9 --budget-sec 50 "
    words += f"--prices {tmp_path / 'p.json'} --json {tmp_path / 'o.json'}"
    answer = runner.invoke(cli.app, words.split())
    assert answer.exit_code == 0, answer.output
    assert "7 positions" in " ".join(answer.stdout.split()) and "0.09900" in answer.stdout
    record = json.loads((tmp_path / "o.json").read_text())
    assert record["tests"] == "green" and record["results"]["prices"]["margin0_25_ranks6_9"]["kl"] == 0.1
    assert record["results"]["priced_on"]["positions"] == 7
    (request,) = asked
    assert (request.tails, request.margins, request.rows) == ([(6, 9), (8, 9)], [0.25], 8)
    assert (request.slots, request.budget_sec, request.shape) == (9, 50.0, "qwen3-next-80b")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = "price --speed --device cpu --margins 0.25 --positions 40 --no-controls --json -"
    answer = runner.invoke(cli.app, words.split())
    assert answer.exit_code == 0, answer.output
    results = json.loads(answer.stdout)["results"]
    measured = {arm["policy"]: arm["kl"] for arm in results["price"]["policies"]}
    assert list(measured) == [f"margin:margin=0.25,ranks={tail}" for tail in ("6-9", "4-9", "8-9")]
    assert [figures["kl"] for figures in results["prices"].values()] == list(measured.values())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--speed --device cpu", "price --speed needs a CUDA device: on a CPU it only rehearses"),
        ("--shape tiny", "--shape needs --speed."),
        ("--shape-slots 3", "--shape-slots needs --speed."),
        ("--prices p.json", "--prices needs --speed."),
        ("--speed --policies all", "--policies is not for --speed."),
        ("--speed --policy exact", "--policy is not for --speed."),
        ("--speed --budget-kl 0.1", "--budget-kl is not for --speed."),
        ("--speed --prices p.json --records r.jsonl", "--records is not for --speed with --prices."),
        ("--ranks 6-9,4-9 --margins 1", "--ranks must be LO-HI"),
    ],
)
def test_bad_options_are_refused(words, sentence, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = runner.invoke(cli.app, ["price", *words.split()])
    assert answer.exit_code != 0 and isinstance(answer.exception, WarmsetError), answer.output
    assert sentence in str(answer.exception)

"""`bench window`: its input is what it says, floors add up, rehearsals give whole records, legs side by side."""

from __future__ import annotations

import io
import json

import pytest
import torch

from warmset.errors import WarmsetError
from warmset.graph.stamps import ANY_LAYER, Mark, StampClock, stage_table
from warmset.measure.trace import Trace, save_trace
from warmset.measure.whole_input import WHOLE_SHAPES, tile_trace
from warmset.measure.whole_legs import run_whole
from warmset.measure.whole_request import Request
from warmset.measure.whole_window import Floors
from warmset.measure.window_input import cold_by_layer
from warmset.measure.window_tables import legs_table, read_legs, whole_table

CPU = torch.device("cpu")


def make_trace(experts=16, top_k=4, rows=40, layers=2):
    scores = torch.randn(rows, layers, experts, generator=torch.Generator().manual_seed(0)).half()
    kind_N = torch.tensor(([0] * 18 + [1] * rows)[:rows], dtype=torch.uint8)
    return Trace(
        scores_NLE=scores, kind_N=kind_N, kinds=("prose", "code"), top_k=top_k, renormalize=True,
        model="none", fingerprint="none",
    )  # fmt: skip


def test_floors_are_those_of_the_measured_rates():
    """The example of MEASURES: T = 4, 30 distinct, 0.63 cold; about 3.7 and 5.5 ms at 4,244 and 52.7 GB/s."""
    floors = Floors(4244.0, 52.7, 4_730_000_000, 48, 6_291_456)
    found = floors.of(30, cold_by_layer(48, 0.63))
    assert found["floor_overlap_ms"] == pytest.approx(3.58, abs=0.15)
    assert found["floor_chain_ms"] == pytest.approx(5.5, abs=0.2)
    assert found["floor_overlap_ms"] < found["floor_chain_ms"] < found["floor_sum_ms"]


def test_a_tiled_trace_permutes_the_experts_of_each_layer():
    trace, shape = make_trace(), WHOLE_SHAPES["tiny"].experts
    tiled = tile_trace(trace, shape, 4, 20, 100, None)
    assert tiled.logits_WLTE.shape == (9, 4, 4, 16), "no window holds rows of two kinds"
    assert len(set(tiled.resident)) == 20
    first = tiled.logits_WLTE[0]
    for layer in range(4):
        source_TE = trace.scores_NLE[:4, layer % 2].float()
        assert torch.equal(first[layer].sort(dim=-1).values, source_TE.sort(dim=-1).values)
    assert not torch.equal(first[0], first[2]), "two layers of one source have permutations of their own"


def test_residents_of_a_tiled_trace_are_the_picked_ones():
    """By a profile that knows the picks, fewer of them are cold than by chance."""
    trace, shape = make_trace(), WHOLE_SHAPES["tiny"].experts
    tiled = tile_trace(trace, shape, 1, 32, 100, None)
    resident = torch.zeros(4, 16, dtype=torch.bool)
    for layer, expert in tiled.resident:
        resident[layer, expert] = True
    picks = tiled.logits_WLTE[:, :, 0].topk(4, dim=-1).indices
    held = torch.stack([resident[layer][picks[:, layer]] for layer in range(4)]).float().mean()
    assert held > 0.55


def test_a_trace_of_another_shape_is_refused():
    with pytest.raises(WarmsetError, match="16 experts and 4 picks"):
        tile_trace(make_trace(experts=32), WHOLE_SHAPES["tiny"].experts, 4, 20, 10, None)


@pytest.mark.parametrize("name", WHOLE_SHAPES)
def test_the_configuration_of_every_shape_is_one_that_transformers_takes(name):
    shape, config = WHOLE_SHAPES[name].experts, WHOLE_SHAPES[name].make_config()
    assert (config.num_hidden_layers, config.num_experts) == (shape.layers, shape.experts)
    assert (config.num_experts_per_tok, config.hidden_size) == (shape.top_k, shape.hidden)
    assert config.moe_intermediate_size == shape.width
    linear = config.layer_types.count("linear_attention")
    assert linear == shape.layers * (3 if shape.layers == 48 else 2) // 4


@pytest.mark.parametrize("shape", ["tiny", "tiny-exp"])
def test_a_rehearsal_of_fixed_windows(shape):
    found = run_whole(Request(shape=shape, rows=[1, 4], colds=[0.0, 1.0]), CPU)
    assert found["failed"] == []
    results = found["results"]
    assert results["check"]["relative_error"] < 1e-5
    for rows, distinct in ((1, 4), (4, 10)):
        for name, cold in (("cold0_00", 0), ("cold1_00", 1)):
            window = results[f"t{rows}"][name]
            assert window["distinct_experts"] == distinct and window["cold_experts"] == cold
            table = window["stages"]
            assert table["sum_ms"] == pytest.approx(table["total_ms"], rel=0.05)
            assert set(table["kinds"]) >= {"linear_attention"}
            assert ("cold wait" in table["stages"]) == (cold > 0)
    assert "x floor_chain" in _text(whole_table(results))


def test_a_rehearsal_of_the_three_legs(tmp_path):
    trace = tmp_path / "trace.safetensors"
    save_trace(make_trace(), trace)
    found = run_whole(Request(shape="tiny", rows=[4], colds=[], trace=trace, slots=24, margin=9.0), CPU)
    assert found["failed"] == []
    legs = found["results"]["trace_t4"]
    assert legs["off"]["swaps"] == 0 < legs["swap_serial"]["swaps"] == legs["route_fused"]["swaps"]
    assert (
        legs["off"]["cold_experts"]
        > legs["route_fused"]["cold_experts"]
        == legs["swap_serial"]["cold_experts"]
    )
    assert legs["compared"]["cold_down"] > 0
    record = tmp_path / "record.json"
    record.write_text(json.dumps(found))
    read = read_legs([record])
    assert [leg["name"] for leg in read] == ["off t4", "swap_serial t4", "route_fused t4"]
    assert "cold experts a layer-window" in _text(legs_table(read))


@pytest.mark.parametrize("form", ["absent", "text", "shape", "no window"])
def test_a_trace_that_is_none_of_this_shape_is_refused_before_any_part(form, tmp_path, capfd):
    trace = tmp_path / "trace.safetensors"
    if form == "text":
        trace.write_text("x")
    elif form != "absent":
        save_trace(make_trace(experts=32) if form == "shape" else make_trace(rows=2), trace)
    message = {"absent": "No such file", "text": "cannot be read as a trace", "shape": "must have 16 experts"}
    with pytest.raises(WarmsetError, match=message.get(form, "must have a window of 4 rows")):
        run_whole(Request(shape="tiny", rows=[4], colds=[], trace=trace), CPU)
    assert capfd.readouterr().err == "", "no part began"


def test_a_budget_that_is_spent_ends_the_run():
    found = run_whole(Request(shape="tiny", rows=[1], colds=[0.0], budget_sec=1e-9), CPU)
    assert found["failed"] == ["setup"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shape": "huge"}, "shape must be one of qwen3-next-80b, qwen4-exp-125b"),
        ({"rows": [3]}, "rows must be of 1, 4, 8"),
        ({"colds": [5.0]}, "cold-experts must be 0 to 4"),
        ({"slots": 99999}, "slots must be 0 to 24576"),
        ({"budget_sec": 0.0}, "budget-sec must be above 0"),
    ],
)
def test_bad_requests_are_refused(changes, message):
    with pytest.raises(WarmsetError, match=message):
        Request(**{"shape": "qwen3-next-80b", "rows": [1], "colds": [0.0], **changes})


def test_legs_that_are_none_are_refused(tmp_path):
    bad = tmp_path / "bad.json"
    for text, message in (
        ("[]", "no answer and no record"),
        ("{", "cannot be read"),
        ("{}", "has no stages"),
    ):
        bad.write_text(text)
        with pytest.raises(WarmsetError, match=message):
            read_legs([bad])
    with pytest.raises(WarmsetError, match="is not there"):
        read_legs([tmp_path / "absent.json"])
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"stages": {"head": 1.0, "total": 1.0}, "ms_per_window": 1.0}))
    with pytest.raises(WarmsetError, match=r"1 to 3 legs in all\. Got 4"):
        read_legs([answer] * 4)
    assert read_legs([answer])[0]["sum_ms"] == 1.0


def test_the_stage_table_takes_medians_and_gaps_between_windows():
    clock = StampClock(CPU)
    for _ in range(3):
        with clock.captured():
            clock.kind = "linear"
            with clock.stage("token mixer"), clock.stage("shared expert"):
                pass
            clock.kind = ANY_LAYER
    marks = clock.marks
    assert marks[0] == Mark(stage="gap", kind=ANY_LAYER) and marks[1] == Mark(
        stage="token mixer", kind="linear"
    )
    # three windows by hand: 1, 2 and 9 ms in the mixer, 4 ms from one window to the next
    starts = [0, 10, 22]
    for number, (begin, mixer) in enumerate(zip(starts, (1, 2, 9), strict=True)):
        times = [begin, begin, begin + mixer, begin + mixer + 1, begin + mixer + 2, begin + mixer + 2]
        stamps = torch.tensor(times[: len(marks)]) * 1_000_000
        target = clock._stamp_N if number == 2 else clock._log_WN[number + 1]
        target[: len(marks)] = stamps
    windows = clock.read(marks)
    assert [window[("token mixer", "linear")] for window in windows] == pytest.approx([2, 3, 10])
    table = stage_table(windows)
    assert table["stages"]["token mixer"] == 3 and table["windows"] == 3
    assert table["stages"]["gap"] == pytest.approx(7)


def _text(table) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()

"""Arms of `bench window` and `bench decode`: what a stretch gives, the same work, the verdict, what is refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from ab_experiments import Fakes, call, speeds

from warmset.errors import WarmsetError
from warmset.measure.ab.leg import talk
from warmset.measure.ab.proof import compare_work
from warmset.measure.ab.run import _Budget
from warmset.measure.ab.windows import ALL_WINDOWS, replay_windows
from warmset.measure.price.speed import rehearsal_trace
from warmset.measure.recording import Recording, ranked, save_recording
from warmset.measure.whole_legs import run_whole
from warmset.measure.whole_request import Request

CPU = torch.device("cpu")
WINDOW = "bench window --trace t --rows 4"


@pytest.fixture
def fakes(tmp_path, monkeypatch, capsys) -> Fakes:
    return Fakes(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return rehearsal_trace("tiny", tmp_path_factory.mktemp("trace"))


def marked(folder):
    """A recording of 3 windows of 4 rows, of which 3, 1 and 2 were kept."""
    scores_NLE = np.random.default_rng(0).normal(size=(12, 2, 16)).astype(np.float32)
    expert_P, score_P, count_NL = ranked(scores_NLE, 4, None)
    kept_N = np.concatenate([np.arange(4) < kept for kept in (3, 1, 2)]).astype(np.uint8)
    recording = Recording(
        expert_P=expert_P, score_P=score_P, count_NL=count_NL,
        window_N=np.repeat(np.arange(3), 4).astype(np.uint32), committed_N=kept_N,
        position_N=np.arange(12, dtype=np.uint32), kind_N=np.zeros(12, dtype=np.uint8), kinds=("prose",),
        num_experts=16, top_k=4, renormalize=True, margin=None, expert_bytes=None, model="none", fingerprint="none",
    )  # fmt: skip
    save_recording(recording, folder / "marked.safetensors")
    return folder / "marked.safetensors"


# -- a leg ----------------------------------------------------------------------------------------------------


def replay(trace, *, rows=4, slots=24, margin=None, first=14, samples=2, windows=3) -> list[dict]:
    """The lines of a leg in this process."""
    said: list[dict] = []
    request = Request(
        shape="tiny", rows=[rows], colds=[], trace=trace, slots=slots, trace_windows=ALL_WINDOWS,
        margin=margin, route_kernel="warp",
    )  # fmt: skip
    replay_windows(request, CPU, said.append, first_window=first, samples=samples, windows=windows)
    return said


def test_a_leg_says_what_its_windows_read(trace):
    start, *samples, end = replay(trace)
    assert start["event"] == "start" and start["pid"] == os.getpid() and start["slots"] == 24
    assert start["trace_windows"] == 16, "64 rows of one kind"
    assert end["event"] == "end" and [sample["event"] for sample in samples] == ["sample"] * 2
    for sample in samples:
        assert sample["windows"] == 3 and sample["ms_per_window"] > 0 and sample["swaps"] == 0
        assert sample["tokens_per_sec"] is sample["accepted_per_window"] is None, "the trace has no marks"
        layer_windows = 4 * 3
        cold = sample["cold_experts_per_layer_window"] * layer_windows
        assert 0 < cold < sample["distinct_experts"] <= 16 * layer_windows
        assert sample["hit_rate"] == pytest.approx(1 - cold / sample["distinct_experts"])
    assert samples[0]["work_sha256"] != samples[1]["work_sha256"]


def test_the_work_of_a_stretch_does_not_depend_on_slots_or_policy(trace):
    def work(**changes):
        return [line for line in replay(trace, **changes) if line["event"] == "sample"]

    exact, all_cold, swapping = work(), work(slots=0), work(margin=9.0)
    hashes = [[sample["work_sha256"] for sample in samples] for samples in (exact, all_cold, swapping)]
    assert hashes[0] == hashes[1] == hashes[2]
    read = [[sample["distinct_experts"] for sample in samples] for samples in (exact, all_cold, swapping)]
    assert read[0] == read[1] != read[2]
    assert all(sample["hit_rate"] == 0 for sample in all_cold)
    assert all(sample["swaps"] > 0 for sample in swapping)
    for left, right in zip(exact, swapping, strict=True):
        assert left["cold_experts_per_layer_window"] > right["cold_experts_per_layer_window"]
    assert work(first=14 + 16)[0]["work_sha256"] == hashes[0][0], "the trace begins again at its end"
    assert work(first=13)[0]["work_sha256"] != hashes[0][0]
    assert work(rows=1)[0]["work_sha256"] != hashes[0][0]


def test_tokens_a_second_are_those_that_the_trace_kept(tmp_path):
    start, sample, _ = replay(marked(tmp_path), samples=1, first=0, windows=2)
    assert start["trace_windows"] == 3 and sample["accepted_per_window"] == 2.0
    assert sample["tokens_per_sec"] == pytest.approx(2e3 / sample["ms_per_window"])


def test_the_window_bench_measures_one_leg_alone(trace):
    def names(**given) -> list[str]:
        return list(Request(shape="tiny", rows=[1], colds=[], trace=trace, **given).legs())

    assert names() == ["off", "swap_serial", "route_fused"]
    assert names(route_kernel="serial", margin=1.0) == ["swap_serial"]
    assert names(route_kernel="warp", margin=1.0) == ["swap_warp"]
    assert names(route_kernel="fused", margin=1.0) == ["route_fused"]
    assert names(route_kernel="warp") == ["off"]
    request = Request(
        shape="tiny", rows=[1], colds=[], trace=trace, slots=24, margin=9.0, route_kernel="warp"
    )
    found = run_whole(request, CPU)
    assert found["failed"] == [] and list(found["results"]["trace_t1"]) == ["swap_warp"]
    assert found["results"]["trace_t1"]["swap_warp"]["swaps"] > 0
    with pytest.raises(WarmsetError, match="route-kernel must be one of"):
        names(route_kernel="best")


# -- an experiment --------------------------------------------------------------------------------------------


def windows(fakes, *more: str, b: str = f"{WINDOW} --route-resident 1", **orders):
    return fakes.run("--pairs", "6", *more, a=WINDOW, b=b, **orders)


B = [110.0 + pair for pair in range(6)]


def test_the_verdict_on_windows_is_about_their_time(fakes, tmp_path):
    words = ("--windows", "7", "--markdown", str(tmp_path / "r.md"), "--plot", str(tmp_path / "r.svg"))
    code, out, err = windows(fakes, *words, speeds=speeds(6, "alternating", 100.0, B))
    assert code == 0 and "B against A: faster. B is faster in 6 of 6 pairs, p = 0.0312." in out
    assert "Ms a window: -" in out and "Same work: the hashes of all windows are equal." in out
    assert "leg 1 of 12: pair 1, A: 10.00 ms a window" in err
    results = fakes.results()
    assert results["metrics"]["tokens_per_sec"] is None and results["metrics"]["ms_per_window"]["better"] == 6
    assert results["same_work"]["proven"] is True and results["same_work"]["equal_tokens"] is None
    first = {leg["pair"]: leg["first_window"] for leg in results["legs"]}
    assert all(leg["first_window"] == first[leg["pair"]] for leg in results["legs"])
    assert len(set(first.values())) == 6
    config = json.loads(fakes.record.read_text())["config"]
    assert config["windows"] == 7 and "prompts" not in config and "max_new_tokens" not in config
    text = (tmp_path / "r.md").read_text()
    assert "6 pairs, 2 stretches of 7 windows a leg" in text and "tiny, windows of 4 rows" in text
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_slower_windows(fakes):
    code, out, _ = windows(fakes, speeds=speeds(6, "alternating", 100.0, [90.0 + n for n in range(6)]))
    assert code == 0 and "B against A: slower. B is faster in 0 of 6 pairs" in out


def test_other_windows_are_no_verdict_and_red(fakes):
    code, out, _ = windows(fakes, speeds=speeds(6, "alternating", 100.0, B), work={"5": "other"})
    assert code == 0 and "no verdict. The windows that both arms ran" in out and "differ in pair 3" in out
    assert json.loads(fakes.record.read_text())["tests"] == "red"


@pytest.mark.parametrize("exact, proven", [(True, False), (False, True)])
def test_exact_arms_must_read_the_same_experts(exact, proven):
    sides = {
        arm: {"samples": [{"work_sha256": "w", "distinct_experts": read}]}
        for arm, read in (("a", 9), ("b", 8))
    }
    config = {"windows": 1, "arms": {arm: {"exact_work": ["x"] if exact else None} for arm in "ab"}}
    assert compare_work(config, [(0, sides)])["proven"] is proven
    assert compare_work(config, [])["proven"] is None


def test_a_budget_ends_between_pairs_and_resume_goes_on(fakes):
    given = ("--windows", "7", "--budget-sec", "0.001")
    code, out, err = windows(fakes, *given, speeds=speeds(6, "alternating", 100.0, B))
    assert code == 0 and "5 pairs are still to run" in out and "has 2 of 12 legs: --resume goes on" in err
    code, out, err = fakes.call("--resume", "--json", str(fakes.record))
    assert code == 0 and "B against A: faster" in out and "of 12 legs: --resume" not in err
    assert [pair["split"] for pair in fakes.results()["pairs"]] == [False] * 6


def test_a_pair_begins_when_the_longest_so_far_still_fits(monkeypatch):
    now = iter([0.0, 0.0, 10.0, 18.0, 28.0])
    monkeypatch.setattr("warmset.measure.ab.run.time.monotonic", lambda: next(now))
    budget = _Budget(30.0)
    assert [budget.allows_a_pair() for _ in range(4)] == [True, True, True, False]


def test_a_leg_of_windows_in_a_process_of_its_own(trace, monkeypatch):
    """The real command, with the kernels in Triton's interpreter, as a rehearsal runs it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    words = ["bench", "window", "--shape", "tiny", "--device", "cpu", "--trace", str(trace), "--rows", "1"]
    job = {"words": words, "first_window": 3, "samples": 1, "windows": 1}
    lines, failed = talk(None, job)
    assert failed is None and [line["event"] for line in lines] == ["start", "sample", "end"]
    assert lines[0]["pid"] != os.getpid() and lines[0]["gpu"] is None and lines[0]["trace_windows"] == 64
    assert lines[1]["distinct_experts"] == 16, "four picks of one row in each of four layers"


def test_a_real_experiment_of_decoding_with_windows_and_without(tmp_path, monkeypatch, capsys):
    """One row at a time against windows of four with drafts: both exact, so the same tokens."""
    path = tmp_path / "record.json"
    words = ["--pairs", "1", "--samples", "1", "--max-new-tokens", "6", "--json", str(path)]
    arms = ["--a", "bench decode --device cpu", "--b", "bench decode --device cpu --windows 4"]
    code, out, _ = call(monkeypatch, capsys, *arms, *words)
    assert code == 0 and "all token hashes are equal" in out
    record = json.loads(path.read_text())
    assert [record["config"]["arms"][arm]["config"]["window"] for arm in "ab"] == [1, 4]
    assert record["config"]["arms"]["b"]["words"] == ["bench", "decode", "--device", "cpu", "--windows", "4"]
    for leg in record["results"]["legs"]:
        (sample,) = leg["samples"]
        assert sample["new_tokens"] == 6 and sample["cold_experts_per_layer_window"] == 0


# -- bad input ------------------------------------------------------------------------------------------------

BAD = [
    ("bench window {t}", "--slots 3", "arms of one command. Got bench window and generate"),
    ("bench window {t}", "bench decode", "arms of one command. Got bench window and bench decode"),
    ("bench window {t}", "bench window --rows 4", "--b: an arm of bench window needs --trace FILE"),
    ("bench window {t}", "bench window {t} --rows 1", "--rows is 4 in A and 1 in B"),
    ("bench window {t}", "bench window {t} --shape tiny-exp", "--shape is tiny in A and tiny-exp in B"),
    ("bench window {t}", "bench window {t} --rows 1,4", "--b: --rows must be one number of rows"),
    ("bench window {t}", "bench window {t} --rows 3", "--b: rows must be of 1, 4, 8. Got 3."),
    ("bench window {t}", "bench window {t} --cold-experts 1", "--b may not have --cold-experts"),
    ("bench window {t}", "bench window {t} --tiles narrow", "--b may not have --tiles"),
    ("bench window {t}", "bench window {t} --part all", "--b may not have --part"),
    ("bench window {t}", "bench window {t} --budget-sec 4", "--b may not have --budget-sec"),
    ("bench window {t}", "bench window {t} --json x", "--b may not have --json"),
    ("bench window {t}", "bench window {t} --bogus", "--b: No such option: --bogus"),
    ("bench window {t}", "bench window {t} --slots 999", "--b: slots must be 0 to 64. Got 999."),
    ("bench window {t}", "bench window {t} --route-kernel best", "--b: route-kernel must be one of"),
    ("bench window {t}", "bench window {t} --route-resident nan", "finite"),
    ("bench window {t}", "bench window {t} --rows 4 --route-kernel fused", "identical"),
    ("bench window {t}", "bench window {t} --shape qwen3-next-80b", "on a CPU it only rehearses"),
    ("bench window {t}", "bench window --shape tiny --device cpu --trace /nowhere", "/nowhere"),
    ("bench window {t}", "bench window --shape tiny --device cpu --trace {f}", "--b: "),
    ("bench decode", "bench decode --windows 1", "identical"),
    ("bench decode", "bench decode --windows 1,2", "--b: --windows must be one number of rows"),
    ("bench decode", "bench decode --windows 9", "--b: window"),
    ("bench decode", "bench decode --tokens 9", "it is --max-new-tokens of ab"),
    ("bench decode", "bench decode --rounds 9", "it is --samples of ab"),
    ("bench decode", "bench decode --help", "options of bench decode"),
]


@pytest.mark.parametrize("a, b, part", BAD)
def test_bad_arms_are_one_sentence_before_the_first_leg(trace, monkeypatch, capsys, a, b, part):
    refused(trace, monkeypatch, capsys, ["--a", a, "--b", b], part)


@pytest.mark.parametrize(
    "arms, more, part",
    [
        ("bench window {t}", ["--prompts", "x"], "--prompts is not for arms of bench window"),
        ("bench window {t}", ["--max-new-tokens", "3"], "--max-new-tokens is not for arms of bench window"),
        ("bench window {t}", ["builtin:tiny"], "MODEL is not for arms of bench window"),
        ("bench window {t}", ["--windows", "151"], "windows must be 1 to 150. Got 151."),
        ("bench window {t}", ["--windows", "0"], "windows must be 1 to 150. Got 0."),
        ("bench decode", ["builtin:tiny"], "MODEL is not for arms of bench decode"),
        ("bench decode", ["--windows", "3"], "--windows is not for arms of bench decode"),
    ],
)
def test_options_that_the_samples_do_not_have(trace, monkeypatch, capsys, arms, more, part):
    refused(trace, monkeypatch, capsys, ["--a", arms, "--null", *more], part)


def refused(trace, monkeypatch, capsys, words: list[str], part: str) -> None:
    def must_not_run(*_, **__):
        raise AssertionError("a leg began although the input is bad")

    monkeypatch.setattr("warmset.measure.ab.run.run_arm", must_not_run)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    filled = [
        word.replace("{t}", f"--shape tiny --device cpu --trace {trace}").replace("{f}", __file__)
        for word in words
    ]
    code, out, err = call(monkeypatch, capsys, *filled)
    assert code == 2 and out == ""
    assert err.startswith("warmset: ") and err.count("\n") == 1 and part in err, err


def test_windows_need_a_gpu(trace, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arm = f"bench window --shape tiny --device cpu --trace {trace}"
    code, _, err = call(monkeypatch, capsys, "--a", arm, "--null")
    assert code == 2 and err.count("\n") == 1 and "bench window needs a CUDA device" in err

"""Matched pairs: legs that are real processes, the record that grows, resuming, kills, proof of work, bad input."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ab_experiments import FAKE, Fakes, call, speeds

from warmset.errors import WarmsetError
from warmset.measure.ab import analysis
from warmset.measure.ab.plan import PROMPTS_FILE, read_prompts
from warmset.measure.ab.run import held
from warmset.measure.ab.state import machine_state
from warmset.models import BUILTIN_PROFILES


@pytest.fixture
def fakes(tmp_path, monkeypatch, capsys) -> Fakes:
    return Fakes(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("order", ["alternating", "halves"])
def test_faster_with_n_p_and_interval(fakes, order):
    b = [105.0, 106.0, 104.0, 107.0, 103.0, 108.0, 105.5, 106.5]
    code, out, err = fakes.run("--pairs", "8", "--order", order, speeds=speeds(8, order, 100.0, b))
    assert code == 0 and err.count("\n") == 16
    assert "B against A: faster. B is faster in 8 of 8 pairs, p = 0.0078." in out
    assert "all token hashes are equal" in out
    results = fakes.results()
    summary = results["metrics"]["tokens_per_sec"]
    assert summary["difference"]["median"] == pytest.approx(5.75)
    assert summary["low"] > 3 and summary["high"] < 8
    assert results["metrics"]["ms_per_window"]["better"] == 8
    assert results["metrics"]["prompt_ms"] is None  # unknown, not 0
    assert results["metrics"]["accepted_per_window"]["ties"] == 8
    for name in ("a_first", "b_first"):
        assert results["by_order"][name]["tokens_per_sec"]["n"] == 4
    firsts = [pair["first"] for pair in results["pairs"]]
    assert firsts == list("abababab" if order == "alternating" else "aaaabbbb")


def test_slower_and_the_other_outputs(fakes, tmp_path):
    words = ("--pairs", "6", "--markdown", str(tmp_path / "r.md"), "--plot", str(tmp_path / "r.svg"))
    b = [90.0, 91.0, 92.0, 93.0, 94.0, 95.0]
    code, out, _ = fakes.run(*words, speeds=speeds(6, "alternating", 100.0, b))
    assert code == 0 and "B against A: slower." in out
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("**B against A: slower.") and "| 6 | B | 100.00 / 95.00 | -5.0% |" in text
    assert "<svg" in (tmp_path / "r.svg").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") >= 6 for line in rows)


def test_a_failed_leg_drops_its_pair_and_says_so(fakes):
    b = [110.0 + pair for pair in range(7)]
    code, out, err = fakes.run("--pairs", "7", fail=[3], speeds=speeds(7, "alternating", 100.0, b))
    assert code == 0
    assert "Pair 2 is left out: leg A: the weights are gone." in out
    assert "leg 4 of 14: pair 2, A: failed" in err
    results = fakes.results()
    assert [pair["pair"] for pair in results["pairs"]] == [0, 2, 3, 4, 5, 6]
    assert results["verdict"]["word"] == "faster" and results["missing_pairs"] == 0
    fakes.run("--pairs", "7", "--resume", fail=[], speeds=[1.0])
    assert len(fakes.legs_run()) == 14  # nothing is tried again


def test_other_tokens_in_exact_arms_are_no_verdict_and_red(fakes):
    b = [110.0 + pair for pair in range(6)]
    code, out, _ = fakes.run("--pairs", "6", tokens={"5": "1 2 4"}, speeds=speeds(6, "alternating", 100.0, b))
    assert code == 0 and "no verdict. Both arms are exact, and their tokens differ in pair 3." in out
    assert json.loads(fakes.record.read_text())["tests"] == "red"
    assert fakes.results()["same_work"]["equal_tokens"] == pytest.approx(1 - 1 / 18)


def test_a_policy_may_change_tokens(fakes):
    b = [110.0 + pair for pair in range(6)]
    code, out, _ = fakes.run(
        "--pairs",
        "6",
        b="--route-resident 0.25",
        tokens={"5": "1 2 4"},
        speeds=speeds(6, "alternating", 100.0, b),
    )
    assert code == 0 and "B against A: faster" in out and "94.4% of the tokens are equal" in out
    assert fakes.results()["same_work"]["proven"] is None


def stop_at_leg(fakes: Fakes, number: int, how: signal.Signals) -> tuple[int, str]:
    """Start an experiment of 6 pairs, wait until that leg hangs, and send the signal to the experiment alone."""
    b = [110.0 + pair for pair in range(6)]
    orders = {"speeds": speeds(6, "alternating", 100.0, b), "hang": number}
    fakes.orders.write_text(json.dumps(orders))
    command = [sys.executable, "-m", "warmset", "ab", *fakes.words("--pairs", "6")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
    )
    legs = fakes.orders.with_suffix(".legs")
    deadline = time.monotonic() + 60
    while not legs.exists() or len(legs.read_text().splitlines()) <= number:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def test_ctrl_c_leaves_a_record_that_goes_on(fakes):
    code, err = stop_at_leg(fakes, 3, signal.SIGINT)
    assert code == 130 and "has 3 of 12 legs: --resume goes on" in err
    hung = int(fakes.legs_run()[3].split()[0])
    assert not psutil.pid_exists(hung)
    results = fakes.results()
    assert len(results["legs"]) == 3 and results["verdict"]["reason"].startswith("5 pairs are still to run")
    fakes.orders.with_suffix(".legs").write_text("".join(f"{line}\n" for line in fakes.legs_run()[:3]))
    orders = json.loads(fakes.orders.read_text()) | {"hang": None}
    fakes.orders.write_text(json.dumps(orders))
    code, out, _ = fakes.call("--resume", "--json", str(fakes.record))  # the record knows the rest
    assert code == 0 and "B against A: faster. B is faster in 6 of 6 pairs" in out
    assert "The legs of pair 2 ran in two calls." in out
    results = fakes.results()
    assert len(results["legs"]) == 12 and results["runs"] == 2
    assert [leg["run"] for leg in results["legs"]] == [1] * 3 + [2] * 9
    assert [pair["split"] for pair in results["pairs"]] == [False, True, False, False, False, False]
    pids = [leg["pid"] for leg in results["legs"]]
    assert len(set(pids)) == 12 and all(leg["started"] < leg["ended"] for leg in results["legs"])


def test_a_kill_loses_the_running_leg_only(fakes):
    code, _ = stop_at_leg(fakes, 2, signal.SIGKILL)
    os.kill(int(fakes.legs_run()[2].split()[0]), signal.SIGKILL)  # the stand-in does not look after itself
    assert code == -signal.SIGKILL and len(fakes.results()["legs"]) == 2


def test_two_experiments_do_not_write_one_record(fakes):
    with held(fakes.record):
        code, _, err = fakes.run("--pairs", "1", speeds=[100.0, 101.0])
        assert code == 2 and f"{fakes.record} is in use by another `warmset ab`" in err
        assert not fakes.record.exists()
    code, _, _ = fakes.run("--pairs", "1", speeds=[100.0, 101.0])
    assert code == 0 and len(fakes.results()["legs"]) == 2
    assert not list(fakes.record.parent.glob("*.lock"))


def test_a_leg_ends_when_its_experiment_is_gone():
    """The real worker: waiting for nothing but the end of its stdin, in the middle of a job."""
    command = [sys.executable, "-P", "-m", "warmset", "ab-leg"]
    env = {**os.environ, "PYTHONPATH": str(FAKE.parent.parent)}
    prompts = json.loads(PROMPTS_FILE.read_text())["prose"]
    job = {"words": ["builtin:tiny", "--slots", "33%"], "prompts": prompts, "max_new_tokens": 2_000}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    process.stdin.write((json.dumps(job) + "\n").encode())
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["event"] == "start"
    process.stdin.close()
    assert process.wait(10) == 1
    process.stdout.close()


def test_resume_refuses_another_experiment(fakes):
    fakes.run("--pairs", "1", speeds=[100.0, 101.0])
    for change in (["--pairs", "2"], ["--pairs", "1", "--seed", "1"], ["--pairs", "1", "--samples", "3"]):
        code, _, err = fakes.call(*fakes.words(*change, "--resume"))
        assert code == 2 and "is of another experiment" in err and err.count("\n") == 1
    code, _, err = fakes.call(*fakes.words("--pairs", "1", "--resume", b="--slots 3"))
    assert code == 2 and "another experiment: arms.b" in err
    before = fakes.record.read_bytes()
    code, _, err = fakes.call(*fakes.words("--pairs", "1"))
    assert code == 2 and "is there already" in err and fakes.record.read_bytes() == before


def test_a_complete_record_is_shown_where_its_arms_cannot_run(fakes, monkeypatch):
    _, first, _ = fakes.run("--pairs", "6", speeds=[100.0, 101.0])
    monkeypatch.setattr("warmset.cli.ab._plan", lambda *given: pytest.fail("an arm was made"))
    code, again, _ = fakes.call("--resume", "--json", str(fakes.record))
    assert code == 0 and again == first and len(fakes.legs_run()) == 12
    whole = fakes.record.read_text()
    for damage in ({"samples": []}, {"samples": 3}, {"pair": "one"}):
        record = json.loads(whole)
        record["results"]["legs"][3] |= damage
        fakes.record.write_text(json.dumps(record))
        before = fakes.record.read_bytes()
        code, _, err = fakes.call("--resume", "--json", str(fakes.record))
        assert code == 2 and "damaged" in err and err.count("\n") == 1 and fakes.record.read_bytes() == before


def test_every_leg_gets_a_fresh_copy_of_a_learned_file(fakes, tmp_path):
    learned = tmp_path / "learned.json"
    learned.write_text("as saved")
    fakes.run("--pairs", "2", speeds=[100.0], files={"learn": str(learned)})
    assert learned.read_text() == "as saved"
    used = [line.split("--learn ")[1] for line in fakes.legs_run()]
    assert len(set(used)) == 4 and all(Path(name).name == "learned.json" for name in used)
    config = json.loads(fakes.record.read_text())["config"]
    assert config["arms"]["a"]["files"] == {"learn": hashlib.sha256(b"as saved").hexdigest()}
    learned.write_text("changed")
    code, _, err = fakes.call(*fakes.words("--pairs", "2", "--resume"))
    assert code == 2 and "arms.a.files.learn" in err


def test_prompts_of_a_pair_are_the_same_and_differ_from_pair_to_pair(fakes):
    fakes.run("--pairs", "3", speeds=[100.0])
    legs = fakes.results()["legs"]
    by_pair = {leg["pair"]: leg["prompts"] for leg in legs}
    assert all(leg["prompts"] == by_pair[leg["pair"]] for leg in legs)
    assert len({tuple(numbers) for numbers in by_pair.values()}) == 3
    assert all(len(set(numbers)) == 3 for numbers in by_pair.values())


def test_a_real_experiment_with_both_arms_exact(checkpoints, tmp_path, monkeypatch, capsys):
    """Two slot counts of one model: fresh processes, equal tokens, figures of `generate`."""
    path = tmp_path / "record.json"
    model = str(checkpoints["qwen3_moe"])
    words = ["--pairs", "1", "--samples", "2", "--max-new-tokens", "5", "--json", str(path)]
    words += ["--b-python", sys.executable]  # as another install would be
    code, out, _ = call(
        monkeypatch, capsys, model, "--a", "--slots 20%", "--b", "generate --slots all", *words
    )
    assert code == 0 and "all token hashes are equal" in out and "no verdict. Too few pairs" in out
    record = json.loads(path.read_text())
    legs = record["results"]["legs"]
    assert record["tests"] == "green" and record["name"] == "ab"
    assert legs[0]["pid"] != legs[1]["pid"] and os.getpid() not in (leg["pid"] for leg in legs)
    for leg in legs:
        assert leg["failed"] is None and len(leg["samples"]) == 2
        assert leg["machine"]["before"]["load_1min"] >= 0 and leg["machine"]["after"] is not None
        assert leg["versions"]["torch"] and leg["slots"] in (6, 32)
        for sample in leg["samples"]:
            assert sample["new_tokens"] == 5 and len(sample["tokens"].split()) == 5
            assert sample["tokens_sha256"] == hashlib.sha256(sample["tokens"].encode()).hexdigest()
            assert sample["tokens_per_sec"] > 0 and sample["prompt_ms"] > 0 and sample["windows"] == 4
    assert record["results"]["metrics"]["prompt_ms"]["n"] == 1
    cold = record["results"]["metrics"]["cold_experts_per_layer_window"]
    assert cold["better"] == 1 and cold["b"]["median"] == 0


def test_the_profile_that_a_leg_used_is_in_the_record(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    profile = tmp_path / "mine.json"
    profile.write_bytes(BUILTIN_PROFILES["builtin:tiny"].read_bytes())
    words = ["--null", "--pairs", "1", "--samples", "1", "--max-new-tokens", "2", "--json", str(path)]
    code, out, _ = call(monkeypatch, capsys, "--a", f"--slots 10% --profile {profile}", *words)
    assert code == 0 and "no verdict" in out
    record = json.loads(path.read_text())
    expected = hashlib.sha256(profile.read_bytes()).hexdigest()
    assert [leg["profile_sha256"] for leg in record["results"]["legs"]] == [expected] * 2
    assert record["config"]["arms"]["b"]["files"] == {"profile": expected}


BAD = [
    (["--a", "--slots 1", "--b", "--slots 1"], "identical"),
    (["--a", "--slots 33%", "--b", "generate --slots 33%  builtin:tiny"], "identical"),
    (["--a", "--window 4", "--b", "--num-speculative-tokens 3"], "identical"),
    (["--a", "--slots 1", "--b", "--slots 2", "--pairs", "0"], "pairs must be 1 to 1,000. Got 0."),
    (["--a", "--slots 1", "--b", "--slots 2", "--samples", "0"], "samples"),
    (["--a", "--slots 1", "--b", "--slots 2", "--max-new-tokens", "1"], "max_new_tokens"),
    (["--a", "--slots 1", "--b", "--slots 2", "--order", "fixed"], "alternating, halves"),
    (["--a", "--slots 1", "--b", "--bogus 2"], "--b: No such option: --bogus"),
    (["--a", "--slots 1", "--b", "--slots x"], "--b: slots"),
    (["--a", "--slots 1", "--b", "--slots 99999999"], "--b: slots"),
    (["--a", "--slots 1", "--b", "--route-resident nan"], "nan"),
    (["--a", "--slots 1", "--b", "--prompt hi"], "--b may not have --prompt"),
    (["--a", "--slots 1", "--b", "--temperature 1"], "greedy"),
    (["--a", "--slots 1", "--b", "--max-new-tokens 3"], "option of ab"),
    (["--a", "--slots 1", "--b", "--json -"], "--json"),
    (["--a", "--slots 1", "--b", "--help"], "--help"),
    (["--a", "--slots 1", "--b", "'"], "quotation"),
    (["--a", "--slots 1", "--b", "bench decode"], "of one command. Got generate and bench decode"),
    (["--a", "bench kernels", "--b", "bench kernels"], "no other bench decodes"),
    (["--a", "--slots 1", "--b", "--slots 2", "--windows", "3"], "--windows is not for arms of generate"),
    (["--a", "--slots 1", "--b", "--slots 2", "--budget-sec", "0"], "--budget-sec must be above 0"),
    (["--a", "--slots 1", "--b", "nowhere/at/all --slots 2"], "nowhere/at/all"),
    (["--a", "--slots 1", "--b", "--max-model-len 40"], "must fit into max_model_len, 40"),
    (["--a", "--slots 1"], "--b must say"),
    (["--b", "--slots 1"], "--a must say"),
    (["--a", "--slots 1", "--null", "--b", "--slots 1"], "--null"),
    (["--a", "--slots 1", "--b", "--slots 1", "--b-python", "/nowhere/python"], "does not start"),
    (["--a", "--slots 1", "--b", "--slots 2", "--prompts", "/nowhere.json"], "/nowhere.json"),
    (["--a", "--slots 1", "--b", "--slots 2", "--resume"], "--resume needs --json"),
    (["--a", "--slots 1", "--b", "--slots 2", "--plot", "x.jpg"], ".png"),
    (["--a", "--slots 1", "--b", "--slots 2", "--effect", "5%"], "--simulate"),
    (["--simulate", "--effect", "5"], "a percentage such as 5%"),
    (["--simulate", "--effect", "nan%"], "a percentage"),
    (["--simulate", "--drift", "95%"], "drift"),
    (["--simulate", "--pairs", "0"], "pairs"),
    (["--simulate", "--a", "--slots 1"], "--simulate runs no engine"),
    (["--power", "0%"], "power"),
    (["--power", "3%", "--pairs", "4"], "--power runs no engine"),
    (["--pairs", "x"], "must be a whole number"),
]


@pytest.mark.parametrize("words, part", BAD)
def test_bad_input_is_one_sentence_before_the_first_leg(monkeypatch, capsys, words, part):
    def must_not_run(*_, **__):
        raise AssertionError("a leg began although the input is bad")

    monkeypatch.setattr("warmset.measure.ab.run.run_arm", must_not_run)
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 2 and out == ""
    assert err.startswith("warmset: ") and err.count("\n") == 1 and part in err, err


@pytest.mark.parametrize(
    "text, part",
    [
        ("[]", "Got none"),
        ("{}", "Got none"),
        ('["a", ""]', "number 2"),
        ('["  "]', "number 1"),
        ("[3]", "Got 3"),
        ('"text"', "a list of texts"),
        ("nonsense", "JSON"),
    ],
)
def test_prompts_that_are_refused(tmp_path, text, part):
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(WarmsetError, match=part):
        read_prompts(file)


def test_more_samples_than_prompts(tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.json"
    file.write_text('["one", "two"]')
    words = ["--a", "--slots 1", "--b", "--slots 2", "--prompts", str(file), "--samples", "2"]
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and "2 samples and a warm-up need 3 prompts" in err


def test_an_unknown_flag_of_another_install_is_its_own_sentence(fakes):
    code, _, err = fakes.run(a="--bogus 1", speeds=[1.0])
    assert code == 2 and "No such option: --bogus" in err and not fakes.record.exists()


def test_simulation_and_power_on_the_command_line(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--simulate", "--effect", "0", "--drift", "10%")
    assert code == 0 and "Order alternating: no verdict." in out and "A always first" in out
    code, out, _ = call(monkeypatch, capsys, "--simulate", "--effect", "5%")
    assert code == 0 and "Order alternating: faster. B is faster in 12 of 12 pairs, p = 0.0005." in out
    code, out, _ = call(monkeypatch, capsys, "--simulate", "--drift", "10%", "--noise", "0%", "--pairs", "10")
    assert "A always first, the same clock: slower. B is faster in 0 of 10 pairs" in out
    code, out, _ = call(monkeypatch, capsys, "--power", "3%", "--json", "-")
    assert code == 0 and json.loads(out)["pairs"] == 25


def test_a_figure_that_the_engine_does_not_give_is_unknown():
    legs = [
        {
            "pair": 0,
            "place": place,
            "arm": arm,
            "run": 1,
            "failed": None,
            "samples": [
                {"tokens_per_sec": speed, "tokens": "1", "tokens_sha256": "x"} for speed in (1.0, 9.0, 2.0)
            ],
        }
        for place, arm in enumerate("ab")
    ]
    found = analysis.analyse({"pairs": 1, "arms": {arm: {"exact_work": None} for arm in "ab"}}, legs)
    assert found["pairs"][0]["a"]["tokens_per_sec"] == 2.0
    assert found["pairs"][0]["a"]["ms_per_window"] is None and found["metrics"]["ms_per_window"] is None


def test_gpus_in_the_state_of_the_machine(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1980, 2619, 41, 119.5, 97'\necho '345, 2619, 30, [N/A], 0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = machine_state()["gpus"]
    assert first == {"sm_mhz": 1980, "memory_mhz": 2619, "celsius": 41, "watts": 119.5, "busy_percent": 97}
    assert second["watts"] is None and second["sm_mhz"] == 345
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine_state()["gpus"] == []


def test_a_leg_without_a_job_is_one_sentence():
    command = [sys.executable, "-m", "warmset", "ab-leg"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and "is run by `warmset ab`" in done.stderr


def test_shipped_prompts_are_hashed():
    prompts = read_prompts()
    assert len(prompts.texts) >= 50 and len(set(prompts.texts)) == len(prompts.texts)
    assert prompts.sha256 == hashlib.sha256(PROMPTS_FILE.read_bytes()).hexdigest()

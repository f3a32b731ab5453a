"""The command line: one sentence and exit code 2 before anything loads; answers on stdout; the JSON object."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from warmset import cli

runner = CliRunner()


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "warmset", *words], capture_output=True, text=True, check=False
    )


def refused(monkeypatch, capsys, *words: str) -> str:
    """Run in this process with loading forbidden; the sentence on stderr."""

    def must_not_load(*_, **__):
        raise AssertionError("loaded although the input is bad")

    monkeypatch.setattr("warmset.model.load_trunk", must_not_load)
    monkeypatch.setattr(sys, "argv", ["warmset", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert left.value.code == 2, captured
    assert captured.out == "" and captured.err.startswith("warmset: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


BAD = [
    (["--slots", "-1"], "-1"),
    (["--slots", "101%"], "101%"),
    (["--slots", "x"], "'x'"),
    (["--slots", ""], "slots"),
    (["--slots", "nan%"], "nan"),
    (["--slots", "33"], "0 to 32"),
    (["--slots", "1.5"], "1.5"),
    (["--route-resident", "nan"], "nan"),
    (["--route-resident", "inf"], "inf"),
    (["--route-resident", "-inf"], "inf"),
    (["--route-resident", "1e39"], "finite"),
    (["--route-resident", "much"], "much"),
    (["--route-resident", "0.25", "--ranks", "9-6"], "9-6"),
    (["--route-resident", "0.25", "--ranks", "x"], "--ranks"),
    (["--route-resident", "0.25", "--ranks", "-1-3"], "-1-3"),
    (["--route-resident", "0.25", "--ranks", "4-9"], "4-9"),
    (["--route-resident", "0.25", "--policy", "exact"], "not both"),
    (["--ranks", "1-2"], "--route-resident"),
    (["--window", "0"], "window must be 1 to 8"),
    (["--window", "9"], "Got 9"),
    (["--window", "x"], "whole number"),
    (["--num-speculative-tokens", "8"], "0 to 7"),
    (["--num-speculative-tokens", "3", "--window", "4"], "give one of them"),
    (["--draft", "guess"], "none, lookup, mtp, model"),
    (["--draft", "mtp"], "MTP layer"),
    (["--draft", "model"], "belong together"),
    (["--draft", "lookup", "--draft-model", "builtin:tiny"], "belong together"),
    (["--draft-model", "no/such-folder-here"], "no/such-folder-here"),
    (["--repetition-penalty", "0"], "repetition_penalty"),
    (["--presence-penalty", "3"], "presence_penalty"),
    (["--frequency-penalty", "nan"], "frequency_penalty"),
    (["--logprobs", "21"], "logprobs"),
    (["--stop", ""], "stop"),
    (["--policy", "nope"], "nope"),
    (["--policy", "margin:margin=nan"], "margin"),
    (["--max-new-tokens", "-5"], "-5"),
    (["--max-new-tokens", "0"], "0"),
    (["--max-model-len", "0"], "0"),
    (["--max-model-len", "513"], "512"),
    (["--temperature", "-1"], "-1"),
    (["--temperature", "nan"], "nan"),
    (["--top-p", "0"], "0"),
    (["--top-p", "1.5"], "1.5"),
    (["--top-k", "-1"], "-1"),
    (["--min-p", "2"], "2"),
    (["--seed", "-1"], "-1"),
    (["--dtype", "int8"], "int8"),
    (["--device", "tpu"], "tpu"),
    (["--device", "cuda:99"], "cuda:99"),
    (["--admission", "magic"], "magic"),
    (["--json", "/no/such/folder/x.json"], "--json"),
    (["--bogus"], "--bogus"),
    (["--top-k", "x"], "x"),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence_and_exit_code_2(monkeypatch, capsys, checkpoints, words, named):
    folder = str(checkpoints["qwen3_moe"])
    assert named in refused(monkeypatch, capsys, "generate", folder, "--prompt", "The expert", *words)


def test_bad_models(monkeypatch, capsys, tmp_path):
    for model, named in (
        ("builtin:huge", "builtin:huge"),
        (str(tmp_path), "config.json"),
        (str(tmp_path / "none"), "none"),
        (__file__, "file"),
    ):
        assert named in refused(monkeypatch, capsys, "generate", model, "--prompt", "x")


def test_prompts_that_do_not_fit(monkeypatch, capsys, checkpoints):
    folder = str(checkpoints["qwen3_moe"])
    assert "prompt" in refused(monkeypatch, capsys, "generate", folder)
    assert "prompt" in refused(monkeypatch, capsys, "generate", folder, "--prompt", "")
    long = refused(monkeypatch, capsys, "generate", folder, "--prompt", "word " * 3000)
    assert "512" in long and "tokens" in long


def test_bad_parity_options(monkeypatch, capsys):
    for words in (["--cases", "0"], ["--cases", "1" + "0" * 30], ["--seed", "-1"], ["--device", "tpu"]):
        assert words[1] in refused(monkeypatch, capsys, "parity", *words)


def test_unknown_commands(monkeypatch, capsys):
    assert "nope" in refused(monkeypatch, capsys, "nope")


def test_json_on_stdout_is_the_object_alone(checkpoints):
    folder = str(checkpoints["qwen4_exp"])
    words = ["--slots", "33%", "--route-resident", "4", "--ranks", "2-99", "--max-new-tokens", "12"]
    answer = run("generate", folder, "--prompt", "The expert cache", *words, "--json", "-")
    assert answer.returncode == 0, answer.stderr
    value = json.loads(answer.stdout)
    assert value["routing"]["swaps"] > 0
    assert value["routing"]["cold_after"] < value["routing"]["cold_before"]
    assert value["new_tokens"] == 12 and value["finish_reason"] == "length"
    assert value["slots"] == round(0.33 * value["experts_total"])
    expected = (
        "model version text prompt_tokens new_tokens finish_reason windows accepted_per_window ms_per_window "
        "tokens_per_sec prompt_ms device dtype slots experts_total bytes_fast bytes_slow routing "
        "cold_experts_per_layer_window hit_rate stages seed"
    )
    assert set(expected.split()) <= set(value)
    assert "99" in answer.stderr and "causal_conv1d" not in answer.stderr


def test_text_streams_on_stdout_and_stats_go_to_stderr(checkpoints, tmp_path):
    folder = str(checkpoints["qwen3_moe"])
    words = ["generate", folder, "--prompt", "The expert", "--max-new-tokens", "5", "--slots", "3"]
    target = tmp_path / "answer.json"
    answer = run(*words, "--stats", "--json", str(target))
    value = json.loads(target.read_text())
    assert answer.returncode == 0 and answer.stdout == value["text"] + "\n"
    assert value["slots"] == 3 and "slots" in answer.stderr


def test_stages_are_printed_after_the_text(checkpoints):
    words = ["--prompt", "The expert", "--max-new-tokens", "5", "--stages"]
    answer = run("generate", str(checkpoints["qwen3_moe"]), *words)
    assert "token mixer" in answer.stdout and "total" in answer.stdout


def test_version_env_and_help(tmp_path):
    assert run("--version").stdout == "warmset 0.1.0\n"
    value = json.loads(run("env", "--json", "-").stdout)
    assert {"torch", "transformers", "gpus", "compiler", "ram_total_bytes", "memlock_bytes"} <= set(value)
    shown = run("env")
    assert shown.returncode == 0 and "torch" in shown.stdout
    for words in ([], ["--help"], ["bench"], ["generate", "--help"]):
        assert "Usage" in run(*words).stdout


def test_a_read_only_checkpoint_is_enough(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["olmoe"], tmp_path / "read-only")
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    answer = run("generate", str(folder), "--prompt", "x", "--max-new-tokens", "2")
    folder.chmod(0o755)
    assert answer.returncode == 0, answer.stderr

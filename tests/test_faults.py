"""Faults that were found by trying: each is one clear error, or harmless, and stays so."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers import decode_with_logits, open_engine
from safetensors.torch import load_file, save_file

import warmset
from warmset.config import EngineConfig, SamplingConfig
from warmset.errors import CheckpointError, PolicyError, WarmsetError
from warmset.profile import load_profile, write_atomically
from warmset.routing import Exact, Routed
from warmset.sample import sample_token


def test_one_answer_at_a_time(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    first = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=6))
    next(first)
    with pytest.raises(WarmsetError, match="one answer at a time"):
        next(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=2)))
    refused = []

    def ask() -> None:
        try:
            list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=2)))
        except WarmsetError as error:
            refused.append(error)

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert refused
    first.close()  # an answer that is given up frees the engine
    assert len(list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=3)))) == 3


def test_a_closed_engine_says_so_and_never_reads_again(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "0")
    answer = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=6))
    next(answer)
    engine.close()
    with pytest.raises(WarmsetError, match="closed"):
        list(answer)
    with pytest.raises(WarmsetError, match="closed"):
        list(engine.decode(prompt_ids, SamplingConfig()))
    engine.close()


def test_a_dropped_engine_leaves_no_open_file(checkpoints):
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    open_engine(checkpoints["mixtral"], "0")
    before = count()
    for _ in range(3):
        open_engine(checkpoints["mixtral"], "0")
    assert count() == before


@dataclass(frozen=True)
class Twisted:
    """A user's policy that returns what it should not; a right one when nothing is twisted."""

    what: str = ""

    def route(self, logits_TE, slot_E, *, rule, bias_E=None, context=None) -> Routed:
        routed = Exact().route(logits_TE, slot_E, rule=rule, context=context)
        if self.what == "raises":
            raise RuntimeError("no luck")
        if self.what == "exits":
            raise SystemExit(0)
        if self.what == "nothing":
            return None
        ids_TK, weights_TK = routed.ids_TK.clone(), routed.weights_TK.clone()
        if self.what == "too large":
            ids_TK[0, 0] = 5000
        if self.what == "negative":
            ids_TK[0, 0] = -7
        if self.what == "twice":
            ids_TK[:] = ids_TK[:, :1]
        if self.what == "short":
            ids_TK = ids_TK[:, :-1]
        if self.what == "float":
            ids_TK = ids_TK.float()
        if self.what == "nan":
            weights_TK[0, 0] = float("nan")
        return replace(routed, ids_TK=ids_TK, weights_TK=weights_TK)


@pytest.mark.parametrize(
    "what", ["raises", "exits", "nothing", "too large", "negative", "twice", "short", "float", "nan"]
)
def test_a_users_policy_is_checked(checkpoints, prompt_ids, what):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", Twisted(what))
    with pytest.raises(PolicyError, match="Twisted"):
        decode_with_logits(engine, prompt_ids, 3)


def test_a_users_policy_that_is_right_runs(checkpoints, prompt_ids):
    own = decode_with_logits(open_engine(checkpoints["qwen3_moe"], "33%", Twisted()), prompt_ids, 5)
    exact = decode_with_logits(open_engine(checkpoints["qwen3_moe"], "33%"), prompt_ids, 5)
    assert own[0] == exact[0] and torch.equal(own[1], exact[1])


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature, recwarn):
    logits_V = torch.tensor([1.0, 5.0, 30.0, 2.0])
    assert sample_token(logits_V, SamplingConfig(temperature=temperature, top_p=0.5), 3) == 2
    assert not recwarn.list


def test_a_profile_that_is_a_pipe_or_a_device_is_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        profile, reason = load_profile(path, None)
        assert profile is None and "regular file" in reason
    with open(tmp_path / "huge", "wb") as stream:
        stream.truncate(3 << 30)
    assert load_profile(tmp_path / "huge", None)[0] is None


def test_writing_keeps_links_and_devices(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_atomically(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "new"
    write_atomically(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "32"},
        {"hidden_size": 48},
        {"moe_intermediate_size": 25},
        {"num_experts_per_tok": "4"},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"vocab_size": 100},
        {"hidden_act": "nope"},
        {"rope_parameters": [1]},
        {"max_position_embeddings": -5},
        {"dtype": "zzz"},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
    ],
)
def test_a_configuration_that_does_not_fit_the_files(checkpoints, copy_of, edit_json, change):
    folder = copy_of(checkpoints["qwen3_moe"])
    edit_json(folder / "config.json", **change)
    with pytest.raises(ValueError) as caught:
        open_engine(folder, "0")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", '{"a": ' + "9" * 5000 + "}", "[" * 50_000, '{"eos_token_id": [[1]]}']
)
def test_broken_json_beside_the_weights(checkpoints, copy_of, text):
    folder = copy_of(checkpoints["qwen3_moe"])
    (folder / "generation_config.json").write_text(text)
    try:  # what transformers makes nothing of is left out, what it refuses is refused in one sentence
        engine = warmset.Engine.load(folder, slots="33%", device="cpu")
        assert list(engine.stream("The", max_new_tokens=2))
    except CheckpointError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    (folder / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError):
            warmset.Engine.load(folder, slots="0", device="cpu")
        (folder / name).write_bytes(whole)


def test_a_folder_without_a_tokenizer_says_so(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        warmset.Engine.load(folder, device="cpu")


def test_a_trunk_tensor_of_another_shape_is_refused(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        open_engine(folder, "0")


@pytest.mark.parametrize(
    "header", ["[]", "5", '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}']
)
def test_headers_that_are_no_headers(checkpoints, copy_of, header):
    file = copy_of(checkpoints["qwen3_moe"]) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_engine(file.parent, "0")


@pytest.mark.parametrize(
    "settings",
    [
        {"model": None},
        {"model": ""},
        {"device": 5},
        {"profile": 5},
        {"profile": ""},
        {"max_model_len": "9"},
        {"max_model_len": 9.5},
        {"max_model_len": True},
        {"vram": 5},
        {"stages": "yes"},
    ],
)
def test_engine_settings_of_the_wrong_type(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "5"},
        {"max_new_tokens": True},
        {"temperature": "x"},
        {"temperature": None},
        {"top_k": 1.5},
        {"top_p": None},
        {"seed": 1.5},
    ],
)
def test_sampling_settings_of_the_wrong_type(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingConfig(**settings)


def test_misuse_of_the_python_interface_is_a_value_error(checkpoints):
    folder = checkpoints["qwen3_moe"]
    for policy in (5, "margin", warmset.MarginSwap):
        with pytest.raises(ValueError, match="policy"):
            warmset.Engine.load(folder, device="cpu", policy=policy)
    with pytest.raises(ValueError, match="foo"):
        warmset.Engine.load(folder, device="cpu", foo=1)
    with pytest.raises(ValueError, match="revision"):
        warmset.Engine.load(folder, device="cpu", revision="abc")
    with warmset.Engine.load(folder, device="cpu", slots=4) as engine:
        for prompt in (5, b"x", ["x"], "\ud800", ""):
            with pytest.raises(ValueError, match="prompt"):
                list(engine.stream(prompt))
        with pytest.raises(ValueError, match="foo"):
            list(engine.stream("x", foo=1))
        with pytest.raises(ValueError, match="9000"):
            list(engine.tokens.decode([9000], SamplingConfig()))


def run(*words: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "warmset", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_an_answer_is_not_lost_to_a_record_that_cannot_be_written(checkpoints):
    words = ["generate", str(checkpoints["qwen3_moe"]), "--prompt", "x", "--max-new-tokens", "2", "--json"]
    for path in ("/proc/x.json", "/no/such/x.json", "x" * 300, "/"):
        done = run(*words, path)
        assert (done.returncode, done.stdout) == (2, ""), path
        assert done.stderr.count("\n") == 1 and "--json" in done.stderr


def test_a_reader_that_goes_away_ends_us_quietly(checkpoints):
    words = f"generate {checkpoints['qwen3_moe']} --prompt x --max-new-tokens 60"
    command = f"{sys.executable} -m warmset {words} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and done.stdout.endswith(("141\n", "0\n"))


@pytest.mark.parametrize("how", ["answer", "--help"])
def test_ctrl_c_says_that_it_stopped(checkpoints, how):
    """In the middle of an answer; and a command that ends by itself says nothing."""
    words = ["--help"]
    if how == "answer":
        words = f"{checkpoints['qwen3_moe']} --prompt x --max-new-tokens 500".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "warmset", "generate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # What a shell starts in the background ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.read(1)
    if how == "answer":
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    expected = (130, b"warmset: stopped.\n") if how == "answer" else (0, b"")
    assert (process.returncode, err) == expected


def test_a_prompt_that_is_no_unicode(checkpoints):
    done = run("generate", str(checkpoints["qwen3_moe"]), "--prompt", "\udcff")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Unicode" in done.stderr


def test_bench_window_needs_a_gpu():
    if torch.cuda.is_available():
        return
    done = run("bench", "window")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "row",
    [
        'bar = "x"',
        "bar = true",
        "bar = [1]",
        "file = 5\nbar = 1",
        "key = 5\nbar = 1",
        'name = "[/x]"\nbar = 1',
    ],
)
def test_bars_of_the_wrong_type(tmp_path, row):
    base = {"name": '"a"', "file": '"r.json"', "key": '"results.x"', "comparison": '"<="'}
    given = {line.split(" = ")[0] for line in row.split("\n")}
    lines = [f"{key} = {value}" for key, value in base.items() if key not in given]
    (tmp_path / "r.json").write_text(json.dumps({"tests": "green", "results": {"x": 1.0}}))
    (tmp_path / "bars.toml").write_text("[[bar]]\n" + "\n".join([*lines, row]) + "\n")
    done = run("bench", "check", "--bars", str(tmp_path / "bars.toml"))
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if "[/x]" in row else 2), done.stderr


def test_a_bars_file_without_a_bar_does_not_pass(tmp_path):
    (tmp_path / "bars.toml").write_text("")
    assert run("bench", "check", "--bars", str(tmp_path / "bars.toml")).returncode == 2

"""`warmset profile` and `warmset trace`: what they write, what fits a terminal, and bad input before anything loads."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from warmset import cli
from warmset.measure.heatmap import heat_table
from warmset.measure.recording import load_recording
from warmset.measure.replay_table import replay_tables
from warmset.models import BUILTIN_PROFILES
from warmset.profile import read_profile

runner = CliRunner()
MIX = str(BUILTIN_PROFILES["builtin:tiny"])
TEXT = "The server reads the query and the planner picks an index.\n" * 4


def answer_of(*words: str):
    return runner.invoke(cli.app, [str(word) for word in words])


def test_learn_merge_and_show(checkpoints, tmp_path):
    text, out, both = tmp_path / "t.txt", tmp_path / "p.json", tmp_path / "both.json"
    text.write_text(TEXT)
    answer = answer_of(
        "profile",
        "learn",
        checkpoints["qwen3_moe"],
        "--text",
        text,
        "--tokens",
        "40",
        "--out",
        out,
        "--json",
        "-",
    )
    assert answer.exit_code == 0, answer.output
    learned = read_profile(out)
    assert json.loads(answer.stdout)["rows"] == learned.rows == 40
    assert len(set(learned.counts_LE.sum(axis=1))) == 1 and learned.counts_LE.sum() % 40 == 0
    assert answer_of("profile", "merge", out, out, "--out", both).exit_code == 0
    assert np.array_equal(read_profile(both).counts_LE, 2 * learned.counts_LE)
    refused = answer_of("profile", "merge", out, MIX, "--out", both)
    assert refused.exit_code != 0 and "one model: layers is 2" in str(refused.exception)


@pytest.mark.parametrize(("name", "start"), [("map.png", b"\x89PNG"), ("map.svg", b"<?xml")])
def test_plots(tmp_path, name, start):
    assert answer_of("profile", "show", "--ranked", "--plot", tmp_path / name).exit_code == 0
    data = (tmp_path / name).read_bytes()
    assert data.startswith(start) and [file.name for file in tmp_path.iterdir()] == [name]
    if name.endswith("svg"):
        assert b"experts, the busiest first" in data and b"picks over an even share" in data


def width_of(table) -> int:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return max(len(line.rstrip()) for line in console.file.getvalue().splitlines())


def test_tables_fit_eighty_columns():
    learned = read_profile(BUILTIN_PROFILES["builtin:tiny"])
    assert width_of(heat_table(learned)) <= 80 and width_of(heat_table(learned, ranked=True)) <= 80
    run = {
        "policy": "exact", "admission": "lfu", "slots": 12_345, "unknown": None, "windows": 1, "hit_rate": 0.5,
        "cold_experts_per_layer_window": 12.3, "routing": {"swaps": 1_234_567}, "bytes_slow": 1.2e9,
        "bytes_moved": 1.2e8, "ms_per_window": 123.4,
    }  # fmt: skip
    known, unknown = replay_tables([run, {**run, "policy": "other", "unknown": "why"}])
    assert width_of(known) <= 80 and width_of(unknown) <= 80


def test_record_then_replay(checkpoints, tmp_path):
    text, out = tmp_path / "t.txt", tmp_path / "t.safetensors"
    text.write_text(TEXT)
    answer = answer_of(
        "trace",
        "record",
        checkpoints["qwen3_moe"],
        "--text",
        text,
        "--tokens",
        "24",
        "--window",
        "4",
        "--out",
        out,
    )
    assert answer.exit_code == 0, answer.output
    recorded = load_recording(out)
    assert recorded.num_rows == 24 and len(recorded.windows) == 6 and recorded.kinds == ("t",)
    answer = answer_of(
        *("trace", "replay", out, "--slots", "33%,all", "--policy", "exact", "--policy", "margin:margin=2"),
        *("--json", "-"),
    )
    runs = json.loads(answer.stdout)["runs"]
    assert len(runs) == 12 and [run["hit_rate"] for run in runs[3:6]] == [1.0, 1.0, 1.0]
    assert all(run["unknown"].startswith("it needs scores within 2") for run in runs[6:])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trace replay --slots -1", "slots"),
        ("trace replay --slots auto", "auto"),
        ("trace replay --budget nan", "--budget"),
        ("trace replay --cold-gbs nan", "--cold-gbs"),
        ("trace replay --copy-gbs -1", "--copy-gbs"),
        ("trace replay --expert-bytes 99999999999999999999", "--expert-bytes"),
        ("trace replay --layer-bytes -1", "--layer-bytes"),
        ("trace replay --admission best", "--admission"),
        ("trace replay --kind verse", "prose, code"),
        ("trace replay nowhere", "nowhere"),
        ("trace replay --check --kind code", "--check"),
        ("trace record --text x --margin nan", "--margin"),
        ("trace record --prompt x --window 9", "--window"),
        ("trace record", "--text or --prompt"),
        ("profile learn --text nowhere", "nowhere"),
        ("profile learn --text x --tokens 0", "--tokens"),
        ("profile learn", "--text"),
        ("profile show nowhere", "nowhere"),
        ("profile show --plot map.jpg", "--plot"),
        ("profile merge one.json", "two profiles"),
    ],
)
def test_bad_input_is_one_sentence(words, named):
    answer = answer_of(*words.split())
    said = str(answer.exception) if answer.exception else answer.output
    assert answer.exit_code != 0 and named in said and "Traceback" not in answer.output

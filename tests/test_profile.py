"""C16: a foreign or broken profile is left out with one warning; saving is whole or not at all."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from helpers import open_engine

from warmset.config import SamplingConfig
from warmset.profile import Identity, Profile, load_profile, save_profile, spread_evenly

IDENTITY = Identity(model="m", num_layers=2, num_experts=16, fingerprint="abc")


@pytest.fixture
def saved(tmp_path):
    counts = np.arange(32, dtype=float).reshape(2, 16)
    path = tmp_path / "profile.json"
    save_profile(Profile(identity=IDENTITY, counts_LE=counts, rows=8.0), path)
    return path


def test_round_trip(saved):
    profile, reason = load_profile(saved, IDENTITY)
    assert profile is not None and reason == ""
    assert profile.hottest(3) == [(1, 15), (1, 14), (1, 13)]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"experts": 15},
        {"fingerprint": "other"},
        {"format": "x"},
        {"version": 99},
        {"counts": [[1.0] * 16]},
        {"counts": [[1.0] * 16, [1.0] * 17]},
        {"counts": [[-1.0] * 16] * 2},
        {"counts": [[float("nan")] * 16] * 2},
        {"counts": [["x"] * 16] * 2},
        {"counts": None},
        {"rows": "many"},
        {"decay": float("inf")},
        {"layers": 2.0},
        {"counts": [[True] * 16] * 2},
        {"counts": [["1"] * 16] * 2},
    ],
)
def test_c16_a_wrong_profile_is_left_out_with_a_reason(saved, change):
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **change}))
    profile, reason = load_profile(saved, IDENTITY)
    assert profile is None and str(saved) in reason


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, b"null", b'{"rows": ' + b"9" * 5000 + b"}"],
)
def test_c16_a_file_that_is_no_profile(saved, content):
    saved.write_bytes(content)
    assert load_profile(saved, IDENTITY)[0] is None


def test_c16_truncated_at_half(saved):
    saved.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])
    assert load_profile(saved, IDENTITY)[0] is None


def test_c16_a_directory_and_a_missing_file(tmp_path):
    assert "directory" in load_profile(tmp_path, IDENTITY)[1]
    assert "does not exist" in load_profile(tmp_path / "none", IDENTITY)[1]


def test_reading_leaves_the_file_alone(saved):
    os.utime(saved, (1, 1))
    load_profile(saved, IDENTITY)
    assert saved.stat().st_mtime == 1


def test_killed_while_saving_leaves_the_old_file(saved, monkeypatch):
    old = saved.read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        save_profile(Profile(identity=IDENTITY, counts_LE=np.ones((2, 16))), saved)
    assert saved.read_bytes() == old
    assert list(saved.parent.iterdir()) == [saved]


def test_an_engine_starts_without_a_foreign_profile_and_says_so_once(checkpoints, saved, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", profile=str(saved))
    assert len(engine.notes) == 1 and "another model" in engine.notes[0]
    assert len(list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=3)))) == 3


def test_without_a_profile_layers_take_turns():
    assert spread_evenly(2, 4, 5) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]

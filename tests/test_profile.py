"""C16: a foreign or broken profile is left out with one warning; saving is whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import open_engine

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError
from warmset.profile import (
    Identity,
    Learner,
    Profile,
    load_profile,
    merge,
    profile_to_extend,
    read_profile,
    save_profile,
    spread_evenly,
)

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
        {"decay": -5},
        {"decay": 7.0},
        {"rows": 1e308},
        {"counts": [[1e308] * 16] * 2},
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


def test_a_learner_counts_own_picks_with_decay_and_leaves_padding_out():
    learner = Learner(IDENTITY, decay=0.5, text="t")
    learner.add(np.array([[[0, 1]], [[2, -1]]]))
    learner.add(np.array([[[1, 3], [1, 16]], [[2, 5], [2, 5]]]))
    found = learner.profile()
    assert found.counts_LE[0, :4].tolist() == [0.25, 2.25, 0, 1] and found.counts_LE[0].sum() == 3.5
    assert found.counts_LE[1, [2, 5]].tolist() == [2.25, 2] and found.rows == 2.25
    goes_on = Learner(IDENTITY, found, decay=1.0)
    goes_on.add(np.array([[[0, 1]], [[2, 3]]]))
    assert goes_on.profile().counts_LE[0, 0] == 1.25 and goes_on.profile().text == "t"


def test_profiles_of_one_model_add_up_and_others_are_refused(tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json", "d.json")]
    other = Identity(model="m", num_layers=2, num_experts=16, fingerprint="xyz")
    for path, identity, count in zip(
        paths, (IDENTITY, IDENTITY, other, IDENTITY), (1.0, 2.0, 3.0, 1e15), strict=True
    ):
        save_profile(
            Profile(identity=identity, counts_LE=np.full((2, 16), count), rows=4 * min(count, 9)), path
        )
    one, two, foreign, huge = map(read_profile, paths)
    added = merge([one, two])
    assert (added.counts_LE == 3.0).all() and added.rows == 12 and added.identity == IDENTITY
    with pytest.raises(WarmsetError, match=r"fingerprint is 'abc' in .*a\.json and 'xyz' in .*c\.json"):
        merge([one, foreign])
    with pytest.raises(WarmsetError, match="at most 1e"):
        merge([one, huge])


def test_learning_goes_on_from_a_profile_and_overwrites_nothing_else(tmp_path, saved):
    assert profile_to_extend(saved, IDENTITY).rows == 8.0
    assert profile_to_extend(tmp_path / "new.json", IDENTITY) is None
    (tmp_path / "letter.txt").write_text("dear reader")
    for path in (tmp_path / "letter.txt", tmp_path / "none" / "p.json", tmp_path):
        with pytest.raises(WarmsetError, match="learn must name"):
            profile_to_extend(path, IDENTITY)


SAVER = """
import sys
from pathlib import Path
import numpy as np
from warmset.profile import Identity, Profile, save_profile

identity = Identity(model="m", num_layers=2, num_experts=16, fingerprint="abc")
print("ready", flush=True)
while True:
    save_profile(Profile(identity=identity, counts_LE=np.full((2, 16), float(sys.argv[2]))), Path(sys.argv[1]))
"""


def test_two_processes_that_save_and_are_killed_leave_a_whole_profile(saved):
    savers = [
        subprocess.Popen([sys.executable, "-c", SAVER, str(saved), count], stdout=subprocess.PIPE)
        for count in ("1", "2")
    ]
    seen = set()
    try:
        for saver in savers:
            assert saver.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while len(seen) < 2 and time.monotonic() < deadline:
            counts_LE = read_profile(saved).counts_LE
            if len(np.unique(counts_LE)) == 1:
                seen.add(counts_LE[0, 0])
    finally:
        for saver in savers:
            saver.kill()
            saver.wait()
            saver.stdout.close()
    assert seen == {1.0, 2.0} and read_profile(saved).counts_LE[0, 0] in seen

"""The file of a trace: numpy alone reads it, it holds what the routers scored, and a damaged one is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PROMPT_IDS
from helpers import open_engine
from safetensors import safe_open
from safetensors.numpy import save_file
from windows import ScriptedDraft, use_draft

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError
from warmset.measure.recording import (
    load_recording,
    of_trace,
    ranked,
    read_texts,
    read_with_drafts,
    recording,
    save_recording,
)
from warmset.measure.trace import record_trace
from warmset.routing import MarginSwap

# What docs/traces.md promises: the format is read with numpy and json, and nothing of Warmset or torch.
READER = """
import json, sys
import numpy as np

KINDS = {"F32": np.float32, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8}


def read(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        body = file.read()
    metadata = header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        data = np.frombuffer(body[slice(*entry["data_offsets"])], KINDS[entry["dtype"]])
        arrays[name] = data.reshape(entry["shape"])
    return arrays, metadata

arrays, metadata = read(sys.argv[1])
ends_NL = np.cumsum(arrays["counts"], dtype=np.int64).reshape(arrays["counts"].shape)
top_k, found = int(metadata["top_k"]), []
for row in np.flatnonzero(arrays["committed"]):
    for layer in range(arrays["counts"].shape[1]):
        begin = ends_NL[row, layer] - arrays["counts"][row, layer]
        found.append(arrays["experts"][begin : begin + top_k].tolist())
assert "torch" not in sys.modules and "safetensors" not in sys.modules and "warmset" not in sys.modules
print(json.dumps({"picks": found, "margin": metadata["margin"], "windows": arrays["window"].tolist()}))
"""


@pytest.fixture(scope="module")
def recorded(checkpoints):
    """An answer in windows of up to 4 rows, and the own picks that the engine's routers made in each."""
    answer = SamplingConfig(max_new_tokens=30)
    script = PROMPT_IDS + list(open_engine(checkpoints["qwen3_moe"], "33%").decode(PROMPT_IDS, answer))
    engine = open_engine(checkpoints["qwen3_moe"], "33%", window=4, draft="lookup", adapt=False)
    use_draft(engine, ScriptedDraft(script, wrong=0.3), 4)
    seen = []
    engine.residency.listeners.append(lambda own_LTK: seen.append(own_LTK.transpose(1, 0, 2).copy()))
    with recording(engine, 0.5) as recorder:
        recorder.kind = "answer"
        list(engine.decode(PROMPT_IDS, answer))
        return recorder.recording(), np.concatenate(seen)


@pytest.fixture
def saved(recorded, tmp_path):
    save_recording(recorded[0], tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_numpy_alone_reads_what_the_routers_picked(recorded, saved):
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", READER, str(saved)], capture_output=True, text=True, check=True
        ).stdout
    )
    expected_NLK = recorded[1]
    assert found["picks"] == expected_NLK.reshape(-1, expected_NLK.shape[-1]).tolist()
    assert found["margin"] == "0.5" and found["windows"] == recorded[0].window_N.tolist()


def test_the_reader_in_the_docs_is_the_one_that_is_tested():
    page = (Path(__file__).parent.parent / "docs" / "traces.md").read_text(encoding="utf-8")
    reader = READER[READER.index("KINDS") : READER.index("arrays, metadata = read")].strip()
    assert reader in page


def test_every_score_within_the_margin_is_there_and_none_beyond_it(recorded, checkpoints):
    """Against a second engine that reads the committed text one row at a time and keeps every score."""
    short = recorded[0]
    engine = open_engine(checkpoints["qwen3_moe"], "66%")
    text = list(engine.decode(PROMPT_IDS, SamplingConfig(max_new_tokens=30)))
    with recording(engine, None) as recorder:
        recorder.kind = "text"
        read_texts(engine, PROMPT_IDS + text[:-1], 1)
        every = recorder.recording()
    assert every.margin is None and (every.count_NL == 16).all()
    kept = np.flatnonzero(short.committed_N)
    assert short.position_N[kept].tolist() == list(range(len(PROMPT_IDS), len(PROMPT_IDS) + len(kept)))
    for row in kept:
        position = int(short.position_N[row])
        for layer in range(2):
            some_E = short.scores_TE(row, row + 1, layer)[0]
            all_E = every.scores_TE(position, position + 1, layer)[0]
            last = np.sort(all_E)[-short.top_k]
            assert np.allclose(some_E[some_E > -np.inf], all_E[some_E > -np.inf], atol=1e-4)
            inside_E, outside_E = all_E >= last - 0.5 + 1e-3, all_E < last - 0.5 - 1e-3
            assert (some_E[inside_E] > -np.inf).all() and (some_E[outside_E] == -np.inf).all()
    assert short.count_NL.min() >= short.top_k and short.count_NL.max() < 16


def test_windows_and_commits_are_marked(recorded):
    short, own_NLK = recorded
    assert (short.own_NLK[short.committed_N.astype(bool)] == own_NLK).all()
    assert any(kept < end - first for first, end, kept in short.windows), "no row was taken back"
    assert all(1 <= kept <= end - first <= 4 for first, end, kept in short.windows)


def test_a_given_text_in_windows_with_drafts_is_that_text_row_by_row(checkpoints):
    """With drafts that are wrong at times: each token once, and the picks of windows of one row."""
    text = PROMPT_IDS * 3
    engine = open_engine(checkpoints["qwen4_exp"], "33%", window=8, draft="lookup", adapt=False)
    found = []
    for decode in (
        lambda: read_with_drafts(engine, text, (1, 2, 4, 8)),
        lambda: read_texts(engine, text, 1),
    ):
        use_draft(engine, ScriptedDraft(text, wrong=0.3), 8)
        with recording(engine, None) as recorder:
            recorder.kind = "text"
            decode()
            found.append(recorder.recording())
    drafted, alone = found
    assert drafted.num_rows > int(drafted.committed_N.sum()) == len(text) == alone.num_rows
    assert {end - first for first, end, _ in drafted.windows} >= {1, 2, 4, 8}
    text_rows = drafted.row_by_row()
    assert len(text_rows.windows) == len(text)
    for name in ("window_N", "committed_N", "position_N", "kind_N", "count_NL", "own_NLK"):
        assert np.array_equal(getattr(text_rows, name), getattr(alone, name)), name
    assert np.allclose(text_rows.score_P, alone.score_P, atol=1e-4)


def test_round_trip_and_nothing_is_left_behind(recorded, saved):
    again = load_recording(saved)
    for name, value in vars(recorded[0]).items():
        if name.startswith("_") or name in ("own_NLK", "windows"):
            continue
        found = getattr(again, name)
        assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value, name
    assert [file.name for file in saved.parent.iterdir()] == ["a.safetensors"]


def test_ties_go_to_the_smaller_expert_and_minus_infinity_is_left_out():
    scores_NLE = np.array([[[1.0, 3.0, 3.0, -np.inf, 2.9, 1.0]]], dtype=np.float32)
    expert_P, score_P, count_NL = ranked(scores_NLE, 2, 0.1)
    assert expert_P.tolist() == [1, 2, 4] and count_NL.tolist() == [[3]]
    assert score_P.tolist() == [3.0, 3.0, np.float32(2.9)]
    assert ranked(scores_NLE, 2, None)[0].tolist() == [1, 2, 4, 0, 5]


def test_an_engine_with_a_policy_is_refused(checkpoints):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", MarginSwap(margin=1.0))
    with pytest.raises(WarmsetError, match="routing off"), recording(engine, 0.5):
        pass
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    with recording(engine, 0.5) as recorder, pytest.raises(WarmsetError, match="no window ran"):
        recorder.recording()


def rewritten(path, change, metadata=()):
    """The file with some arrays and some metadata put in place of its own."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        text = {**file.metadata(), **dict(metadata)}
    save_file({**arrays, **change(arrays)}, path, text)


def last_changed(array, value):
    changed = array.copy()
    changed.reshape(-1)[-1] = value
    return changed


DAMAGES = {
    "other type": lambda a: {"scores": a["scores"].astype(np.float64)},
    "flat counts": lambda a: {"counts": a["counts"].ravel()},
    "marks of fewer rows": lambda a: {"window": a["window"][:-1]},
    "scores that are not counted": lambda a: {"scores": a["scores"][:-1]},
    "fewer than K": lambda a: {"counts": last_changed(a["counts"], 1)},
    "no such expert": lambda a: {"experts": last_changed(a["experts"], 16)},
    "no such kind": lambda a: {"kind": last_changed(a["kind"], 1)},
    "half committed": lambda a: {"committed": last_changed(a["committed"], 2)},
    "a window back in time": lambda a: {"window": last_changed(a["window"], 0)},
    "a window without a committed row": lambda a: {"committed": np.zeros_like(a["committed"])},
    "not a number": lambda a: {"scores": last_changed(a["scores"], np.nan)},
    "an expert twice": lambda a: {"experts": last_changed(a["experts"], a["experts"][-2])},
    "rising scores": lambda a: {"scores": last_changed(a["scores"], 1e9)},
    "no rows": lambda a: {name: array[:0] for name, array in a.items()},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_arrays_that_do_not_belong_together_are_refused_by_name(saved, damage):
    rewritten(saved, damage)
    with pytest.raises(WarmsetError, match=r"a\.safetensors is damaged"):
        load_recording(saved)


@pytest.mark.parametrize(
    "metadata",
    [{"version": "3"}, {"format": "x"}, {"margin": "wide"}, {"kinds": "{"}, {"kinds": "3"}, {"top_k": ""},
     {"experts": "many"}],
    ids=str,
)  # fmt: skip
def test_metadata_that_says_nothing_is_refused_by_name(saved, metadata):
    rewritten(saved, lambda arrays: {}, metadata)
    with pytest.raises(WarmsetError, match=r"a\.safetensors"):
        load_recording(saved)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100]
)
def test_a_broken_file_is_refused_by_name(saved, damage):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(WarmsetError, match=r"a\.safetensors"):
        load_recording(saved)


def test_a_missing_file_a_folder_and_another_file(tmp_path, checkpoints):
    for path in (tmp_path / "none", tmp_path, checkpoints["olmoe"] / "model.safetensors"):
        with pytest.raises(WarmsetError, match=path.name):
            load_recording(path)


def test_killed_while_saving_leaves_the_old_file(recorded, saved, monkeypatch):
    old = saved.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_recording(recorded[0], saved)
    assert saved.read_bytes() == old and list(saved.parent.iterdir()) == [saved]


def test_a_trace_of_full_scores_says_the_same(checkpoints):
    """The older form, which the shipped trace has, against a recording of the same text."""
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    old = of_trace(record_trace(engine, [("prose", PROMPT_IDS), ("code", PROMPT_IDS[::-1])]))
    with recording(engine, None) as recorder:
        for kind, ids in (("prose", PROMPT_IDS), ("code", PROMPT_IDS[::-1])):
            recorder.kind = kind
            read_texts(engine, ids, 1)
        new = recorder.recording()
    assert old.kinds == new.kinds and old.windows == new.windows
    assert np.array_equal(old.position_N, new.position_N) and np.array_equal(old.kind_N, new.kind_N)
    assert np.allclose(old.scores_TE(0, 5, 1), new.scores_TE(0, 5, 1), rtol=1e-3, atol=1e-3)

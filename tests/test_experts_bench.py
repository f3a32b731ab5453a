"""`bench window --part experts`: its input is what it says, and a rehearsal on a CPU writes a whole record."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from warmset.measure.window_input import SHAPES, cold_by_layer, make_window


@pytest.mark.parametrize(("mean", "counts"), [(0.63, {0: 18, 1: 30}), (1.87, {1: 6, 2: 42}), (0.0, {0: 48})])
def test_cold_experts_are_spread_evenly(mean, counts):
    cold_L = cold_by_layer(48, mean)
    assert {count: cold_L.count(count) for count in set(cold_L)} == counts
    halves = sum(cold_L[:24]), sum(cold_L[24:])
    assert abs(halves[0] - halves[1]) <= 1


@pytest.mark.parametrize(("rows", "distinct"), [(1, 10), (4, 30), (8, 50)])
def test_a_window_has_exactly_its_distinct_and_cold_experts(rows, distinct):
    shape = SHAPES["qwen3-next-80b"]
    cold_L = cold_by_layer(shape.layers, 1.87)
    window = make_window(shape, 60, rows, cold_L, torch.device("cpu"))
    for ids_TK, cold in zip(window.ids, cold_L, strict=True):
        assert ids_TK.shape == (rows, 10) and ids_TK.unique().numel() == distinct
        assert int((ids_TK.unique() >= 60).sum()) == cold
        assert all(len(set(row)) == 10 for row in ids_TK.tolist())


@pytest.mark.slow
def test_a_rehearsal(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = "bench window --part experts --shape tiny --device cpu --rows 1,4 --cold-experts 0.63 --json"
    command = [sys.executable, "-m", "warmset", *words.split(), str(tmp_path / "record.json")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    results = record["results"]
    assert set(results) == {"rates", "check", "tiles", "window", "trace", "prompt"}
    assert results["trace"]["host_to_device_copies"] == 0
    assert {"floor_sum_ms", "floor_overlap_ms", "floor_chain_ms"} <= set(results["window"]["t4_cold0_63"])

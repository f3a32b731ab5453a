"""The host arena: each expert once, files front to back, pinned as far as it goes, and memory that comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from conftest import make_config, save_random

from warmset import checkpoint as ckpt
from warmset import store as stores
from warmset.device_experts import open_arena
from warmset.store import ArenaStore, FileStore

CPU = torch.device("cpu")


class Pinner:
    """Allows `limit` bytes and remembers what it was asked."""

    def __init__(self, limit: float) -> None:
        self.left, self.asked, self.held = limit, [], set()

    def pin(self, address: int, num_bytes: int) -> bool:
        self.asked.append((address, num_bytes))
        self.left -= num_bytes
        if self.left >= 0:
            self.held.add(address)
        return self.left >= 0

    def unpin(self, address: int) -> None:
        self.held.remove(address)


@pytest.fixture
def expert_map(checkpoints):
    return ckpt.find_experts(ckpt.open_checkpoint(checkpoints["qwen3_moe"]), "qwen3_moe")[0]


def same_as_files(arena: ArenaStore, expert_map) -> bool:
    files = FileStore(expert_map)
    for layer in range(arena.num_layers):
        for expert in range(arena.num_experts):
            raw_B = stores.aligned_bytes(files.layout.nbytes)
            files.read(layer, expert, raw_B)
            held = arena.layout.views(arena.view(layer, expert))
            for matrix, source in zip(held, files.layout.views(raw_B), strict=True):
                if not torch.equal(matrix, source.to(matrix.dtype)):
                    return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_arena_holds_every_expert_once_in_the_asked_dtype(expert_map, dtype):
    seen = []
    arena = ArenaStore(FileStore(expert_map), dtype=dtype, progress=lambda *step: seen.append(step))
    assert same_as_files(arena, expert_map)
    assert arena.nbytes == arena.num_layers * arena.num_experts * arena.layout.nbytes
    assert arena.arena_NB.data_ptr() % 4096 == 0
    total = arena.num_layers * arena.num_experts * expert_map.layout.payload_bytes
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_files_are_read_front_to_back(tmp_path):
    folder = save_random(tmp_path / "cut", make_config("qwen3_moe"), max_shard_size="100KB")
    expert_map = ckpt.find_experts(ckpt.open_checkpoint(folder), "qwen3_moe")[0]
    order = [segment for _, _, segment in FileStore(expert_map).in_file_order()]
    files = list(dict.fromkeys(segment.file for segment in order))
    assert len(files) > 1
    assert [segment.file for segment in order] == sorted(
        (segment.file for segment in order), key=files.index
    ), "a file is opened twice"
    for file in files:
        offsets = [segment.offset for segment in order if segment.file == file]
        assert offsets == sorted(offsets)
    assert same_as_files(ArenaStore(FileStore(expert_map)), expert_map)


@pytest.mark.parametrize("limit", [0, 60_000, 1e18])
def test_pinning_that_is_refused_leaves_the_rest_pageable(expert_map, monkeypatch, limit):
    """C19, with a pin function of the test's own: on a GPU the same is done with CUDA's."""
    monkeypatch.setattr(stores, "PIN_PART_BYTES", 1)
    pinner = Pinner(limit)
    arena = ArenaStore(FileStore(expert_map), pin=pinner.pin, unpin=pinner.unpin)
    assert same_as_files(arena, expert_map)
    assert arena.pinned_bytes == sum(size for address, size in pinner.asked if address in pinner.held)
    assert arena.pinned == (limit > arena.nbytes)
    assert len(pinner.asked) == len(pinner.held) + (not arena.pinned), "asks again after a refusal"
    assert all(address % 4096 == 0 for address, _ in pinner.asked)
    arena.readable = True
    readable_N = arena.addresses().view(-1) != 0
    assert int(readable_N.sum()) == arena.pinned_bytes // arena.layout.nbytes
    assert all(arena.is_pinned(0, expert) == bool(readable_N[expert]) for expert in range(arena.num_experts))
    runs = list(arena.same_memory(3, 29))
    assert runs[0][0] == 3 and runs[-1][1] == 29
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    arena.close()
    assert not pinner.held and arena.addresses().eq(0).all()


def test_nothing_to_pin_is_no_error():
    class Nothing:
        layout = ckpt.ExpertLayout(hidden=8, width=8, dtype=torch.float32)
        num_layers, num_experts = 0, 4

        def in_file_order(self):
            return iter(())

    pinner = Pinner(1e18)
    arena = ArenaStore(Nothing(), pin=pinner.pin, unpin=pinner.unpin)
    assert (arena.nbytes, arena.pinned, pinner.asked) == (0, False, [])
    assert arena.addresses().shape == (0, 4)
    arena.close()


def test_one_message_with_a_hint(expert_map, monkeypatch):
    monkeypatch.setattr(stores, "PIN_PART_BYTES", 1)
    from warmset.kernels import experts_probe

    monkeypatch.setattr(experts_probe, "can_read", lambda memory_B, device: True)
    arena, notes = open_arena(FileStore(expert_map), CPU, torch.float32, Pinner(60_000))
    assert len(notes) == 1 and "ulimit -l" in notes[0] and ".wslconfig" in notes[0]
    assert arena.readable and 0 < arena.pinned_bytes < arena.nbytes
    arena, notes = open_arena(FileStore(expert_map), CPU, torch.float32, Pinner(1e18))
    assert arena.pinned and notes == []
    monkeypatch.setattr(experts_probe, "can_read", lambda memory_B, device: False)
    arena, notes = open_arena(FileStore(expert_map), CPU, torch.float32, Pinner(1e18))
    assert not arena.readable and arena.addresses().eq(0).all()
    assert len(notes) == 1 and "cannot read pinned" in notes[0]


MEASURE = """
import gc, json, os, sys
import torch
from warmset import checkpoint as ckpt
from warmset.disk import Part, Reader
from warmset.store import ArenaStore

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

class Zeros:
    layout = ckpt.ExpertLayout(hidden=int(sys.argv[1]), width=int(sys.argv[2]), dtype=torch.bfloat16)
    num_layers, num_experts = 1, 40
    def __init__(self, file):
        self.file = file
        self.reader = Reader([file], "released")
    def in_file_order(self):
        for expert in range(self.num_experts):
            for dest, size in ((0, self.layout.gate_up_bytes), (self.layout.down_offset, self.layout.down_bytes)):
                yield 0, expert, ckpt.Segment(file=self.file, offset=0, nbytes=size, dest=dest)
    def begin_segment(self, segment, out_B):
        return self.reader.begin([Part(segment.file, segment.offset, out_B.numpy())])

file = sys.argv[3]
open(file, "wb").truncate(Zeros.layout.gate_up_bytes)
torch.ones(1 << 20).sum()
gc.collect()
before = status("VmRSS")
def touch(address, size):  # as pinning does, every page is there from then on
    import ctypes
    ctypes.memset(address, 1, size)
    return True
arena = ArenaStore(Zeros(file), pin=touch, unpin=lambda address: None)
peak, payload = status("VmHWM") - before, 40 * Zeros.layout.payload_bytes
assert int(arena.arena_NB[7, 0]) == 0
arena.close()
del arena
gc.collect()
print(json.dumps({"peak": peak, "payload": payload, "left": status("VmRSS") - before}))
"""


def grown(hidden: int, width: int, tmp_path) -> dict:
    command = [sys.executable, "-c", MEASURE, str(hidden), str(width), str(tmp_path / "zeros")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("hidden", "width"), [(1024, 1024), pytest.param(4096, 5526, marks=pytest.mark.slow)]
)
def test_memory_grows_by_the_payload_and_comes_back(hidden, width, tmp_path):
    """C18: 40 experts of 6 MiB here, of 129.5 MiB in the slow run."""
    found = grown(hidden, width, tmp_path)
    assert found["payload"] <= found["peak"] * 1.01 and found["peak"] <= 1.05 * found["payload"]
    assert found["left"] <= 0.02 * found["payload"] + (4 << 20)

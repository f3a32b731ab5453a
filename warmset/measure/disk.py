"""`bench machine --part disk`: the disk tier beside a bare O_DIRECT reader, on one file in one run.

A synthetic file of experts is written, checked, and read in turns, its pages dropped before each turn:

    bare     the same runs of bytes in the same order, whole sectors, the same block size and depth, nothing else
    stream   every expert into staging, as slots are filled and prompts are read: the queue is never empty
    layers   eight cold experts at a time, as a decode window reads them: each layer waits for its own

The share of a round is its rate over the bare rate of the same round. Rates are of checkpoint bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from warmset import disk
from warmset.checkpoint import ExpertLayout, ExpertMap, Segment
from warmset.copies import Staging
from warmset.errors import WarmsetError
from warmset.landing import num_stagings
from warmset.measure.record import make_record
from warmset.store import FileStore

EXPERT_MIB = (1, 3, 6)
HIDDEN = 1024
COLD_A_LAYER = 8
HEADER_BYTES = 13_576  # a multiple of 8 and of nothing larger, as safetensors leaves it
CHECKED_EXPERTS = 5


@dataclass(frozen=True, kw_only=True)
class DiskCase:
    """One file: experts of `expert_bytes` bytes, in bfloat16, `num_experts` of them."""

    expert_bytes: int
    num_experts: int

    @property
    def layout(self) -> ExpertLayout:
        width = self.expert_bytes // (3 * HIDDEN * 2)
        return ExpertLayout(hidden=HIDDEN, width=width, dtype=torch.bfloat16)


def run_bench(expert_mib: Sequence[int], total_mib: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure each size of experts on a file of `total_mib` MiB in `folder`; a record as `make_record` takes it."""
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < 2 * total_mib << 20:
        raise WarmsetError(f"{folder} must have {2 * total_mib:,} MiB free for the file that is read.")
    results = {}
    for size in expert_mib:
        case = DiskCase(expert_bytes=size << 20, num_experts=max(COLD_A_LAYER, total_mib // size))
        with tempfile.TemporaryDirectory(dir=folder, prefix="warmset-disk-") as scratch:
            results[f"experts of {size} MiB"] = _measure(case, Path(scratch) / "experts", rounds)
    config = {
        "block_bytes": disk.BLOCK_BYTES,
        "depth": disk.DEPTH,
        "total_mib": total_mib,
        "rounds": rounds,
        "cold_a_layer": COLD_A_LAYER,
        "file_system": _file_system(folder),
    }
    return make_record(name="disk", config=config, results=results, tests="green")


def _measure(case: DiskCase, file: Path, rounds: int) -> dict[str, Any]:
    expert_map = _write(case, file)
    store = FileStore(expert_map, "direct")
    _check(store, expert_map)
    order = np.random.default_rng(1).permutation(case.num_experts).tolist()
    layers = [order[first : first + COLD_A_LAYER] for first in range(0, len(order), COLD_A_LAYER)]
    stagings = [
        Staging(store, store.layout, torch.device("cpu")) for _ in range(num_stagings(store.layout.nbytes))
    ]
    for (
        staging
    ) in stagings:  # its pages are there before the clock starts, as in an engine after a few windows
        staging.load(store, 0, order[0])
    ways: dict[str, Callable[[], None]] = {
        "bare": lambda: _read_bare(file, expert_map, order),
        "stream": lambda: _read_batches(store, stagings, [order]),
        "layers": lambda: _read_batches(store, stagings, layers),
    }
    payload = case.num_experts * case.layout.payload_bytes
    rates: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        turns = list(ways.items())
        for name, work in turns if number % 2 == 0 else reversed(turns):
            _drop_pages(file)
            cpu, start = time.process_time(), time.perf_counter()
            work()
            rates[name].append(payload / (time.perf_counter() - start) / 1e9)
            processor[name].append((time.process_time() - cpu) / (payload / 1e9))
    found: dict[str, Any] = {"mode": store.mode, "file_bytes": file.stat().st_size}
    store.close()
    for name in ways:
        shares = [rate / bare for rate, bare in zip(rates[name], rates["bare"], strict=True)]
        found[name] = {
            "gb_per_sec": median(rates[name]),
            "gb_per_sec_range": [min(rates[name]), max(rates[name])],
            "cpu_sec_per_gb": median(processor[name]),
            "share_of_bare": median(shares),
        }
    return found


def _write(case: DiskCase, file: Path) -> ExpertMap:
    """Random bytes: a disk that compresses or finds equal blocks gains nothing."""
    generator, layout, segments = np.random.default_rng(0), case.layout, []
    with open(file, "wb") as stream:
        stream.write(generator.bytes(HEADER_BYTES))
        for _ in range(case.num_experts):
            base = stream.tell()
            stream.write(generator.bytes(layout.payload_bytes))
            half = layout.gate_up_bytes // 2
            places = ((0, 0, half), (half, half, half), (2 * half, layout.down_offset, layout.down_bytes))
            segments.append(
                tuple(
                    Segment(file=file, offset=base + start, nbytes=nbytes, dest=dest)
                    for start, dest, nbytes in places
                )
            )
        stream.flush()
        os.fsync(stream.fileno())
    return ExpertMap(modules=("experts",), segments=(tuple(segments),), layout=layout)


def _check(store: FileStore, expert_map: ExpertMap) -> None:
    """No speed is measured of a reader that brings other bytes."""
    out_B = torch.zeros(store.layout.nbytes, dtype=torch.uint8)
    for expert in np.linspace(0, store.num_experts - 1, CHECKED_EXPERTS, dtype=int).tolist():
        store.read(0, expert, out_B)
        for segment in expert_map.segments[0][expert]:
            with open(segment.file, "rb") as stream:
                stream.seek(segment.offset)
                expected = stream.read(segment.nbytes)
            got = out_B[segment.dest : segment.dest + segment.nbytes].numpy().tobytes()
            if got != expected:
                raise WarmsetError(
                    f"The disk tier read other bytes of expert {expert}: no speed was measured."
                )


def _read_batches(store: FileStore, stagings: list[Staging], batches: list[list[int]]) -> None:
    count = len(stagings)
    for batch in batches:
        for staging, expert in zip(stagings, batch, strict=False):
            staging.begin(store, 0, expert)
        for number in range(len(batch)):
            staging = stagings[number % count]
            staging.arrive()
            if number + count < len(batch):
                staging.begin(store, 0, batch[number + count])


def _read_bare(file: Path, expert_map: ExpertMap, order: list[int]) -> None:
    blocks = iter(list(_sectors(expert_map, order)))
    lock = threading.Lock()
    descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if disk.takes_direct(file) else 0))

    def work() -> None:
        with mmap.mmap(-1, 2 * disk.BLOCK_BYTES) as pages:
            view = memoryview(pages)
            while True:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    view.release()
                    return
                offset, nbytes = block
                os.preadv(descriptor, [view[:nbytes]], offset)

    threads = [threading.Thread(target=work) for _ in range(disk.DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)


def _sectors(expert_map: ExpertMap, order: list[int]) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of whole sectors that cover the experts, in the blocks that the disk tier makes."""
    nothing_B = np.empty(expert_map.layout.nbytes, dtype=np.uint8)
    for expert in order:
        parts = [
            disk.Part(segment.file, segment.offset, nothing_B[: segment.nbytes])
            for segment in expert_map.segments[0][expert]
        ]
        for block in disk.cut(parts, disk.BLOCK_BYTES):
            first = block[0].offset // disk.SECTOR_BYTES * disk.SECTOR_BYTES
            yield first, -(-(block[-1].end - first) // disk.SECTOR_BYTES) * disk.SECTOR_BYTES


def _drop_pages(file: Path) -> None:
    with open(file, "rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _file_system(folder: Path) -> str | None:
    """The kind of file system `folder` lies on, from the longest mount point above it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(above, key=lambda mount: len(mount[1]))[2] if above else None

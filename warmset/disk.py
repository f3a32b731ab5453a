"""Runs of file bytes into memory: positional reads, several in flight, past the page cache.

    Reader.begin(parts) -> Reading      the parts are cut into blocks, which `depth` threads read
    Reading.wait()                      every byte is there, or the error

Three ways to read a file, the first that the file system allows (measured: the same rate for half the processor):

    direct     O_DIRECT into aligned blocks, the wanted bytes copied out; head and tail of a part come with their
               whole sectors
    released   through the page cache, whose pages are given up after each block
    kept       through the page cache, in the caller's thread: for so few bytes that the pages are no burden

Knows bytes, files and offsets; no experts and no tensors.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import numpy as np

from warmset.errors import CheckpointError

Mode = Literal["direct", "released", "kept"]
BLOCK_BYTES = 512 << 10
DEPTH = 8
SECTOR_BYTES = 4096
"""Offsets, lengths and addresses of direct reads are multiples of it; devices with smaller sectors allow it too."""


@dataclass(frozen=True)
class Part:
    """Bytes of `file` from `offset` on, to be put into `target`, uint8 [nbytes]."""

    file: Path
    offset: int
    target: np.ndarray

    @property
    def end(self) -> int:
        return self.offset + len(self.target)

    def between(self, first: int, end: int) -> Part:
        """What of it lies at the file's bytes first..end-1."""
        start = max(first, self.offset)
        stop = max(start, min(end, self.end))
        return Part(self.file, start, self.target[start - self.offset : stop - self.offset])


Block = list[Part]
"""Parts of one file that are read at once: in ascending order, gaps of less than a sector between them."""


def cut(parts: Iterable[Part], block_bytes: int) -> Iterator[Block]:
    """Blocks of about `block_bytes`: neighbours in a file become one run, and a run is cut evenly at sectors."""
    run: Block = []
    for part in sorted(
        (part for part in parts if len(part.target)), key=lambda part: (part.file, part.offset)
    ):
        if run and (part.file != run[-1].file or not 0 <= part.offset - run[-1].end < SECTOR_BYTES):
            yield from _cut_run(run, block_bytes)
            run = []
        run.append(part)
    if run:
        yield from _cut_run(run, block_bytes)


def _cut_run(run: Block, block_bytes: int) -> Iterator[Block]:
    base, end = run[0].offset - run[0].offset % SECTOR_BYTES, run[-1].end
    count = max(1, round((end - base) / block_bytes))
    step = -(-(end - base) // (count * SECTOR_BYTES)) * SECTOR_BYTES
    for first in range(base, end, step):
        inside = (part.between(first, first + step) for part in run)
        yield [part for part in inside if len(part.target)]


class Reading:
    """Blocks under way that belong together."""

    def __init__(self, num_blocks: int, clock: BusyClock) -> None:
        self._left = num_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._all_here = threading.Event()
        self._error: BaseException | None = None
        if num_blocks == 0:
            self._all_here.set()
        else:
            clock.enter()

    def block_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._clock.leave()
            self._all_here.set()

    def wait(self) -> None:
        """Return when every byte is there; raises what a block raised, after the others have come to rest."""
        self._all_here.wait()
        if self._error is not None:
            raise self._error


class BusyClock:
    """Seconds in which at least one reading was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._sum_sec = 0.0

    def enter(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1

    def leave(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._sum_sec += time.perf_counter() - self._since

    @property
    def sec(self) -> float:
        with self._lock:
            running = time.perf_counter() - self._since if self._under_way else 0.0
            return self._sum_sec + running


NOTHING_TO_READ = Reading(0, BusyClock())


class Reader:
    """Open files and the threads that read them. `mode` is the way that was asked for, or where a file system
    refuses O_DIRECT `released`."""

    def __init__(
        self,
        files: Iterable[Path],
        mode: Mode = "direct",
        *,
        depth: int = DEPTH,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.block_bytes = block_bytes
        self.depth = depth
        self.clock = BusyClock()
        files = list(files)
        self.mode: Mode = mode if mode != "direct" or all(map(takes_direct, files)) else "released"
        self._descriptors: dict[Path, int] = {}
        self._blocks: SimpleQueue[tuple[Reading, Block] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._close = weakref.finalize(self, _close, self._descriptors, self._blocks, self._threads)
        flags = os.O_RDONLY | (os.O_DIRECT if self.mode == "direct" else 0)
        for file in files:
            self._descriptors[file] = os.open(file, flags)
            if self.mode == "released":  # reading ahead would bring in neighbours that nobody gives up
                os.posix_fadvise(self._descriptors[file], 0, 0, os.POSIX_FADV_RANDOM)

    def begin(self, parts: Iterable[Part]) -> Reading:
        """Start to read the parts, whose targets may not be looked at before `Reading.wait`."""
        if self.mode == "kept":
            return self._read_here(list(parts))
        blocks = list(cut(parts, self.block_bytes))
        reading = Reading(len(blocks), self.clock)
        self._have_threads()
        for block in blocks:
            self._blocks.put((reading, block))
        return reading

    def _read_here(self, parts: list[Part]) -> Reading:
        reading = Reading(len(parts), self.clock)
        for part in parts:
            try:
                _read_cached(self._descriptors[part.file], part, release=False)
                reading.block_done()
            except Exception as error:
                reading.block_done(error)
        return reading

    def _have_threads(self) -> None:
        if not self._close.alive:
            raise CheckpointError("The checkpoint's files are closed.")
        while len(self._threads) < self.depth:
            bounce_B = np.frombuffer(_pages(2 * self.block_bytes + SECTOR_BYTES), dtype=np.uint8)
            thread = threading.Thread(
                target=_work,
                args=(self._blocks, self._descriptors, self.mode, bounce_B),
                name=f"warmset-read-{len(self._threads)}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Let what is under way come to an end, then end the threads and close the files."""
        self._close()


def _close(descriptors: dict[Path, int], blocks: SimpleQueue, threads: list[threading.Thread]) -> None:
    for _ in threads:
        blocks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    while descriptors:
        os.close(descriptors.popitem()[1])


def takes_direct(file: Path) -> bool:
    """Whether the file system reads this file past the page cache; some take the flag and refuse the read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        raise
    with suppress(OSError), mmap.mmap(-1, SECTOR_BYTES) as sector:
        try:
            os.preadv(descriptor, [sector], 0)
            return True
        finally:
            os.close(descriptor)
    return False


def _pages(num_bytes: int) -> mmap.mmap:
    """Memory that begins with a page. Taken where a refusal is an error of the caller, not of a silent thread."""
    try:
        return mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise MemoryError(f"no memory for reading files: {error}") from None


def _work(blocks: SimpleQueue, descriptors: dict[Path, int], mode: Mode, bounce_B: np.ndarray) -> None:
    """A thread's life: read blocks until None comes. `bounce_B` begins with a page and holds a block."""
    while (job := blocks.get()) is not None:
        reading, block = job
        try:
            descriptor = descriptors[block[0].file]
            if mode == "direct":
                _read_direct(descriptor, block, bounce_B)
            else:
                for part in block:
                    _read_cached(descriptor, part, release=True)
        except Exception as error:
            reading.block_done(error)
        else:
            reading.block_done()
        del job, reading, block  # a waiting thread keeps nobody's memory


def _read_direct(descriptor: int, block: Block, bounce_B: np.ndarray) -> None:
    first, end = block[0].offset - block[0].offset % SECTOR_BYTES, block[-1].end
    wanted = -(-(end - first) // SECTOR_BYTES) * SECTOR_BYTES
    done = 0
    while first + done < end:
        count = os.preadv(descriptor, [bounce_B[done:wanted].data], first + done)
        if count <= 0 or (first + done + count < end and count % SECTOR_BYTES):
            raise _ended_early(block[0].file)
        done += count
    for part in block:
        skip = part.offset - first
        np.copyto(part.target, bounce_B[skip : skip + len(part.target)])


def _read_cached(descriptor: int, part: Part, *, release: bool) -> None:
    view, done = part.target.data, 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], part.offset + done)
        if count <= 0:
            raise _ended_early(part.file)
        done += count
    if release:
        first = part.offset - part.offset % SECTOR_BYTES
        end = -(-(part.offset + done) // SECTOR_BYTES) * SECTOR_BYTES
        os.posix_fadvise(descriptor, first, end - first, os.POSIX_FADV_DONTNEED)


def _ended_early(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} ended early: it was changed while Warmset used it.")

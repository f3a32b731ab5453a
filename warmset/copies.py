"""Copies of experts from the slow tier into slots, which run while windows decode.

    pinned arena -> GPU        on a stream of their own, straight from host memory
    files -> CPU, same dtype   by the store's threads, straight into the slot
    anything else              in threads of their own, through staging

`Copies.begin` starts one copy and returns a `Copy`; `Copy.wait` returns when the bytes are there for whatever the
current stream runs next, and raises what went wrong. Knows no tables and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import torch

from warmset.checkpoint import ExpertLayout
from warmset.disk import NOTHING_TO_READ, Reading
from warmset.store import ArenaStore, FileStore, Store, aligned_bytes

COPY_THREADS = 2
"""Experts that are brought in at once; the store reads the parts of each in parallel too."""


class Staging:
    """One aligned place a cold expert is read into: checkpoint bytes in, compute-dtype matrices out.

    `views` are gate_up [2I, H] and down [H, I] on `device`, in the slots' dtype and alignment, so that a cold expert
    runs the same arithmetic as a resident one. Bytes that are to be converted, or come from a file, go through host
    memory, `pinned` if so asked.
    """

    def __init__(
        self, store: Store, compute: ExpertLayout, device: torch.device, *, pinned: bool = False
    ) -> None:
        raw = store.layout
        on_device = raw.dtype == compute.dtype and (device.type == "cpu" or isinstance(store, ArenaStore))
        self._raw_B = aligned_bytes(raw.nbytes, device if on_device else "cpu", pinned=pinned)
        self._raw_views = raw.views(self._raw_B)
        self.views = self._raw_views
        if not on_device:
            self.views = compute.views(aligned_bytes(compute.nbytes, device, pinned=pinned))
        self._reading: Reading = NOTHING_TO_READ

    def begin(self, store: Store, layer: int, expert: int) -> None:
        """Start to read an expert; what was read before is lost. Counted by whoever waits."""
        self.settle()
        self._reading = store.begin(layer, expert, self._raw_B)

    def arrive(self) -> None:
        """Wait for the expert, whose matrices `views` are from then on."""
        reading, self._reading = self._reading, NOTHING_TO_READ
        reading.wait()
        if self.views is not self._raw_views:
            for target, source in zip(self.views, self._raw_views, strict=True):
                target.copy_(source)

    def settle(self) -> None:
        """Wait until nothing writes here any more, whatever became of it."""
        reading, self._reading = self._reading, NOTHING_TO_READ
        with suppress(Exception):
            reading.wait()

    def load(self, store: Store, layer: int, expert: int) -> None:
        """`begin` and `arrive` in one."""
        self.begin(store, layer, expert)
        self.arrive()


class Copy:
    """A copy under way."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Return when the bytes are there for the current stream; raises what the copy raised."""
        self._wait()


class Copies:
    """Brings experts in the slots' `layout` to `device`. Memory of staging is taken with the first copy."""

    def __init__(self, layout: ExpertLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads: ThreadPoolExecutor | None = None
        self._stagings: SimpleQueue[Staging] = SimpleQueue()
        self._staged_for: Store | None = None

    def begin(self, store: Store, layer: int, expert: int, target_B: torch.Tensor) -> Copy:
        """Start to copy an expert into `target_B`, uint8 [layout.nbytes] on the device.

        Nothing may read the target until `wait`; what the current stream was given before may still do so.
        """
        if self._stream is not None:  # what was launched may still read the slot's former expert
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            if isinstance(store, ArenaStore) and store.is_pinned(layer, expert):
                with torch.cuda.stream(self._stream):
                    target_B.copy_(store.view(layer, expert), non_blocking=True)
                    arrived = self._stream.record_event()
                return Copy(lambda: torch.cuda.current_stream(self._device).wait_event(arrived))
        if self._stream is None and isinstance(store, FileStore) and store.layout == self._layout:
            return Copy(store.begin(layer, expert, target_B).wait)
        self._prepare(store)
        assert self._threads is not None
        work = self._threads.submit(self._through_staging, store, layer, expert, target_B)
        return Copy(lambda: _result(work))

    def _prepare(self, store: Store) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="warmset-copy")
        if self._staged_for is not store:
            self._stagings = SimpleQueue()
            for _ in range(COPY_THREADS):
                pinned = self._stream is not None
                self._stagings.put(Staging(store, self._layout, torch.device("cpu"), pinned=pinned))
            self._staged_for = store

    def _through_staging(self, store: Store, layer: int, expert: int, target_B: torch.Tensor) -> None:
        stagings = self._stagings
        staging = stagings.get()
        try:
            staging.load(store, layer, expert)
            targets = self._layout.views(target_B)
            if self._stream is None:
                for target, source in zip(targets, staging.views, strict=True):
                    target.copy_(source)
                return
            with torch.cuda.stream(self._stream):
                for target, source in zip(targets, staging.views, strict=True):
                    target.copy_(source)
                self._stream.record_event().synchronize()
        finally:
            stagings.put(staging)


def _result(work: Future[None]) -> None:
    work.result()

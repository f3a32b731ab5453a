"""Where a window's time goes.

A stack of stages: the time between two changes belongs to the stage on top, so the stages of a window add up
to the window by construction, and a module that calls another keeps only its own time. On the CPU the clock is
`perf_counter`; on a GPU each change records an event on the stream, and the events are read once the window
is over.

    hc-read+router   norms, hyper-connection reads, residual adds, router and policy
    token mixer      attention or gated delta net
    shared expert    the expert every row takes
    resident experts picked experts that lie in slots
    cold wait        reading cold experts from the slow tier, and running them
    combine          weighted sum over the picks
    draft            drafts for the rows after the first
    embed, head, sample, commit, gap
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean

import torch

STAGES = (
    "embed",
    "hc-read+router",
    "token mixer",
    "shared expert",
    "resident experts",
    "cold wait",
    "combine",
    "draft",
    "head",
    "sample",
    "commit",
    "gap",
)


class StageClock:
    """Times the stages of each window; does nothing between windows, and nothing at all when not enabled."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._gpu = device.type == "cuda"
        self._device = device
        self._stack: list[str] = []
        self._marks: list[tuple[str, object]] = []
        self.windows_ms: list[dict[str, float]] = []

    def _now(self) -> object:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def window(self) -> Iterator[None]:
        """One window: everything inside is timed, and what no stage claims is `gap`."""
        if not self.enabled:
            yield
            return
        self._stack = ["gap"]
        self._marks = [("gap", self._now())]
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`, less what inner stages claim."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        if self._stack:
            self._stack.append(name)
            self._marks.append((name, self._now()))

    def leave(self) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
            self._marks.append((self._stack[-1], self._now()))

    def _close(self) -> None:
        marks, self._marks, self._stack = [*self._marks, ("", self._now())], [], []
        if self._gpu:
            torch.cuda.synchronize(self._device)  # host sync: events are read after the window, once
        totals = dict.fromkeys(STAGES, 0.0)
        for (name, start), (_, end) in pairwise(marks):
            totals[name] += _elapsed_ms(start, end)
        self.windows_ms.append(totals)

    def reset(self) -> None:
        self.windows_ms = []

    def typical_ms(self) -> dict[str, float]:
        """A typical window: each stage's mean over the middle half of the windows by length, and their `total`.

        As robust against outliers as a median, and the stages add up. Empty without windows.
        """
        if not self.windows_ms:
            return {}
        by_length = sorted(self.windows_ms, key=lambda window: sum(window.values()))
        cut = len(by_length) // 4
        middle = by_length[cut : len(by_length) - cut]
        table = {name: fmean(window[name] for window in middle) for name in STAGES}
        table["total"] = sum(table.values())
        return table


def _elapsed_ms(start: object, end: object) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return 1e3 * (end - start)
    return start.elapsed_time(end)  # type: ignore[attr-defined]

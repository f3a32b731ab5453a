"""The stage clock of a captured window: the device writes its own clock between the stages.

`StampClock` is a `StageClock` that also times windows inside `captured()`: there its marks are launches of a tiny
kernel (`kernels.stamp`), so they are captured with the window and run with every replay. Each window first files away
the stamps of the one before, so that a run of windows is read at its end and nothing waits for the host. Marks carry
the kind of layer that they lie in. On a CPU the marks are the host's clock, taken as the same code runs.

    stamp_N   [N]     int64 ns   of the window that runs
    log_WN    [W, N]  int64 ns   of earlier windows; row w holds window w - 1
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from warmset.stages import STAGES, StageClock

MAX_STAMPS = 4096
LOGGED_WINDOWS = 512
ANY_LAYER = "-"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """From this stamp on, time belongs to `stage`, in a layer of `kind` (ANY_LAYER outside of layers)."""

    stage: str
    kind: str


class StampClock(StageClock):
    """Marks inside windows; `marks` is what the last captured window that ran as Python consists of."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        super().__init__(device, enabled=enabled)
        self.kind = ANY_LAYER
        self.marks: tuple[Mark, ...] = ()
        self._combining = False
        self._stamping = False
        self._last_end: int | None = None
        if not enabled:
            return
        self._stamp_N = torch.zeros(MAX_STAMPS, dtype=torch.int64, device=device)
        self._log_WN = torch.zeros(LOGGED_WINDOWS, MAX_STAMPS, dtype=torch.int64, device=device)
        self._windows = torch.zeros(1, dtype=torch.int64, device=device)
        self._kinds: list[str] = []

    def _now(self) -> object:
        if not self._stamping:
            return super()._now()
        place = len(self._marks)
        assert place < MAX_STAMPS, "too many stages in a window"
        self._kinds.append(self.kind)
        if self._gpu:
            from warmset.kernels.stamp import stamp

            stamp(self._stamp_N, place)
        else:
            self._stamp_N[place] = time.perf_counter_ns()
        return place

    @contextmanager
    def captured(self) -> Iterator[None]:
        """One window whose marks are stamps; as `window` is for windows that the host leads."""
        if not self.enabled:
            yield
            return
        self._log_WN.index_copy_(0, self._windows % LOGGED_WINDOWS, self._stamp_N[None])
        self._windows += 1
        self._kinds, self._stamping = [], True
        self._stack, self._marks = ["gap"], []
        self._marks = [("gap", self._now())]
        try:
            yield
        finally:
            self._marks.append(("", self._now()))
            self.marks = tuple(
                Mark(stage=name, kind=kind) for (name, _), kind in zip(self._marks, self._kinds, strict=True)
            )
            self._marks, self._stack, self._stamping = [], [], False

    def begin_combine(self) -> None:
        """The experts of a layer have run: what is left of the layer puts their sum into the stream."""
        self.enter("combine")
        self._combining = True

    def end_combine(self) -> None:
        if self._combining:
            self.leave()
        self._combining = False

    def reset(self) -> None:
        super().reset()
        self._last_end = None
        self.drop()

    def drop(self) -> None:
        """Forget the stamps of captured windows that were not collected."""
        if self.enabled:
            self._windows.zero_()

    def collect(self, marks: tuple[Mark, ...]) -> None:
        """Put the captured windows since the last call, which all had these marks, beside those of the host."""
        begin, end = self._bounds(marks)
        windows = self.read(marks)
        if self._last_end is not None:
            windows[0][("gap", ANY_LAYER)] += (begin - self._last_end) / 1e6
        self._last_end = end
        self.drop()
        for window in windows:
            totals = dict.fromkeys(STAGES, 0.0)
            for (stage, _), ms in window.items():
                totals[stage] += ms
            self.windows_ms.append(totals)

    def _bounds(self, marks: tuple[Mark, ...]) -> tuple[int, int]:
        """ns at which the first captured window since the last `collect` began, and the last one ended."""
        first = self._log_WN[1] if int(self._windows) > 1 else self._stamp_N
        return int(first[0]), int(self._stamp_N[len(marks) - 1])

    def read(self, marks: tuple[Mark, ...]) -> list[dict[tuple[str, str], float]]:
        """ms by (stage, kind) of every window since the last reset, which all had these marks; `gap` is the time
        from a window's end to the next one's begin, 0 for the last."""
        count = min(int(self._windows), LOGGED_WINDOWS - 1)
        rows_WN = torch.cat([self._log_WN[1:count], self._stamp_N[None]])[:, : len(marks)].cpu().tolist()
        found = []
        for number, stamps in enumerate(rows_WN):
            window: dict[tuple[str, str], float] = {}
            for mark, start, end in zip(marks, stamps, stamps[1:], strict=False):
                key = (mark.stage, mark.kind)
                window[key] = window.get(key, 0.0) + (end - start) / 1e6
            following = rows_WN[number + 1][0] if number + 1 < len(rows_WN) else stamps[-1]
            window[("gap", ANY_LAYER)] = window.get(("gap", ANY_LAYER), 0.0) + (following - stamps[-1]) / 1e6
            found.append(window)
        return found


def follow_kinds(trunk: Any, clock: StampClock) -> None:
    """Let the clock know in which kind of layer a mark lies, by the configuration's own word for it."""
    if not clock.enabled:
        return
    kinds = getattr(trunk.config, "layer_types", None)
    for number, layer in enumerate(trunk.get_decoder().layers):
        kind = kinds[number] if kinds else "attention"

        def enter(*_: Any, kind: str = kind) -> None:
            clock.kind = kind

        def leave(*_: Any) -> None:
            clock.end_combine()
            clock.kind = ANY_LAYER

        def combine(*_: Any) -> None:
            clock.begin_combine()

        layer.register_forward_pre_hook(enter, prepend=True)
        layer.register_forward_hook(leave, always_call=True, prepend=True)
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                module.register_forward_hook(combine)


def stage_table(windows: list[dict[tuple[str, str], float]]) -> dict[str, Any]:
    """Medians over windows: `stages` {stage: ms}, `kinds` {kind: {stage: ms}}, `total_ms` and their `sum_ms`."""
    if not windows:
        return {"stages": {}, "kinds": {}, "total_ms": None, "sum_ms": None, "windows": 0}
    keys = {key for window in windows for key in window}
    stages = {
        stage: median(sum(ms for (name, _), ms in window.items() if name == stage) for window in windows)
        for stage in STAGES
        if any(name == stage for name, _ in keys)
    }
    kinds: dict[str, dict[str, float]] = {}
    for stage, kind in sorted(keys):
        if kind != ANY_LAYER:
            kinds.setdefault(kind, {})[stage] = median(window.get((stage, kind), 0.0) for window in windows)
    return {
        "stages": stages,
        "kinds": kinds,
        "total_ms": median(sum(window.values()) for window in windows),
        "sum_ms": sum(stages.values()),
        "windows": len(windows),
    }

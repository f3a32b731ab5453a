"""Inside a leg's process whose samples are windows of a routing trace: set up once, time one stretch after the other.

The windows are those of `bench window --trace` (`LegBench`), with one policy and one kind of route kernels, over all
windows that the trace has of so many rows. A stretch is a sequence of its own with the same states; how long its
windows took is one time from the first launch to the last result, so that a stage clock costs nothing. Nothing is drawn
that means anything: tokens a second are those that the windows of the trace itself kept, where it has marks of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from warmset.measure.ab.state import about_process, machine_state
from warmset.measure.whole_legs import LegBench
from warmset.measure.whole_request import Request
from warmset.routing import COUNTER_NAMES

ALL_WINDOWS = 10**9
"""As `Request.trace_windows`: every window of a trace."""
WARM_UP = 20
"""Windows that are not counted before the first sample, or as many as a sample has."""

Emit = Callable[[dict[str, Any]], None]


def replay_windows(
    request: Request, device: torch.device, emit: Emit, *, first_window: int, samples: int, windows: int
) -> None:
    """Run one leg: samples of `windows` windows each, one after the other from `first_window`, round the trace.

    request: one number of rows, one leg. emit: gets {"event": "start" | "sample" | "end", ...} in that order.
    """
    before, started = machine_state(), time.perf_counter()
    with torch.inference_mode():
        stretches = StretchBench(request, device)
        stretches.set_up()
        emit(
            {
                "event": "start",
                **about_process(on_gpu=device.type == "cuda"),
                "load_sec": time.perf_counter() - started,
                **stretches.about(),
                "machine": before,
            }
        )
        stretches.sample(first_window, min(WARM_UP, windows))
        for number in range(samples):
            emit({"event": "sample", **stretches.sample(first_window + number * windows, windows)})
        emit({"event": "end", "machine": machine_state()})


class StretchBench(LegBench):
    """One leg of the window bench, whose windows are timed stretch by stretch."""

    def set_up(self) -> None:
        """Trunk, slots, arena and the leg; what goes wrong is raised."""
        self._rows = self.request.rows[0]
        setup = self._setup()
        self._notes = [f"Residents are from {setup['resident_from']}."]
        (form,) = self.request.legs().values()
        self._timed = self._leg(*form)
        self.script.use_routing(self._timed.routing)
        self.script.on = True
        tiled = self.tiled[self._rows]
        self._num_windows = len(tiled.logits_WLTE)
        shown = tiled.logits_WLTE.cpu().contiguous().view(torch.uint8).numpy()
        self._trace_sha256 = hashlib.sha256(shown.tobytes()).hexdigest()
        self._committed = tiled.committed

    def about(self) -> dict[str, Any]:
        return {
            "slots": len(self.resident),
            "profile_sha256": None,
            "trace_windows": self._num_windows,
            "notes": self._notes,
        }

    def sample(self, first: int, windows: int) -> dict[str, Any]:
        """Figures of windows `first` to `first + windows` of the trace, which begins again at its end."""
        runs, layers = self._timed.runs, self.shape.layers
        self._begin(runs)
        self._window(first)  # of the new sequence, not counted
        self._sync()
        self._take_counts()
        swaps = self._swaps()
        start = time.perf_counter()
        for window in range(first, first + windows):
            self._window(window)
        self._sync()
        ms = 1e3 * (time.perf_counter() - start) / windows
        distinct, cold = self._take_counts()
        return {
            "windows": windows,
            "ms_per_window": ms,
            "tokens_per_sec": None if self._committed is None else 1e3 * self._committed / ms,
            "accepted_per_window": self._committed,
            "cold_experts_per_layer_window": cold / (layers * windows),
            "hit_rate": 1 - cold / distinct,
            "distinct_experts": distinct,
            "bytes_slow": cold * self.shape.layout.payload_bytes,
            "swaps": self._swaps() - swaps,
            "work_sha256": self._work(first % self._num_windows, windows),
        }

    def _window(self, number: int) -> None:
        self._show(self._rows, number % self._num_windows)
        self._timed.runs.run(1, self._rows)

    def _swaps(self) -> int:
        return int(self._timed.runs.counts().verified_routing_5[COUNTER_NAMES.index("swaps")])

    def _work(self, first: int, windows: int) -> str:
        """What the windows were, whoever had slots: shape, context, the scores of all rows, which of them."""
        work = [self.request.shape, self.whole.past_tokens, self._rows, self._trace_sha256, first, windows]
        return hashlib.sha256(json.dumps(work).encode()).hexdigest()

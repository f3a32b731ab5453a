"""Times a piece of device work: as replays of a captured graph on a GPU, by the wall clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

WARMUP = 3


class Replay:
    """`work` captured once (its graph in `graph`, None on a CPU); `ms()` is the median of several replays."""

    def __init__(self, work: Callable[[], object], device: torch.device) -> None:
        self._work = work
        self._device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work()  # compiles, and makes the buffers that the graph will hold
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = work()

    def run(self) -> None:
        if self.graph is None:
            self._work()
        else:
            self.graph.replay()

    def ms(self, repeats: int = 15) -> float:
        if self.graph is None:
            repeats = 1
        return time_ms(self.run, self._device, repeats)


def time_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median ms of `repeats` runs after a warm-up, each between two events (wall clock on a CPU)."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1e3 * (time.perf_counter() - start) / repeats
    for _ in range(WARMUP):
        work()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize(device)
        times.append(first.elapsed_time(last))
    return median(times)

"""`bench window --trace`: the windows of a routing trace, by policies and route kernels that take turns.

    off, MarginSwap by `swap_serial`, MarginSwap by `route_fused`; or one leg alone, by a route kernel and a margin
    (none: off)

All legs run over one trunk, the same slots and the same states; a leg has captured windows of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from warmset.graph.runs import WindowRuns
from warmset.graph.stamps import stage_table
from warmset.measure.whole_request import LEGS, Request
from warmset.measure.whole_window import Staged, WholeBench
from warmset.router import Routing
from warmset.routing import Policy

ROUNDS = 3
STAGED_ROUNDS = 5


def run_whole(request: Request, device: torch.device) -> dict[str, Any]:
    """Measure; returns config, results, and `failed`, the names of the parts that did not finish."""
    with torch.inference_mode():
        bench = (WholeBench if request.trace is None else LegBench)(request, device)
        bench.run()
    shape = bench.shape
    config = {
        "shape": request.shape,
        "rows": request.rows,
        "cold_experts": request.colds if request.trace is None else None,
        "trace": None if request.trace is None else request.trace.name,
        "slots": len(bench.resident),
        "margin": request.margin if request.trace is not None else None,
        "route_kernel": request.route_kernel,
        "layers": shape.layers,
        "past_tokens": bench.whole.past_tokens,
        "expert_bytes": shape.layout.nbytes,
        "distinct": {str(key): value for key, value in shape.distinct.items()},
    }
    return {"config": config, "results": bench.results, "failed": bench.failed}


@dataclass(kw_only=True)
class Leg:
    """A policy that takes turns with others: its own captured windows over the bench's one cache, and its totals."""

    routing: Routing
    runs: WindowRuns
    window_ms: list[float] = field(default_factory=list)
    distinct: int = 0
    cold: int = 0
    layer_windows: int = 0
    swaps: int = 0


class LegBench(WholeBench):
    """Windows of a trace in the place of windows with picks made up."""

    def _measure(self) -> None:
        for rows in self.request.rows:
            self._part(f"trace_t{rows}", partial(self._legs, rows))

    def _legs(self, rows: int) -> dict[str, Any]:
        legs = {name: self._leg(*form) for name, form in self.request.legs().items()}
        order = list(legs)
        self.script.on = True
        try:
            for number in range(ROUNDS if self.device.type == "cuda" else 1):
                for name in order if number % 2 == 0 else reversed(order):
                    self._run_leg(legs[name], rows)
            staged = self._staged_rounds(legs, rows)
            found = {name: self._leg_figures(leg, staged[name]) for name, leg in legs.items()}
        finally:
            self.script.on = False
        if self.request.route_kernel is not None:
            return found
        off, fused = found["off"], found["route_fused"]
        router_R = {
            name: [stage_table(one.windows)["stages"]["hc-read+router"] for one in staged[name]]
            for name in LEGS
        }
        fused_R, serial_R = (
            [on - without for on, without in zip(router_R[name], router_R["off"], strict=True)]
            for name in ("route_fused", "swap_serial")
        )
        found["compared"] = {
            "cold_down": 1 - fused["cold_experts"] / off["cold_experts"] if off["cold_experts"] else None,
            "window_down": 1 - fused["ms"] / off["ms"],
            "router_longer_ms": median(fused_R),
            "router_longer_rounds_ms": fused_R,
            "serial_router_longer_ms": median(serial_R),
        }
        return found

    def _staged_rounds(self, legs: dict[str, Leg], rows: int) -> dict[str, list[Staged]]:
        """The stages of each leg, some rounds of it in turns, each with a capture of its own.

        With one capture each, two runs gave -0.04 and +0.22 ms for what the swap adds to the router stage.
        """
        rounds: dict[str, list[Staged]] = {name: [] for name in legs}
        for number in range(STAGED_ROUNDS if self.device.type == "cuda" else 1):
            for name in list(legs) if number % 2 == 0 else list(reversed(legs)):
                legs[name].runs.forget()
                rounds[name].append(self._leg_staged(legs[name], rows))
        return rounds

    def _leg(self, policy: Policy | None, form: Any = "fused") -> Leg:
        routing = self._routing(policy, form)
        runs = WindowRuns(self.trunk, self.runner, routing, self.clock, source="fixed")
        runs.cache = self.runs.cache
        return Leg(routing=routing, runs=runs)

    def _run_leg(self, leg: Leg, rows: int) -> None:
        self.script.use_routing(leg.routing)
        self._begin(leg.runs)
        self._show(rows, 0)
        leg.runs.run(1, rows)
        self._sync()
        self._take_counts()
        windows = iter(range(10**9))
        count = len(self.tiled[rows].logits_WLTE)

        def work() -> None:
            self._show(rows, next(windows) % count)
            leg.runs.run(1, rows)

        times = self._times(work, count)
        leg.window_ms.append(sum(times) / len(times))
        distinct, cold = self._take_counts()
        leg.distinct += distinct
        leg.cold += cold
        leg.layer_windows += self.shape.layers * (len(times) + self.extra_runs)
        counts = leg.runs.counts()
        leg.swaps += int(counts.verified_routing_5[1])

    def _leg_staged(self, leg: Leg, rows: int, most: int | None = None) -> Staged:
        """The stages of the windows of the trace, or the first `most` of them."""
        self.script.use_routing(leg.routing)
        self._begin(leg.runs)
        windows = range(len(self.tiled[rows].logits_WLTE))[:most]
        shows: list[Callable[[], None]] = [partial(self._show, rows, window) for window in windows]
        return self._staged(leg.runs, shows, rows)

    def _leg_figures(self, leg: Leg, staged: list[Staged]) -> dict[str, Any]:
        cold = leg.cold / leg.layer_windows
        distinct = leg.distinct / leg.layer_windows
        return {
            "ms": median(leg.window_ms),
            "least_ms": min(leg.window_ms),
            "most_ms": max(leg.window_ms),
            **self.floors.of(distinct, [cold] * self.shape.layers),
            "distinct_experts": distinct,
            "cold_experts": cold,
            "swaps": leg.swaps,
            "stages": self._stage_figures(staged, median(leg.window_ms)),
        }

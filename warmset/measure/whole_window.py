"""`bench window`: whole decode windows at the shape of a large model, each one launch of a captured graph.

The windows are those of the engine (`graph.runs`): transformers' trunk with the static forms, our router kernels and
experts, draws, judgement and commit on the device. Only what rows pick is scripted (`whole_input`). Rates are measured
first, in the same run; parts are independent, and one that fails is printed and makes the record red.

    rates     a kernel that only reads; pinned copies of one expert
    check     static forms against transformers' own forward, same picks
    windows   by rows and cold experts a layer: ms a window, three floors, stages
    trace     off, MarginSwap by `swap_serial`, MarginSwap by `route_fused`, over a routing trace; legs take turns;
              or one leg alone, by a route kernel and a margin (none: off)
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from warmset import model
from warmset.config import MAX_WINDOW_ROWS, ROUTE_KERNELS, SamplingConfig, require
from warmset.device_experts import DeviceExperts
from warmset.experts import ExpertRunner, ReadCounts
from warmset.graph.cache import StaticCache, pages_for
from warmset.graph.forms import kernels_run
from warmset.graph.runs import WindowRuns
from warmset.graph.stamps import StampClock, follow_kinds, stage_table
from warmset.measure.rates import hbm_read_gbs, pcie_copy_gbs
from warmset.measure.whole_input import (
    WHOLE_SHAPES,
    Script,
    TiledTrace,
    find_layers,
    make_trunk,
    read_trace,
    tile_trace,
)
from warmset.measure.window import REHEARSAL_PROGRAMS
from warmset.measure.window_input import SharedArena, cold_by_layer, make_tables, make_window
from warmset.router import Routing
from warmset.routing import MarginSwap, Policy
from warmset.window import WindowRunner

POOL = 60
"""Resident experts of each layer where picks are fixed: more than 4 x L2 over all layers."""
REPEATS = 15
STAGED_WINDOWS = 12
MAX_MS = 400.0
BUDGET_SEC = 230.0
TRACE_WINDOWS = 32
ROUNDS = 3
PROMPT = [5, 9, 2, 7, 11, 3, 8, 6]
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
LEGS = ("off", "swap_serial", "route_fused")
MARGIN = 0.25
LEG_NAMES = {"serial": "swap_serial", "warp": "swap_warp", "fused": "route_fused"}
"""Route kernel -> the leg of the margin swap that it makes."""


@dataclass(kw_only=True)
class Request:
    """What to measure; checked before any work."""

    shape: str
    rows: list[int]
    colds: list[float]
    trace: Path | None = None
    slots: int | None = None
    """Experts that have slots, with a trace; None: as many of the shape's as 8,083 are of 24,576."""
    trace_windows: int = TRACE_WINDOWS
    """Of the trace, spread over it."""
    margin: float | None = None
    """Of the legs that swap; None: 0.25, or off where `route_kernel` asks for one leg."""
    route_kernel: str | None = None
    """The kernels of the one leg to measure; None: three legs."""
    budget_sec: float = BUDGET_SEC

    def __post_init__(self) -> None:
        require(self.shape in WHOLE_SHAPES, "shape", f"one of {', '.join(WHOLE_SHAPES)}", self.shape)
        experts = WHOLE_SHAPES[self.shape].experts
        for number in self.rows:
            require(number in experts.distinct, "rows", f"of {', '.join(map(str, experts.distinct))}", number)
        for mean in self.colds:
            require(0 <= mean <= 4, "cold-experts", "0 to 4 a layer", mean)
        require(self.budget_sec > 0, "budget-sec", "above 0", self.budget_sec)
        total = experts.layers * experts.experts
        if self.slots is None:
            self.slots = total * 8083 // 24576
        require(0 <= self.slots <= total, "slots", f"0 to {total}", self.slots)
        kernel = self.route_kernel
        require(
            kernel is None or kernel in ROUTE_KERNELS,
            "route-kernel",
            f"one of {', '.join(ROUTE_KERNELS)}",
            kernel,
        )
        if self.margin is None and kernel is None:
            self.margin = MARGIN
        if self.margin is not None:
            MarginSwap(margin=self.margin)

    def legs(self) -> dict[str, tuple[Policy | None, str]]:
        """Leg -> its policy and the kernels that route, over a trace."""
        swap = None if self.margin is None else MarginSwap(margin=self.margin)
        if self.route_kernel is not None:
            name = "off" if swap is None else LEG_NAMES[self.route_kernel]
            return {name: (swap, self.route_kernel)}
        return dict(zip(LEGS, ((None, "fused"), (swap, "serial"), (swap, "fused")), strict=True))


def run_whole(request: Request, device: torch.device) -> dict[str, Any]:
    """Measure; returns config, results, and `failed`, the names of the parts that did not finish."""
    with torch.inference_mode():
        bench = WholeBench(request, device)
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


@dataclass
class Floors:
    """Bytes that a window must read, and what they take at the measured rates."""

    hbm_gbs: float
    pcie_gbs: float
    other_bytes: int
    layers: int
    payload: int

    def of(self, distinct: float, cold_L: list[int] | list[float]) -> dict[str, float]:
        """distinct: experts a layer, cold ones among them; ms."""
        other = self.other_bytes / self.hbm_gbs / 1e6
        each = self.payload / self.hbm_gbs / 1e6
        slow = self.payload / self.pcie_gbs / 1e6
        hbm = other + sum(distinct - cold for cold in cold_L) * each
        pcie = sum(cold_L) * slow
        chain = other + sum(max((distinct - cold) * each, cold * slow) for cold in cold_L)
        return {"floor_sum_ms": hbm + pcie, "floor_overlap_ms": max(hbm, pcie), "floor_chain_ms": chain}


class WholeBench:
    """One run. `results` fills part by part."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.request, self.device = request, device
        self.whole = WHOLE_SHAPES[request.shape]
        self.shape = self.whole.experts
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []
        self.resident: list[tuple[int, int]] = []
        self._end = time.perf_counter() + request.budget_sec

    def run(self) -> None:
        self._part("setup", self._setup)
        if self.failed:
            return
        self._part("rates", self._rates)
        if self.failed:
            return
        self._part("check", self._check)
        if self.request.trace is None:
            for rows in self.request.rows:
                self._part(f"t{rows}", partial(self._fixed, rows))
        else:
            for rows in self.request.rows:
                self._part(f"trace_t{rows}", partial(self._legs, rows))

    def _part(self, name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        if start > self._end:
            print(f"warmset: {name}: no time left", file=sys.stderr, flush=True)
            self.failed.append(name)
            return
        try:
            found = work()
        except Exception:
            traceback.print_exc()
            self.failed.append(name)
            found = None
        if found is not None:
            self.results[name] = found
        print(f"warmset: {name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    # -- setup ------------------------------------------------------------------------------------------------

    def _setup(self) -> dict[str, Any]:
        shape, device = self.shape, self.device
        torch.manual_seed(0)
        self.pool = min(POOL, shape.experts - 4)
        self.tiled: dict[int, TiledTrace] = {}
        if self.request.trace is None:
            self.resident = [(layer, expert) for layer in range(shape.layers) for expert in range(self.pool)]
        else:
            self._tile()
        self.trunk = make_trunk(self.whole, device)
        self.store = SharedArena(shape, device)
        assert self.store.pinned, f"only {self.store.pinned_bytes} of {self.store.nbytes} bytes are pinned"
        slots, table = make_tables(shape, self.store, self.resident, device)
        self.clock = StampClock(device)
        kernels = None
        if kernels_run(device):
            from warmset.kernels.experts import DEFAULT_TILES

            tiles = DEFAULT_TILES
            if device.type != "cuda":  # the interpreter runs programs one by one
                tiles = replace(tiles, cold_programs=REHEARSAL_PROGRAMS)
            kernels = DeviceExperts(slots, self.store, table, "silu", self.clock, tiles)
        self.runner = ExpertRunner(slots, self.store, F.silu, self.clock, kernels)
        layers = find_layers(self.trunk, shape)
        self.rule = layers[0].rule
        self.routing = self._routing(None)
        model.install(self.trunk, layers, self.runner, self.routing, self.clock)
        follow_kinds(self.trunk, self.clock)
        self.clock.enabled = False
        self.windows = WindowRunner(self.trunk, self.runner, self.routing, self.clock)
        self.script = Script(self.trunk, shape, device)
        self.sequence = self.windows.start()
        self.windows.read_prompt(self.sequence, PROMPT)
        self.runs = WindowRuns(self.trunk, self.runner, self.routing, self.clock, source="fixed")
        past = self.whole.past_tokens
        self.runs.cache = StaticCache(self.sequence.state, pages_for(past + 2048), device)
        return {
            "other_bytes": self._other_bytes(),
            "state_bytes": self.runs.cache.nbytes,
            "resident_from": next(iter(self.tiled.values())).why if self.tiled else "the first of each layer",
        }

    def _routing(self, policy: Policy | None, form: Any = "fused") -> Routing:
        return Routing(
            policy, self.rule, self.runner.slots.device_table_LE, max_rows=MAX_WINDOW_ROWS, form=form
        )

    def _tile(self) -> None:
        assert self.request.trace is not None and self.request.slots is not None
        trace, marks = read_trace(self.request.trace)
        counts = learned_counts(trace)
        most = self.request.trace_windows
        for rows in self.request.rows:
            tiled = tile_trace(trace, self.shape, rows, self.request.slots, most, counts, marks=marks)
            self.tiled[rows] = replace(tiled, logits_WLTE=tiled.logits_WLTE.to(self.device))
        self.resident = next(iter(self.tiled.values())).resident

    def _begin(self, runs: WindowRuns) -> None:
        """A sequence of `past_tokens` tokens with random states, and all further tokens given."""
        length = self.whole.past_tokens
        runs.begin(
            self.sequence.state, PROMPT, 4, sampling=SamplingConfig(max_new_tokens=2000), most_tokens=1500
        )
        cache = runs.cache
        assert cache is not None
        generator = torch.Generator(self.device).manual_seed(1)
        for layer in cache.own_layers:
            for part in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if part is not None:
                    part[:, :, :length].normal_(generator=generator)
            if getattr(layer, "index_keys", None) is not None:
                layer.index_keys[:, :length].normal_(generator=generator)
                layer.blocks_known = False
        runs.forms.prepare(cache)
        cache.place.begin_2.fill_(length)

    def _other_bytes(self) -> int:
        """Bytes of a window that are no experts: weights once, keys and values of what is seen, states once."""
        embedding = self.trunk.get_input_embeddings().weight
        weights = {
            p.data_ptr(): p.nbytes for p in self.trunk.parameters() if p.data_ptr() != embedding.data_ptr()
        }
        if self.trunk.get_output_embeddings().weight.data_ptr() == embedding.data_ptr():
            weights[embedding.data_ptr()] = embedding.nbytes
        total = sum(weights.values())
        past = self.whole.past_tokens
        assert self.runs.cache is not None
        for layer in self.runs.cache.own_layers:
            keys = getattr(layer, "keys", None)
            if keys is None:
                total += layer.delta.state_NDV.nbytes
                continue
            seen = past
            if getattr(layer, "index_keys", None) is not None:
                budget, ratio = self.trunk.config.indexer_budget, self.trunk.config.indexer_compress_ratio
                seen = min(past, budget)
                total += past // ratio * layer.index_keys.shape[-1] * keys.element_size()
            total += 2 * seen * keys.shape[1] * keys.shape[3] * keys.element_size()
        return total

    # -- parts ------------------------------------------------------------------------------------------------

    def _rates(self) -> dict[str, float]:
        hbm = hbm_read_gbs(self.device) if kernels_run(self.device) else 1.0
        pcie = pcie_copy_gbs(self.store.arena_NB, self.device)
        self.floors = Floors(
            hbm, pcie, self._other_bytes(), self.shape.layers, self.shape.layout.payload_bytes
        )
        rates = {"hbm_read_gbs": hbm, "pcie_copy_gbs": pcie, "other_ms": self.floors.other_bytes / hbm / 1e6}
        print(f"warmset: rates: {rates}", file=sys.stderr, flush=True)
        return rates

    def _check(self) -> dict[str, float]:
        """Logits of a window through the static forms against transformers' own modules, with the same picks."""
        rows = max(self.request.rows)
        self._fix_picks(rows, 0.0)
        tokens = torch.arange(3, 3 + rows, device=self.device)
        self.script.on = True
        try:
            own_TV = self.windows.verify(self.sequence, tokens.tolist())
            self.windows.commit(self.sequence, 1)
            runs = self.runs
            length = len(PROMPT)
            runs.begin(
                self._again().state, PROMPT, 3, sampling=SamplingConfig(max_new_tokens=8), most_tokens=4
            )
            assert runs.cache is not None
            with runs.forms.using(runs.cache):
                self.routing.begin_static(runs.cache.place.open(rows), None)
                ours_TV = runs.forms.forward(tokens, torch.arange(length, length + rows, device=self.device))
                self.routing.end_static()
        finally:
            self.script.on = False
            self.sequence = self._again()
        error = float((ours_TV.float() - own_TV.float()).norm() / own_TV.float().norm())
        assert error < CHECK_TOLERANCE[self.shape.dtype], f"relative error {error}"
        return {"relative_error": error}

    def _again(self) -> Any:
        """A new sequence that has read the prompt."""
        on, self.script.on = self.script.on, False
        sequence = self.windows.start()
        self.windows.read_prompt(sequence, PROMPT)
        self.script.on = on
        return sequence

    def _fix_picks(self, rows: int, mean: float) -> list[int]:
        cold_L = cold_by_layer(self.shape.layers, mean)
        if self.request.trace is None:
            self.script.pick(make_window(self.shape, self.pool, rows, cold_L, self.device))
        else:
            self._show(rows, 0)
        return cold_L

    def _show(self, rows: int, window: int) -> None:
        self.script.logits_LTE[:, :rows].copy_(self.tiled[rows].logits_WLTE[window], non_blocking=True)

    def _fixed(self, rows: int) -> dict[str, Any]:
        found = self.results.setdefault(f"t{rows}", {})  # what was measured stays when the rest fails
        self.script.on = True
        try:
            for mean in self.request.colds:
                name = f"cold{mean:.2f}".replace(".", "_")
                found[name] = self._one(rows, mean)
                print(f"warmset: t{rows} {name}: {_short(found[name])}", file=sys.stderr, flush=True)
        finally:
            self.script.on = False
        return found

    def _one(self, rows: int, mean: float) -> dict[str, Any]:
        cold_L = self._fix_picks(rows, mean)
        self._begin(self.runs)
        floors = self.floors.of(self.shape.distinct[rows], cold_L)
        self.runs.run(1, rows)
        self._sync()
        self._take_counts()
        times = self._times(lambda: self.runs.run(1, rows), REPEATS)
        distinct, cold = self._take_counts()
        ms = median(times)
        layer_windows = self.shape.layers * (len(times) + self.extra_runs)
        return {
            "ms": ms,
            "least_ms": min(times),
            "most_ms": max(times),
            **floors,
            "over_floor_chain": ms / floors["floor_chain_ms"],
            "distinct_experts": distinct / layer_windows,
            "cold_experts": cold / layer_windows,
            "stages": self._stages(self.runs, [lambda: None] * STAGED_WINDOWS, rows, ms),
        }

    def _times(self, work: Callable[[], None], repeats: int) -> list[float]:
        """ms of each of several windows, one after the other; fewer when they are far too slow."""
        self.extra_runs = 1
        if self.device.type != "cuda":
            work()
            return [_wall_ms(work) for _ in range(2)]
        work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for number, mark in enumerate(marks[1:]):
            work()
            mark.record()
            if number == 1:
                torch.cuda.synchronize(self.device)
                if marks[0].elapsed_time(mark) / 2 > MAX_MS:
                    marks = marks[:3]
                    break
        torch.cuda.synchronize(self.device)
        return [first.elapsed_time(second) for first, second in pairwise(marks)]

    def _stages(
        self, runs: WindowRuns, before: list[Callable[[], None]], rows: int, plain_ms: float
    ) -> dict[str, Any]:
        """The stage table of one window for each of `before`, and what the stamps themselves cost."""
        self.clock.enabled = True
        try:
            runs.run(1, rows)
            self._sync()
            self.clock.reset()
            for show in before if self.device.type == "cuda" else before[:2]:
                show()
                runs.run(1, rows)
            self._sync()
            marks = runs.marks(rows)
            table = stage_table(self.clock.read(marks))
        finally:
            self.clock.enabled = False
        gap = table["stages"].get("gap", 0.0)
        cost = table["total_ms"] - gap - plain_ms
        table["stamps"] = len(marks)
        table["stamps_ms"] = cost
        table["sum_over_total"] = table["sum_ms"] / table["total_ms"]
        return table

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _take_counts(self) -> tuple[int, int]:
        """Distinct experts read since the last call, and the cold ones, as the code that reads counts them."""
        counts, self.runner.counts = self.runner.counts, ReadCounts()
        return counts.distinct_experts, counts.cold_experts

    # -- legs over a trace ------------------------------------------------------------------------------------

    def _legs(self, rows: int) -> dict[str, Any]:
        legs = {name: self._leg(*form) for name, form in self.request.legs().items()}
        order = list(legs)
        self.script.on = True
        try:
            for number in range(ROUNDS if self.device.type == "cuda" else 1):
                for name in order if number % 2 == 0 else reversed(order):
                    self._run_leg(legs[name], rows)
            found = {name: self._leg_figures(leg, self._leg_stages(leg, rows)) for name, leg in legs.items()}
        finally:
            self.script.on = False
        if self.request.route_kernel is not None:
            return found
        off, serial, fused = (found[name] for name in LEGS)
        found["compared"] = {
            "cold_down": 1 - fused["cold_experts"] / off["cold_experts"] if off["cold_experts"] else None,
            "window_down": 1 - fused["ms"] / off["ms"],
            "router_longer_ms": fused["stages"]["stages"]["hc-read+router"]
            - off["stages"]["stages"]["hc-read+router"],
            "serial_router_longer_ms": serial["stages"]["stages"]["hc-read+router"]
            - off["stages"]["stages"]["hc-read+router"],
        }
        return found

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

    def _leg_stages(self, leg: Leg, rows: int, most: int | None = None) -> dict[str, Any]:
        """The stage table over the windows of the trace, or the first `most` of them."""
        self.script.use_routing(leg.routing)
        self._begin(leg.runs)
        windows = range(len(self.tiled[rows].logits_WLTE))[:most]
        shows: list[Callable[[], None]] = [partial(self._show, rows, window) for window in windows]
        return self._stages(leg.runs, shows, rows, median(leg.window_ms))

    def _leg_figures(self, leg: Leg, stages: dict[str, Any]) -> dict[str, Any]:
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
            "stages": stages,
        }


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


def learned_counts(trace: Any) -> Any:
    """Counts of the profile that ships with the trace's model; None where there is none that fits."""
    from warmset.models import BUILTIN_PROFILES
    from warmset.profile import Identity, load_profile

    path = BUILTIN_PROFILES.get(trace.model)
    if path is None:
        return None
    _, layers, experts = trace.scores_NLE.shape
    identity = Identity(
        model=trace.model, num_layers=layers, num_experts=experts, fingerprint=trace.fingerprint
    )
    profile, _ = load_profile(Path(path), identity)
    return None if profile is None else profile.counts_LE


def _wall_ms(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def _short(found: dict[str, Any]) -> str:
    table = found["stages"]
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in table["stages"].items())
    return (
        f"{found['ms']:.2f} ms, {found['over_floor_chain']:.2f} x floor_chain {found['floor_chain_ms']:.2f}; "
        f"{parts}; {table['stamps']} stamps {table['stamps_ms']:.2f} ms"
    )

"""`bench window`: whole decode windows at the shape of a large model, each one launch of a captured graph.

The windows are those of the engine (`graph.runs`): transformers' trunk with the static forms, our router kernels and
experts, draws, judgement and commit on the device. Only what rows pick is scripted (`whole_input`). Rates are measured
first, in the same run; parts are independent, and one that fails is printed and makes the record red.

    rates     a kernel that only reads; pinned copies of one expert
    check     static forms against transformers' own forward, same picks
    windows   by rows and cold experts a layer: ms a window, three floors, stages

`whole_legs` runs windows of a routing trace in the last one's place.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from warmset import model
from warmset.config import MAX_WINDOW_ROWS, SamplingConfig
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
    learned_counts,
    make_trunk,
    read_trace,
    tile_trace,
)
from warmset.measure.whole_request import Request
from warmset.measure.window import REHEARSAL_PROGRAMS
from warmset.measure.window_input import SharedArena, cold_by_layer, make_tables, make_window
from warmset.router import Routing
from warmset.routing import Policy
from warmset.window import WindowRunner

POOL = 60
"""Resident experts of each layer where picks are fixed: more than 4 x L2 over all layers."""
REPEATS = 15
STAGED_WINDOWS = 12
MAX_MS = 400.0
PROMPT = [5, 9, 2, 7, 11, 3, 8, 6]
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class Staged:
    """ms by (stage, kind of layer) of some windows of one capture, and how many stamps each has."""

    windows: list[dict[tuple[str, str], float]]
    stamps: int


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
    """One run. `results` fills part by part.

    Raises WarmsetError where the request's trace is none, or is of another shape: before any part.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        self.request, self.device = request, device
        self.whole = WHOLE_SHAPES[request.shape]
        self.shape = self.whole.experts
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []
        self.resident: list[tuple[int, int]] = []
        self.tiled: dict[int, TiledTrace] = {}
        self._end = time.perf_counter() + request.budget_sec
        if request.trace is not None:
            self._tile()

    def run(self) -> None:
        self._part("setup", self._setup)
        if self.failed:
            return
        self._part("rates", self._rates)
        if self.failed:
            return
        self._part("check", self._check)
        self._measure()

    def _measure(self) -> None:
        for rows in self.request.rows:
            self._part(f"t{rows}", partial(self._fixed, rows))

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
        if self.request.trace is None:
            self.resident = [(layer, expert) for layer in range(shape.layers) for expert in range(self.pool)]
        for rows, tiled in self.tiled.items():
            self.tiled[rows] = replace(tiled, logits_WLTE=tiled.logits_WLTE.to(device))
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
            self.tiled[rows] = tile_trace(
                trace, self.shape, rows, self.request.slots, most, counts, marks=marks
            )
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
            "stages": self._stage_figures(
                [self._staged(self.runs, [lambda: None] * STAGED_WINDOWS, rows)], ms
            ),
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

    def _staged(self, runs: WindowRuns, before: list[Callable[[], None]], rows: int) -> Staged:
        """ms by stage of one window for each of `before`."""
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
            return Staged(windows=self.clock.read(marks), stamps=len(marks))
        finally:
            self.clock.enabled = False

    def _stage_figures(self, rounds: list[Staged], plain_ms: float) -> dict[str, Any]:
        """The stage table over all windows of all rounds, and what the stamps themselves cost."""
        table = stage_table([window for staged in rounds for window in staged.windows])
        gap = table["stages"].get("gap", 0.0)
        table["stamps"] = rounds[0].stamps
        table["stamps_ms"] = table["total_ms"] - gap - plain_ms
        table["sum_over_total"] = table["sum_ms"] / table["total_ms"]
        return table

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _take_counts(self) -> tuple[int, int]:
        """Distinct experts read since the last call, and the cold ones, as the code that reads counts them."""
        counts, self.runner.counts = self.runner.counts, ReadCounts()
        return counts.distinct_experts, counts.cold_experts


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

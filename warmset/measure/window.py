"""`bench window --part experts`: the expert part of a decode window, beside what the memory could do.

Everything runs through `DeviceExperts`, the code path of `generate`, on random weights at a fixed input
(`window_input`). Rates of HBM and PCIe are measured in the same run. Parts are independent: one that fails is
printed and the others go on, but then the record says red.

    rates     a kernel that only reads; pinned copies of one expert; the same bytes read in place
    tiles     resident experts alone, by block sizes; with `best` the rest runs with the one that does best
    check     the timed code against plain torch
    window    resident alone, cold alone, both; three floors
    trace     no host-to-device copy in a replayed window
    prompt    4,096 tokens through 4 layers: with a third of the experts resident, and with all
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Group
from rich.table import Table

from warmset.config import require
from warmset.device_experts import DeviceExperts
from warmset.measure.clock import Replay, time_ms
from warmset.measure.record import commit, gpu_name, write_record
from warmset.measure.report import plain_table
from warmset.measure.window_input import (
    SHAPES,
    Shape,
    SharedArena,
    WindowInput,
    cold_by_layer,
    make_tables,
    make_window,
)
from warmset.profile import write_atomically
from warmset.stages import StageClock

POOL = 60
"""Resident experts of each layer: enough for the picks of 8 rows, and far more than L2 over all layers."""
READ_BYTES = 4 << 30
READ_FORMS = ((2048, 4, 4), (4096, 4, 8), (2048, 8, 4), (1024, 8, 4), (4096, 8, 8))
COLD_PROGRAMS = (33, 66, 132, 264)
REHEARSAL_PROGRAMS = 2
BEST = "best"
"""Instead of a name of block sizes: those whose least share of the read rate, over all numbers of rows, is highest."""
MAX_COLUMNS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def run_bench(
    shape_name: str, rows: list[int], colds: list[float], device: torch.device, tiles: str | None
) -> dict[str, Any]:
    """Measure every part; returns config, results, and `failed`, the names of the parts that did not finish."""
    require(shape_name in SHAPES, "shape", f"one of {', '.join(SHAPES)}", shape_name)
    shape = SHAPES[shape_name]
    for number in rows:
        require(number in shape.distinct, "rows", f"of {', '.join(map(str, shape.distinct))}", number)
    for mean in colds:
        require(0 <= mean <= 4, "cold-experts", "0 to 4 a layer", mean)
    with torch.inference_mode():
        bench = ExpertBench(shape, rows, colds, device, tiles)
        bench.run()
    config = {
        "shape": shape_name,
        "rows": rows,
        "cold_experts": colds,
        "tiles": bench.tiles.name,
        "layers": shape.layers,
        "host_layers": shape.host_layers,
        "expert_bytes": shape.layout.nbytes,
        "distinct": {str(key): value for key, value in shape.distinct.items()},
    }
    return {"config": config, "results": bench.results, "failed": bench.failed}


def save_record(path: Path, found: dict[str, Any], name: str) -> None:
    """The record of a run; one with failed parts is kept for study, says red, and counts for nothing."""
    if not found["failed"]:
        write_record(path, name=name, config=found["config"], results=found["results"], tests="green")
        return
    red = {"name": name, "tests": "red", "commit": commit(), "gpu": gpu_name(), **found}
    write_atomically(path, json.dumps(red, indent=1) + "\n")


def window_table(results: dict[str, Any]) -> Any:
    """Each part as a table under its name: figures side by side where all its rows have the same ones."""
    tables = []
    for part, values in results.items():
        by_columns: dict[tuple[str, ...], dict[str, Any]] = {}
        for key, value in values.items():
            row = value if isinstance(value, dict) else {"value": value}
            by_columns.setdefault(tuple(row), {})[key] = row
        for columns, rows in by_columns.items():
            tables.append(_part_table(part, columns, rows))
    return Group(*tables)


def _part_table(part: str, columns: tuple[str, ...], rows: dict[str, dict[str, Any]]) -> Table:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:,.4g}"

    if len(columns) <= MAX_COLUMNS:
        table = plain_table(part, *columns)
        for name, row in rows.items():
            table.add_row(name, *map(cell, row.values()))
    else:  # too many to stand side by side: turned round
        table = plain_table(part, *rows)
        for column in columns:
            table.add_row(column, *(cell(row[column]) for row in rows.values()))
    return table


class ExpertBench:
    """One run. `results` fills part by part."""

    def __init__(
        self, shape: Shape, rows: list[int], colds: list[float], device: torch.device, tiles: str | None
    ) -> None:
        from warmset.kernels.experts import DEFAULT_TILES, TILES

        allowed = (BEST, *TILES)
        require(tiles is None or tiles in allowed, "tiles", f"one of {', '.join(allowed)}", tiles)
        self.shape, self.rows, self.colds, self.device = shape, rows, colds, device
        self.choose = tiles == BEST
        self.tiles = TILES.get(tiles or "", DEFAULT_TILES)
        self.cold_programs: tuple[int, ...] = COLD_PROGRAMS
        if device.type != "cuda":  # the interpreter runs programs one by one
            self.tiles = dataclasses.replace(self.tiles, cold_programs=REHEARSAL_PROGRAMS)
            self.cold_programs = (REHEARSAL_PROGRAMS,)
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []
        self._hbm = self._pcie = float("nan")

    def run(self) -> None:
        self._part("setup", self._setup)
        if self.failed:
            return
        for name in ("rates", "tiles", "check", "window", "trace", "prompt"):
            self._part(name, getattr(self, f"_{name}"))

    def _part(self, name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            found = work()
        except Exception:
            traceback.print_exc()
            self.failed.append(name)
            found = None
        if found is not None:
            self.results[name] = found
        print(f"warmset: {name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    def _setup(self) -> None:
        shape = self.shape
        torch.manual_seed(0)
        self.pool = min(POOL, shape.experts - 4)
        self.store = SharedArena(shape, self.device)
        assert self.store.pinned, f"only {self.store.pinned_bytes} of {self.store.nbytes} bytes are pinned"
        resident = [(layer, expert) for layer in range(shape.layers) for expert in range(self.pool)]
        self.slots, self.table = make_tables(shape, self.store, resident, self.device)
        self.clock = StageClock(self.device, enabled=False)

    def _experts(self, **changes: Any) -> DeviceExperts:
        tiles = dataclasses.replace(self.tiles, **changes)
        return DeviceExperts(self.slots, self.store, self.table, "silu", self.clock, tiles)

    def _window_of(self, rows: int, mean: float) -> WindowInput:
        cold_L = cold_by_layer(self.shape.layers, mean)
        return make_window(self.shape, self.pool, rows, cold_L, self.device)

    def _replay(
        self,
        experts: DeviceExperts,
        window: WindowInput,
        layers: list[int] | None = None,
        kinds=(True, False),
    ) -> float:
        """ms of one window over `layers` (all by default), launching only `kinds` of experts."""
        chosen = range(self.shape.layers) if layers is None else layers
        experts.kinds = kinds

        def work() -> list[torch.Tensor]:
            return [experts.run(layer, window.x_TH, window.ids[layer], window.weights_TK) for layer in chosen]

        milliseconds = Replay(work, self.device).ms()
        experts.kinds = (True, False)
        experts.reset()  # one kind alone leaves picks that never arrived
        return milliseconds

    # -- parts ------------------------------------------------------------------------------------------------

    def _rates(self) -> dict[str, float]:
        from warmset.kernels.experts_probe import copy_from
        from warmset.kernels.experts_read import read_only

        gpu = self.device.type == "cuda"
        size = READ_BYTES if gpu else 1 << 16
        data_N = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=self.device)
        out_1 = torch.zeros(1, dtype=torch.int32, device=self.device)
        forms = {}
        for form in READ_FORMS if gpu else READ_FORMS[:1]:
            num_bytes = read_only(data_N, out_1, *form)
            work = Replay(partial(read_only, data_N, out_1, *form), self.device)
            forms[f"{form[0]}x{form[1]}"] = num_bytes / work.ms() / 1e6
        self._hbm = max(forms.values())
        rows, nbytes = self.store.arena_NB, self.shape.layout.nbytes
        count = min(256, len(rows))
        target_NB = torch.empty(count, nbytes, dtype=torch.uint8, device=self.device)

        def copies() -> None:
            for index in range(count):
                target_NB[index].copy_(rows[index], non_blocking=True)

        self._pcie = count * nbytes / time_ms(copies, self.device, 5) / 1e6

        def in_place() -> None:
            for index in range(min(count, 16)):
                copy_from(rows[index].data_ptr(), target_NB[index].view(torch.int32))

        in_place_ms = Replay(in_place, self.device).ms()
        return {
            "hbm_read_gbs": self._hbm,
            "pcie_copy_gbs": self._pcie,
            "pcie_in_place_gbs": min(count, 16) * nbytes / in_place_ms / 1e6,
            **{f"hbm_read_{name}_gbs": rate for name, rate in forms.items()},
        }

    def _check(self) -> dict[str, float]:
        """The timed code against plain torch; a row alone has the bits that it has among others."""
        shape, rows = self.shape, max(self.rows)
        window = make_window(shape, self.pool, rows, [2] * shape.layers, self.device, seed=1)
        experts = self._experts()
        worst = 0.0
        for layer in (0, shape.layers - 1):
            ids_TK = window.ids[layer]
            got = experts.run(layer, window.x_TH, ids_TK, window.weights_TK)
            expected = self._plain(layer, window.x_TH, ids_TK, window.weights_TK)
            worst = max(worst, float((got.double() - expected).norm() / expected.norm()))
            for row in range(rows):
                part = slice(row, row + 1)
                alone = experts.run(layer, window.x_TH[part], ids_TK[part], window.weights_TK[part])
                assert torch.equal(alone[0], got[row]), f"layer {layer}, row {row}: other bits alone"
        assert worst < TOLERANCE[shape.dtype], f"relative error {worst}"
        return {"relative_error": worst}

    def _plain(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float64, device=self.device)
        for row, ids_K in enumerate(ids_TK.tolist()):
            for rank, expert in enumerate(ids_K):
                slot = self.slots.slot_of(layer, expert)
                held_B = (
                    self.slots.slot_B(slot) if slot >= 0 else self.store.view(layer, expert).to(self.device)
                )
                gate_up, down = (matrix.double() for matrix in self.shape.layout.views(held_B))
                gate, up = F.linear(x_TH[row].double(), gate_up).chunk(2)
                h_I = (F.silu(gate) * up).to(self.shape.dtype).double()
                out_TH[row] += weights_TK[row, rank].double() * F.linear(h_I, down)
        return out_TH

    def _resident_bytes(self, rows: int, cold: int = 0) -> int:
        return (self.shape.distinct[rows] - cold) * self.shape.layout.payload_bytes

    def _tiles(self) -> dict[str, dict[str, float]]:
        """Share of the read rate by block sizes, then cold experts alone by programs."""
        from warmset.kernels.experts import TILES

        kept, found = self.tiles, {}
        try:
            for tiles in TILES.values():
                self.tiles = dataclasses.replace(tiles, cold_programs=kept.cold_programs)
                try:
                    found[tiles.name] = {f"share_t{rows}": self._resident_share(rows) for rows in self.rows}
                except Exception:  # a form that this device cannot run is no failure of the others
                    traceback.print_exc()
        finally:
            self.tiles = kept
        if self.choose:
            best = TILES[max(found, key=lambda name: min(found[name].values()))]
            self.tiles = dataclasses.replace(best, cold_programs=kept.cold_programs)
        window = self._window_of(max(self.rows), 1.0)
        for programs in self.cold_programs:
            ms = self._replay(self._experts(cold_programs=programs), window, kinds=(True,))
            rate = sum(window.cold_L) * self.shape.layout.payload_bytes / ms / 1e6
            found[f"cold_programs_{programs}"] = {"share_of_pcie": rate / self._pcie}
        return found

    def _resident_share(self, rows: int) -> float:
        window = self._window_of(rows, 0.0)
        ms = self._replay(self._experts(), window, kinds=(False,))
        return self.shape.layers * self._resident_bytes(rows) / ms / 1e6 / self._hbm

    def _window(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for rows in self.rows:
            found[f"t{rows}_resident"] = {"share_of_hbm": self._resident_share(rows)}
            for mean in self.colds:
                found[f"t{rows}_cold{mean:.2f}".replace(".", "_")] = self._one_window(rows, mean)
        return found

    def _one_window(self, rows: int, mean: float) -> dict[str, float | None]:
        window = self._window_of(rows, mean)
        experts = self._experts()
        payload = self.shape.layout.payload_bytes
        without = window.only_resident(self.slots)
        both_ms = self._replay(experts, window)
        chain_alone = chain_floor = cold_ms = 0.0
        for kind in sorted(set(window.cold_L)):
            layers = [layer for layer, cold in enumerate(window.cold_L) if cold == kind]
            resident = self._replay(experts, without, layers, kinds=(False,))
            cold = self._replay(experts, window, layers, kinds=(True,)) if kind else 0.0
            cold_ms += cold
            chain_alone += max(resident, cold)
            by_hbm = self._resident_bytes(rows, kind) / self._hbm / 1e6
            chain_floor += len(layers) * max(by_hbm, kind * payload / self._pcie / 1e6)
        cold_bytes = sum(window.cold_L) * payload
        hbm_ms = (self.shape.layers * self._resident_bytes(rows) - cold_bytes) / self._hbm / 1e6
        pcie_ms = cold_bytes / self._pcie / 1e6
        return {
            "ms": both_ms,
            "chain_alone_ms": chain_alone,
            "over_chain_alone": both_ms / chain_alone,
            "cold_alone_ms": cold_ms,
            "cold_share_of_pcie": pcie_ms / cold_ms if cold_ms else None,
            "floor_sum_ms": hbm_ms + pcie_ms,
            "floor_overlap_ms": max(hbm_ms, pcie_ms),
            "floor_chain_ms": chain_floor,
            "over_floor_chain": both_ms / chain_floor,
        }

    def _trace(self) -> dict[str, int]:
        """What a replay of one window does on the device, by the profiler."""
        window = self._window_of(max(self.rows), max(self.colds))
        experts = self._experts()

        def work() -> list[torch.Tensor]:
            return [
                experts.run(layer, window.x_TH, ids_TK, window.weights_TK)
                for layer, ids_TK in enumerate(window.ids)
            ]

        replay = Replay(work, self.device)
        if replay.graph is None:
            return {"host_to_device_copies": experts.host_copies, "kernels": 4 * self.shape.layers}
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            replay.run()
            torch.cuda.synchronize(self.device)
        names = [
            event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        kernels = sum("gate_up" in name or "down_sum" in name for name in names)
        copies = sum("memcpy htod" in name.lower() for name in names)
        assert kernels == 4 * self.shape.layers, (
            f"the trace shows {kernels} kernels: {sorted(set(names))[:8]}"
        )
        assert copies == 0, f"{copies} host-to-device copies"
        return {"host_to_device_copies": copies, "kernels": kernels}

    def _prompt(self) -> dict[str, float | None]:
        """A prompt through as many layers as lie in host memory, a third of the experts resident, then all."""
        host_layers = self.shape.host_layers
        shape = dataclasses.replace(self.shape, layers=host_layers)
        self.store.num_layers = host_layers
        generator = torch.Generator(self.device).manual_seed(3)
        x_TH = torch.randn(
            shape.prompt_tokens, shape.hidden, generator=generator, device=self.device, dtype=torch.float32
        ).to(shape.dtype)
        scores = torch.rand(
            host_layers, shape.prompt_tokens, shape.experts, generator=generator, device=self.device
        )
        weights_LTK, ids_LTK = scores.topk(shape.top_k)
        ids_LTK = ids_LTK.int()
        slots_alike = {}
        times, read = {}, {}
        for name, share in (("third", 1 / 3), ("all", 1.0)):
            count = round(shape.experts * share)
            resident = [(layer, expert) for layer in range(host_layers) for expert in range(count)]
            slots, table = make_tables(shape, self.store, resident, self.device)
            experts = DeviceExperts(slots, self.store, table, "silu", self.clock, self.tiles)

            def work(experts: DeviceExperts = experts) -> None:
                for start in range(0, shape.prompt_tokens, shape.prompt_chunk):
                    rows = slice(start, start + shape.prompt_chunk)
                    for layer in range(host_layers):
                        experts.run(layer, x_TH[rows], ids_LTK[layer, rows], weights_LTK[layer, rows])

            before = _sum(slots.slabs)
            work()
            self.store.bytes_read = 0
            work()
            read[name] = self.store.bytes_read
            times[name] = time_ms(work, self.device, 3)
            slots_alike[name] = _sum(slots.slabs) == before
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            del slots, table, experts
        assert all(slots_alike.values()), "reading a prompt changed the slots"
        floor = max(read["third"] / self._pcie / 1e6, times["all"])
        return {
            "ms": times["third"],
            "all_resident_ms": times["all"],
            "pcie_bytes": read["third"],
            "floor_ms": floor,
            "over_floor": times["third"] / floor,
            "grouped_mm_all_resident_ms": self._grouped_mm(shape, x_TH, ids_LTK),
        }

    def _grouped_mm(self, shape: Shape, x_TH: torch.Tensor, ids_LTK: torch.Tensor) -> float | None:
        """The same prompt's two products of every layer through torch's grouped product; for comparison only."""
        grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if grouped is None or self.device.type != "cuda":
            return None
        try:
            make: dict[str, Any] = {"device": self.device, "dtype": shape.dtype}
            gate_up = torch.randn(shape.experts, 2 * shape.width, shape.hidden, **make)
            down = torch.randn(shape.experts, shape.hidden, shape.width, **make)

            def work() -> None:
                for start in range(0, shape.prompt_tokens, shape.prompt_chunk):
                    for layer in range(shape.layers):
                        ids_P = ids_LTK[layer, start : start + shape.prompt_chunk].reshape(-1).long()
                        order = ids_P.argsort(stable=True)
                        ends = torch.bincount(ids_P, minlength=shape.experts).cumsum(0).int()
                        rows = x_TH[start + order // shape.top_k]
                        gate, up = grouped(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
                        grouped(F.silu(gate) * up, down.transpose(1, 2), offs=ends)

            return time_ms(work, self.device, 3)
        except (RuntimeError, TypeError):
            traceback.print_exc()
            return None


def _sum(slabs: list[torch.Tensor]) -> int:
    return sum(int(slab.view(-1).view(torch.int64).sum()) for slab in slabs)

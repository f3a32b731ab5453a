"""`warmset price --speed`: what margins buy, timed on a GPU, on one page with what they cost."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from warmset.config import require
from warmset.errors import WarmsetError

from .common import emit_json, parse_list, show_table
from .generate import parse_ranks

if TYPE_CHECKING:
    import torch

    from warmset.measure.price.speed import SpeedRequest

DEFAULT_MARGINS = "0.25,0.5,1.0"
DEFAULT_SHAPE = "qwen3-next-80b"
SHIPPED_EXPERTS = 512
"""Of the trace that ships; a shape with another number is rehearsed with random scores."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """The options that only `--speed` has, as they came; each is None where it was not given."""

    shape: str | None
    shape_slots: int | None
    trace: Path | None
    prices: Path | None
    budget_sec: float | None

    def refuse_without_speed(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                raise WarmsetError(f"--{field.name.replace('_', '-')} needs --speed.")

    def check(self, margins: str | None, ranks: str | None, rows: int, device: str) -> Timing:
        """What is to be timed; WarmsetError before any work where it cannot be."""
        from warmset.measure.price.speed import (
            BUDGET_SEC,
            SpeedRequest,
            check_trace,
            default_tails,
            read_prices,
        )
        from warmset.measure.whole_input import WHOLE_SHAPES
        from warmset.models import DATA
        from warmset.prepare import resolve_device

        chosen = resolve_device(device)
        if chosen.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise WarmsetError(
                "price --speed needs a CUDA device: on a CPU it only rehearses, with TRITON_INTERPRET=1."
            )
        shape = self.shape or DEFAULT_SHAPE
        require(shape in WHOLE_SHAPES, "shape", f"one of {', '.join(WHOLE_SHAPES)}", shape)
        experts = WHOLE_SHAPES[shape].experts
        tails = [parse_ranks(part) for part in ranks.split(",")] if ranks else default_tails(experts.top_k)
        request = SpeedRequest(
            shape=shape,
            rows=rows,
            margins=parse_list("--margins", margins or DEFAULT_MARGINS, float),
            tails=[tail for tail in tails if tail is not None],
            trace=self.trace or DATA / "trace.safetensors",
            slots=self.shape_slots,
            budget_sec=BUDGET_SEC if self.budget_sec is None else self.budget_sec,
        )
        prices = None if self.prices is None else read_prices(self.prices)
        random = self.trace is None and experts.experts != SHIPPED_EXPERTS
        if not random:
            check_trace(request)
        return Timing(request=request, device=chosen, prices=prices, random=random)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What is timed, and the prices that were measured before; None: they are measured in this run."""

    request: SpeedRequest
    device: torch.device
    prices: dict[str, Any] | None
    random: bool

    def run(self) -> dict[str, Any]:
        from warmset.measure.price.speed import rehearsal_trace, run_speed

        if not self.random:
            return run_speed(self.request, self.device)
        with tempfile.TemporaryDirectory() as folder:
            trace = rehearsal_trace(self.request.shape, Path(folder))
            return run_speed(replace(self.request, trace=trace), self.device)

    def report(self, found: dict[str, Any], prices: dict[str, Any], json_path: str | None) -> None:
        """The table and the record; exit 1 where a part failed. `prices`: results of `warmset price`."""
        from warmset.measure.price.speed import PRICED_ON, prices_of
        from warmset.measure.price.table import speed_table
        from warmset.measure.window import save_record

        results = found["results"]
        results["prices"] = prices_of(prices)
        results["priced_on"] = {key: prices[key] for key in PRICED_ON}
        if json_path == "-":
            emit_json(found, json_path)
        elif json_path is not None:
            save_record(Path(json_path), found, f"price-speed-{self.request.shape}")
        if json_path != "-" and "legs" in results:
            show_table(speed_table(results["legs"], results["prices"]))
            speed = results.get("speed", {})
            typer.echo(
                f"Time: {self.request.shape}, windows of {self.request.rows} rows, {found['config']['slots']:,} slots, "
                f"rounds: {speed.get('rounds', 0)}; committed rows: {speed.get('committed_from', 'unknown')}. "
                f"Price: {prices['text']}, {prices['positions']:,} positions."
            )
        if found["failed"]:
            typer.echo(f"warmset: failed: {', '.join(found['failed'])}.", err=True)
            raise typer.Exit(1)

"""`warmset bench`: speed beside its floor, and the bars."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from warmset.errors import WarmsetError

from .common import (
    MAX_CASES,
    JsonOption,
    check_writable,
    command_group,
    emit_json,
    number,
    parse_list,
    show_table,
)

bench = command_group("bench", "Speed beside its floor, and the bars.")


@bench.command("kernels")
def bench_kernels(
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="A routing trace to time too.")
    ] = None,
    cases: Annotated[int, typer.Option("--cases", parser=number(int), metavar="N")] = 20_000,
    json_path: JsonOption = None,
) -> None:
    """Time the routing kernels on a GPU, beside their floor; parity first, and no speed where it is red."""
    from warmset.engine import resolve_device
    from warmset.measure import kernels, kernels_table

    if not 1 <= cases <= MAX_CASES:
        raise WarmsetError(f"--cases must be 1 to {MAX_CASES:,}. Got {cases}.")
    resolve_device("cuda")
    check_writable(json_path)
    measured = kernels.run_bench(trace=trace, parity_cases=cases)
    if measured["tests"] == "red":
        typer.echo("parity is red, so no speed was measured:\n" + "\n".join(measured["mismatches"]), err=True)
        raise typer.Exit(1)
    if json_path != "-":
        typer.echo("\n".join(kernels_table.table(measured["results"])))
    if json_path is not None:
        from warmset.measure.record import make_record

        emit_json(make_record(name="routing-kernels", **measured), json_path)


@bench.command("check")
def bench_check(
    bars: Annotated[Path, typer.Option("--bars", metavar="FILE", help="The bars.")] = Path(
        "results/bars.toml"
    ),
    json_path: JsonOption = None,
) -> None:
    """Compare the records in results/ with results/bars.toml; exit 1 on a miss or a red record."""
    from warmset.measure.bars import check_bars
    from warmset.measure.report import bars_table

    check_writable(json_path)
    results = check_bars(bars)
    if json_path != "-":
        show_table(bars_table(results))
        for result in results:
            if result.why:
                typer.echo(f"{result.name}: {result.verdict}: {result.why}")
    emit_json({"bars": [vars(result) for result in results]}, json_path)
    if any(result.fails for result in results):
        raise typer.Exit(1)


@bench.command("window")
def bench_window(
    part: Annotated[str, typer.Option("--part", help="experts: the expert part alone.")] = "experts",
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME", help="qwen3-next-80b, or tiny for a rehearsal.")
    ] = "qwen3-next-80b",
    rows: Annotated[str, typer.Option("--rows", metavar="N,N", help="Rows of a window.")] = "1,4,8",
    cold_experts: Annotated[
        str, typer.Option("--cold-experts", metavar="X,X", help="Cold experts a layer, spread evenly.")
    ] = "0.63,1.87",
    tiles: Annotated[
        str | None, typer.Option("--tiles", metavar="NAME", help="Block sizes of the kernels.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """A decode window's expert part beside its floors; exit 1 when a part failed."""
    from warmset.config import require
    from warmset.engine import resolve_device
    from warmset.measure.window import run_bench, save_record, window_table

    check_writable(json_path)
    require(part == "experts", "--part", "experts", part)
    chosen = resolve_device(device)
    if chosen.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise WarmsetError(
            "bench window needs a CUDA device: on a CPU it only rehearses, with TRITON_INTERPRET=1."
        )
    found = run_bench(shape, parse_list(rows, int), parse_list(cold_experts, float), chosen, tiles)
    if json_path == "-":
        emit_json(found, json_path)
    elif json_path is not None:
        save_record(Path(json_path), found)
    if json_path != "-":
        show_table(window_table(found["results"]))
    if found["failed"]:
        typer.echo(f"warmset: failed: {', '.join(found['failed'])}.", err=True)
        raise typer.Exit(1)

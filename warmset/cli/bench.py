"""`warmset bench`: speed beside its floor, and the bars."""

from __future__ import annotations

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
    from warmset.measure import kernels, kernels_table
    from warmset.prepare import resolve_device

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

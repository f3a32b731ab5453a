"""`warmset env` and `warmset parity`: what a bug report needs, and whether the kernels agree."""

from __future__ import annotations

from typing import Annotated

import typer

from warmset.errors import WarmsetError

from .common import MAX_CASES, JsonOption, app, check_writable, emit_json, number, show_table


@app.command()
def env(json_path: JsonOption = None) -> None:
    """Versions, GPU, compiler, memory and limits: what a bug report needs."""
    from warmset.measure.machine import describe_machine
    from warmset.measure.report import key_values

    check_writable(json_path)
    found = describe_machine()
    if json_path != "-":
        show_table(key_values(found))
    emit_json(found, json_path)


@app.command()
def parity(
    cases: Annotated[int, typer.Option("--cases", parser=number(int), metavar="N")] = 400,
    seed: Annotated[int, typer.Option("--seed", parser=number(int), metavar="N")] = 0,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda")] = "cpu",
    json_path: JsonOption = None,
) -> None:
    """Compare the routing kernels with one another and with the reference, bit for bit; exit 1 on a mismatch."""
    from warmset.measure import parity as harness
    from warmset.prepare import resolve_device

    if not 1 <= cases <= MAX_CASES:
        raise WarmsetError(f"--cases must be 1 to {MAX_CASES:,}. Got {cases}.")
    if not 0 <= seed < 2**31:
        raise WarmsetError(f"--seed must be 0 to 2**31 - 1. Got {seed}.")
    if device not in ("cpu", "cuda"):
        raise WarmsetError(f"--device must be cpu or cuda. Got {device!r}.")
    resolve_device(device)
    check_writable(json_path)
    report = harness.run(cases, seed, device)
    if json_path != "-":
        typer.echo("\n".join(report.lines()))
    emit_json({**vars(report), "ok": report.ok}, json_path)
    if not report.ok:
        raise typer.Exit(1)

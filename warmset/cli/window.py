"""`warmset bench window` and `warmset stages`: how long a decode window takes, and where its time goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from warmset.errors import WarmsetError

from .bench import bench
from .common import JsonOption, app, check_writable, emit_json, number, parse_list, show_table

WITH_TRACE = ("--slots", "--route-resident", "--route-kernel")


@bench.command("window")
def bench_window(
    part: Annotated[
        str, typer.Option("--part", help="all: whole windows; experts: the expert part alone.")
    ] = "all",
    shape: Annotated[
        str,
        typer.Option("--shape", metavar="NAME", help="qwen3-next-80b or qwen4-exp-125b; tiny to rehearse."),
    ] = "qwen3-next-80b",
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="N,N", help="Rows of a window (1,4,8; with --trace 4).")
    ] = None,
    cold_experts: Annotated[
        str | None,
        typer.Option("--cold-experts", metavar="X,X", help="Cold experts a layer, spread evenly."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Picks of a routing trace: off, and on by two kernels."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", parser=number(int), metavar="N", help="With --trace (8083).")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--route-resident", parser=number(float), metavar="MARGIN", help="With --trace (0.25)."),
    ] = None,
    route_kernel: Annotated[
        str | None,
        typer.Option(
            "--route-kernel",
            metavar="fused|warp|serial",
            help="With --trace: one leg by these kernels instead of three; off without --route-resident.",
        ),
    ] = None,
    tiles: Annotated[
        str | None, typer.Option("--tiles", metavar="NAME", help="Block sizes, with --part experts.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget-sec",
            parser=number(float),
            metavar="S",
            help="No part begins later (230); with --part all.",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """A decode window at the shape of a large model, beside its floors; exit 1 when a part failed."""
    from warmset.config import require
    from warmset.prepare import resolve_device

    check_writable(json_path)
    require(part in ("all", "experts"), "--part", "all or experts", part)
    given = {"--trace": trace, "--slots": slots, "--route-resident": margin, "--tiles": tiles}
    given |= {"--route-kernel": route_kernel, "--budget-sec": budget}
    allowed = {"--tiles"} if part == "experts" else set(given) - {"--tiles"}
    for name, value in given.items():
        if value is not None and name not in allowed:
            raise WarmsetError(f"{name} is not for --part {part}.")
        if value is not None and name in WITH_TRACE and trace is None:
            raise WarmsetError(f"{name} needs --trace.")
    if trace is not None and cold_experts is not None:
        raise WarmsetError("--cold-experts and --trace exclude each other: a trace has its own.")
    chosen = resolve_device(device)
    if chosen.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise WarmsetError(
            "bench window needs a CUDA device: on a CPU it only rehearses, with TRITON_INTERPRET=1."
        )
    numbers = parse_list("--rows", rows or ("1,4,8" if trace is None else "4"), int)
    if part == "experts":
        from warmset.measure.window import run_bench, save_record, window_table

        colds = parse_list("--cold-experts", cold_experts or "0.63,1.87", float)
        found = run_bench(shape, numbers, colds, chosen, tiles)
        table = window_table(found["results"])
        name = "window-experts"
    else:
        from warmset.measure.whole_legs import run_whole
        from warmset.measure.whole_request import Request
        from warmset.measure.window import save_record
        from warmset.measure.window_tables import whole_table

        colds = parse_list("--cold-experts", cold_experts or "0,0.63,1.87", float)
        more: dict[str, Any] = {"slots": slots, "margin": margin, "route_kernel": route_kernel}
        more["budget_sec"] = budget
        more = {key: value for key, value in more.items() if value is not None}
        request = Request(shape=shape, rows=numbers, colds=colds, trace=trace, **more)
        found = run_whole(request, chosen)
        table = whole_table(found["results"])
        name = f"window-{shape}" if trace is None else f"window-trace-{shape}"
    if json_path == "-":
        emit_json(found, json_path)
    elif json_path is not None:
        save_record(Path(json_path), found, name)
    if json_path != "-":
        show_table(table)
    if found["failed"]:
        typer.echo(f"warmset: failed: {', '.join(found['failed'])}.", err=True)
        raise typer.Exit(1)


@bench.command("decode")
def bench_decode(
    windows: Annotated[str, typer.Option("--windows", metavar="N,N", help="Rows of a window.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option("--tokens", parser=number(int), metavar="N")] = 96,
    rounds: Annotated[int, typer.Option("--rounds", parser=number(int), metavar="N")] = 3,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """The embedded model against transformers' own generate, everything resident: ratios in one run."""
    from warmset.config import require
    from warmset.measure.decode import run_decode
    from warmset.measure.record import make_record
    from warmset.measure.window_tables import decode_table
    from warmset.prepare import resolve_device

    check_writable(json_path)
    require(1 <= rounds <= 100, "--rounds", "1 to 100", rounds)
    found = run_decode(parse_list("--windows", windows, int), tokens, rounds, resolve_device(device))
    if json_path != "-":
        show_table(decode_table(found["results"]))
    if json_path is not None:
        emit_json(
            make_record(name=f"decode-{found['config']['device'][:4]}", tests="green", **found), json_path
        )


@app.command()
def stages(
    legs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LEG.json...", help="Answers of `generate --json`, or a record of `bench window`."
        ),
    ],
    json_path: JsonOption = None,
) -> None:
    """Up to three legs' stage tables side by side, in ms a window."""
    from warmset.measure.window_tables import legs_table, read_legs

    check_writable(json_path)
    found = read_legs(legs)
    if json_path != "-":
        show_table(legs_table(found))
    emit_json({"legs": found}, json_path)

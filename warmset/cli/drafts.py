"""`warmset bench drafts`: acceptance by depth and what windows of several rows take."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .common import JsonOption, check_writable, emit_json, number, parse_list, show_table


@bench.command("drafts")
def bench_drafts(
    windows: Annotated[str, typer.Option("--windows", metavar="N,N", help="Rows of a window.")] = "1,2,4,8",
    prompts: Annotated[
        int, typer.Option("--prompts", parser=number(int), metavar="N", help="Of prose, and as many of code.")
    ] = 4,
    tokens: Annotated[int, typer.Option("--tokens", parser=number(int), metavar="N")] = 48,
    slots: Annotated[str, typer.Option("--slots", metavar="N|33%|all")] = "33%",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """The embedded model on held-out prompts: drafts that are right by depth, ms a window, the share of commit."""
    from warmset.measure.drafts import drafts_table, run_drafts
    from warmset.measure.record import make_record

    check_writable(json_path)
    found = run_drafts(parse_list("--windows", windows, int), prompts, tokens, slots, device)
    if json_path != "-":
        show_table(drafts_table(found["results"]))
    if json_path is not None:
        name = f"drafts-{found['config']['device'][:4]}"
        emit_json(make_record(name=name, tests="green", **found), json_path)

"""`warmset bench machine`: what this machine gives, measured apart from any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmset.config import require

from .bench import bench
from .common import JsonOption, check_writable, emit_json, number, show_table

SHARE_BAR = 0.8


@bench.command("machine")
def bench_machine(
    part: Annotated[str, typer.Option("--part", help="disk: reading experts from files.")] = "disk",
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where the file that is read is written.")
    ] = Path(),
    size: Annotated[
        int, typer.Option("--size", parser=number(int), metavar="MIB", help="How large that file is.")
    ] = 2048,
    rounds: Annotated[
        int,
        typer.Option("--rounds", parser=number(int), metavar="N", help="How often each way has its turn."),
    ] = 9,
    json_path: JsonOption = None,
) -> None:
    """The disk tier beside a bare O_DIRECT reader; exit 1 where it is below 80% of it."""
    from warmset.measure import disk, disk_table

    check_writable(json_path)
    require(part == "disk", "--part", "disk", part)
    require(folder.is_dir(), "--folder", "a folder", str(folder))
    require(64 <= size <= 1 << 20, "--size", "64 to 1,048,576 MiB", size)
    require(1 <= rounds <= 1000, "--rounds", "1 to 1000", rounds)
    record = disk.run_bench(disk.EXPERT_MIB, size, rounds, folder)
    if json_path != "-":
        show_table(disk_table.table(record["results"]))
    emit_json(record, json_path)
    if min(found["stream"]["share_of_bare"] for found in record["results"].values()) < SHARE_BAR:
        raise typer.Exit(1)

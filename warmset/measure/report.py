"""Figures as tables for people: plain `rich` tables, widths that fit a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from warmset.measure.bars import BarResult
from warmset.stages import STAGES


def number(value: Any, digits: int = 2) -> str:
    """A figure for a cell: '-' where it is unknown."""
    if value is None:
        return "-"
    return (
        f"{value:,.{digits}f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def plain_table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the house form: the first column to the left, figures to the right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def compare_runs(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> Table:
    """Answers side by side: one column a run, then the stages in ms a window."""
    table = plain_table("", *names)
    rows = [
        ("cold experts a layer-window", "cold_experts_per_layer_window", 2),
        ("hit rate", "hit_rate", 3),
        ("bytes from the slow tier", "bytes_slow", 0),
        ("ms a window", "ms_per_window", 2),
        ("tokens a second (decode)", "tokens_per_sec", 1),
    ]
    for label, key, digits in rows:
        table.add_row(label, *(number(run[key], digits) for run in runs))
    for label, key in (
        ("swaps", "swaps"),
        ("cold picks before", "cold_before"),
        ("cold picks after", "cold_after"),
    ):
        table.add_row(label, *(number(run["routing"][key]) for run in runs))
    add_stages(table, [run["stages"] for run in runs])
    return table


def add_stages(table: Table, stages: Sequence[dict[str, float] | None]) -> None:
    """The stage rows, ms a window; stages that took nothing in any run are left out."""
    if not any(stages):
        return
    table.add_section()
    table.add_row("stage, ms a window", *("" for _ in stages), style="dim")
    for name in (*STAGES, "total"):
        values = [None if run is None else run[name] for run in stages]
        if any(value for value in values):
            table.add_row(f"  {name}", *(number(value) for value in values))


def stage_table(stages: dict[str, float]) -> Table:
    """One run's stages with their share of the window."""
    table = plain_table("stage", "ms a window", "share")
    for name in STAGES:
        if stages[name]:
            table.add_row(name, number(stages[name]), f"{stages[name] / stages['total']:.1%}")
    table.add_section()
    table.add_row("total", number(stages["total"]), "")
    return table


def bars_table(results: Sequence[BarResult]) -> Table:
    table = plain_table("", "measured", "floor", "bar", "verdict")
    for result in results:
        table.add_row(
            escape(result.name),
            number(result.measured, 3),
            number(result.floor, 3),
            result.bar,
            result.verdict,
        )
    return table


def key_values(values: dict[str, Any]) -> Table:
    """One figure a line."""
    table = plain_table("", "")
    table.show_header = False
    for key, value in values.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        table.add_row(key, number(value, 1 if isinstance(value, float) and abs(value) >= 100 else 3))
    return table


def show(table: Table, *, stderr: bool = False) -> None:
    """Print a table, at most 100 columns wide where the stream is no terminal."""
    console = Console(stderr=stderr)
    (console if console.is_terminal else Console(width=100, stderr=stderr)).print(table)

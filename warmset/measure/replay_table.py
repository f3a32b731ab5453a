"""Replays as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from warmset.measure.replay import Rates
from warmset.measure.replay_check import MOST_POINTS, MOST_RATIO, SETTLING_TOKENS, SHARE
from warmset.measure.report import number


def replay_tables(runs: Sequence[dict[str, Any]]) -> list[Table]:
    """A table for each policy, one line a replay, which fits a terminal of 80 columns; MB is 10**6 bytes a window."""
    tables: dict[str, Table] = {}
    for run in runs:
        if run["policy"] not in tables:
            tables[run["policy"]] = _empty_table(run["policy"])
        tables[run["policy"]].add_row(run["admission"], number(run["slots"]), *_cells(run))
    return list(tables.values())


def _empty_table(policy: str) -> Table:
    table = Table(title=policy, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("admission")
    for name in ("slots", "hits", "cold", "swaps", "MB cold", "MB moved", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(run: dict[str, Any]) -> list[str]:
    if run["unknown"]:
        return ["unknown"] * 6
    windows = run["windows"]
    return [
        number(run["hit_rate"], 3),
        number(run["cold_experts_per_layer_window"]),
        number(run["routing"]["swaps"]),
        number(run["bytes_slow"] / windows / 1e6, 1),
        number(run["bytes_moved"] / windows / 1e6, 1),
        number(run["ms_per_window"]),
    ]


def rates_line(rates: Rates, expert_bytes: int) -> str:
    return (
        f"Predicted at {rates.fast_gbs:g} GB/s fast memory, {rates.cold_gbs:g} GB/s cold experts, "
        f"{rates.copy_gbs:g} GB/s copies, {expert_bytes:,} bytes an expert, {rates.layer_bytes:,} bytes of all else "
        "a layer. Cold experts are of a layer and window, MB and ms of a window; ms are medians."
    )


def blocks_table(blocks: Sequence[dict[str, Any]]) -> Table:
    """Hit rates along the text, by hundreds of tokens from the switch on."""
    names = [name for name in blocks[0] if name != "tokens"]
    table = Table("tokens after the switch", *names, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for block in blocks:
        table.add_row(number(block["tokens"]), *(f"{block[name]:.3f}" for name in names))
    return table


def check_lines(results: dict[str, Any]) -> list[str]:
    """What `--check` judged, one sentence each."""
    points, worst = results["points_below_learned"], results["worst_at"]
    side = "below" if points > 0 else "above"
    return [
        f"From {SETTLING_TOKENS} tokens after the switch on, with {SHARE:.0%} resident: hit rate "
        f"{results['hit_rate_lfu']:.3f} with lfu, {results['hit_rate_off']:.3f} off, "
        f"{results['hit_rate_learned_shipped']:.3f} and {results['hit_rate_learned_cross_fitted']:.3f} with the "
        f"profile of code that ships and one of these rows' neighbours.",
        f"lfu is {abs(points):.1f} points {side} the better of the two; the bar is {MOST_POINTS:g} below.",
        f"Predicted ms a window, lfu over off, {results['ratios']} cases: {results['mean_ms_ratio']:.3f} in the mean, "
        f"{worst['ratio']:.3f} at worst ({worst['share']:.0%}, {worst['text']}, slots filled by {worst['start']}); "
        f"the bar is {MOST_RATIO:g}.",
        "ok" if results["ok"] else "missed",
    ]

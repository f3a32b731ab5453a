"""The table of `bench machine --part disk`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

WAYS = ("bare", "stream", "layers")


def table(results: dict[str, Any]) -> Table:
    """One row for each size of experts and way to read them."""
    shown = Table(title="reading experts from disk, page cache dropped")
    for name in ("experts", "way", "GB/s", "from - to", "of bare", "CPU s a GB"):
        shown.add_column(name, justify="left" if name in ("experts", "way") else "right")
    for case, found in results.items():
        for way in WAYS:
            figures = found[way]
            low, high = figures["gb_per_sec_range"]
            shown.add_row(
                f"{case.removeprefix('experts of ')}, {found['mode']}" if way == "bare" else "",
                way,
                f"{figures['gb_per_sec']:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{figures['share_of_bare']:.0%}",
                f"{figures['cpu_sec_per_gb']:.2f}",
            )
    return shown

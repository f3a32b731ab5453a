"""The paired differences as a picture: one mark a pair, by order, with the estimate and its interval."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from warmset.errors import WarmsetError
from warmset.measure.ab.analysis import primary_of
from warmset.measure.ab.report import effect_text

ENDINGS = (".png", ".svg", ".pdf")
FIRST = {"a": ("A first", "o", "#0b5fa5"), "b": ("B first", "s", "#c4561a")}


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before the work: WarmsetError names the ending or the missing library."""
    if path.suffix.lower() not in ENDINGS:
        raise WarmsetError(f"--plot must end in {', '.join(ENDINGS)}. Got {path.name!r}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise WarmsetError("--plot needs matplotlib: pip install 'warmset[plot]'.")


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the picture; its form is the file's ending. Marks differ in shape as well, for print without colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    results, primary = record["results"], primary_of(record["config"])
    summary = results["metrics"][primary.key]
    if summary is None:
        raise WarmsetError("--plot needs at least one complete pair.")
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(0, color="0.3", linewidth=0.8)
    if summary["low"] is not None:
        axes.axhspan(summary["low"], summary["high"], color="0.88", zorder=0)
    axes.axhline(summary["estimate"], color="0.45", linestyle="--", linewidth=1)
    for first, (label, marker, color) in FIRST.items():
        pairs = [
            pair
            for pair in results["pairs"]
            if pair["first"] == first and pair["difference"][primary.key] is not None
        ]
        if pairs:
            values = [primary.shown(pair["difference"][primary.key]) for pair in pairs]
            numbers = [pair["pair"] + 1 for pair in pairs]
            axes.plot(numbers, values, marker, color=color, label=label, markersize=7, markerfacecolor="none")
    axes.set_xlabel("pair")
    axes.set_ylabel(f"{primary.label},\nB against A, percent")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.set_title(f"{results['verdict']['word']}: {effect_text(summary)}", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=150)
    path.write_bytes(buffer.getvalue())

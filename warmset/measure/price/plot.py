"""One picture: bytes of cold experts a token against excess KL, policy by policy; readable in black and white."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.measure.price.summary import pareto

MARKERS = "osD^v<>Ph*X"
FLOOR = 1e-6
"""The least excess KL that the logarithmic axis ever shows, in nats."""


def check_plot_path(path: str | Path) -> None:
    """Refuse a name that is neither .png nor .svg, and any where matplotlib is not installed."""
    if Path(path).suffix not in (".png", ".svg"):
        raise WarmsetError(f"--plot must be a .png or .svg file. Got {shown(str(path))}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise WarmsetError('--plot needs matplotlib: pip install "warmset[plot]".')


def plot_policies(sweep: dict[str, Any], path: str | Path) -> None:
    """Draw `sweep` (families of points, the exact curve) as PNG or SVG, written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "warmset", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.8))
        foot = _foot(sweep["families"])
        _draw_families(axes, sweep["families"], foot)
        exact = sweep["exact"]
        axes.plot(
            [point["bytes_per_token"] / 1e3 for point in exact],
            [foot * 1.3] * len(exact),
            color="black",
            linestyle=":",
            marker="|",
            label="more slots, exact routing",
        )
        for point in exact:
            axes.annotate(
                f"{point['share']:.0%}",
                (point["bytes_per_token"] / 1e3, foot * 1.3),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
                fontsize=7,
            )
        axes.set_yscale("log")
        axes.set_ylim(bottom=foot)
        axes.set_xlim(left=0)
        axes.set_xlabel("cold experts, kB a token")
        axes.set_ylabel("excess KL over the rounding null, nats (exact routing at the foot)")
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.legend(fontsize=7, ncols=2, frameon=False)
        figure.tight_layout()
        save_figure(figure, Path(path))
        pyplot.close(figure)


def plot_budget(budget: dict[str, Any], path: str | Path) -> None:
    """Draw bytes saved against excess KL as the search measured them: one margin for all layers, one for each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = {"one margin for all layers": "single", "one for each layer": "by_layer"}
    with pyplot.rc_context({"svg.hashsalt": "warmset", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for number, (label, side) in enumerate(sides.items()):
            points = sorted(budget[side]["on_calibration"], key=lambda point: point["excess_kl"])
            axes.plot(
                [point["excess_kl"] for point in points],
                [100 * point["bytes_saved"] for point in points],
                color=("0.5", "black")[number],
                marker=MARKERS[number],
                linestyle=("--", "-")[number],
                linewidth=1,
                label=f"{label}, calibration text",
            )
            found = budget[side]["on_text"]
            low, high = found["excess_kl_interval"]
            axes.errorbar(
                [found["excess_kl"]],
                [100 * found["bytes_saved"]],
                xerr=[[found["excess_kl"] - low], [high - found["excess_kl"]]],
                color=("0.5", "black")[number],
                marker=MARKERS[number],
                markerfacecolor="white",
                markersize=8,
                linestyle="none",
                capsize=2,
                label="the margins chosen, price text",
            )
        for layer, curve in enumerate(budget["each_layer_alone"]):
            axes.plot(
                [0.0, *(step["excess_kl"] for step in curve)],
                [0.0, *(100 * step["bytes_saved"] for step in curve)],
                color="0.75",
                linewidth=0.8,
                zorder=0,
                label="that layer alone, calibration text" if layer == 0 else None,
            )
            axes.annotate(
                str(layer),
                (curve[-1]["excess_kl"], 100 * curve[-1]["bytes_saved"]),
                textcoords="offset points",
                xytext=(0, 3),
                ha="center",
                fontsize=7,
                color="0.4",
            )
        axes.axvline(budget["budget_kl"], color="0.3", linewidth=0.7, linestyle=":", label="budget")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("excess KL, nats")
        axes.set_ylabel("bytes of cold experts saved, %")
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.legend(frameon=False, fontsize=7)
        figure.tight_layout()
        save_figure(figure, Path(path))
        pyplot.close(figure)


def _foot(families: dict[str, list[dict[str, Any]]]) -> float:
    """Where the axis ends: well below every policy that has a KL; exact routing is drawn there."""
    least = min((p["excess_kl"] for ps in families.values() for p in ps if p["excess_kl"] > 0), default=FLOOR)
    return max(FLOOR, least / 4)


def _draw_families(axes: Any, families: dict[str, list[dict[str, Any]]], foot: float) -> None:
    every = [point for points in families.values() for point in points]
    for number, (family, points) in enumerate(families.items()):
        shade = str(0.65 * number / max(1, len(families) - 1))
        x = [point["bytes_per_token"] / 1e3 for point in points]
        y = [max(foot, point["excess_kl"]) for point in points]
        bounds = [
            point["excess_kl_interval"] or [value, value] for point, value in zip(points, y, strict=True)
        ]
        low = [max(0.0, value - max(foot, bound[0])) for value, bound in zip(y, bounds, strict=True)]
        high = [max(0.0, bound[1] - value) for value, bound in zip(y, bounds, strict=True)]
        axes.errorbar(
            x,
            y,
            yerr=[low, high],
            color=shade,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linewidth=0.9,
            linestyle=("-", "--", "-.", ":")[number % 4],
            capsize=2,
            label=family,
        )
    front = [every[index] for index in pareto([(p["bytes_per_token"], p["excess_kl"]) for p in every])]
    axes.plot(
        [point["bytes_per_token"] / 1e3 for point in front],
        [max(foot, point["excess_kl"]) for point in front],
        color="0.8",
        linewidth=5,
        zorder=0,
        label="Pareto front",
    )


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as its suffix says, without a date, whole or not at all."""
    import os

    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(temporary, dpi=160, metadata=metadata, format=path.suffix[1:])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

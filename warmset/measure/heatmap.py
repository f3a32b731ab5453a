"""A profile as a map of layers by experts: in the terminal, as PNG or SVG, and in figures.

Each cell is the share of its layer's picks that its experts got, against the even share 1/E; so layers compare.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from warmset.profile import Profile

SHADES = " ·░▒▓█"
"""Of cells from under half the even share to over eight times it, doubling."""
COLOURS = ("grey23", "blue", "cyan", "green", "yellow", "red")
FIRST_STEP = 0.5
SHARES = (0.16, 0.33)
DEFAULT_WIDTH = 48
"""Cells of a layer: with the figures beside them a line has 80 columns at most."""


def loads_LE(profile: Profile, *, ranked: bool) -> np.ndarray:
    """float64 [L, E]: picks of each expert over its layer's mean; 1 is an even share. ranked: busiest first."""
    mean_L1 = profile.counts_LE.mean(axis=1, keepdims=True)
    loads = profile.counts_LE / np.where(mean_L1 > 0, mean_L1, 1.0)
    return -np.sort(-loads, axis=1) if ranked else loads


def layer_figures(profile: Profile) -> list[dict[str, Any]]:
    """For each layer: picks, the share of them that the busiest 16% and 33% of experts get, experts never picked."""
    found = []
    for layer, counts_E in enumerate(-np.sort(-profile.counts_LE, axis=1)):
        total = float(counts_E.sum())
        shares = {
            f"busiest_{share:.0%}": (
                float(counts_E[: round(share * len(counts_E))].sum()) / total if total else None
            )
            for share in SHARES
        }
        never = int((counts_E == 0).sum())
        found.append({"layer": layer, "picks": total, **shares, "never_picked": never})
    return found


def heat_table(profile: Profile, *, ranked: bool = False, width: int = DEFAULT_WIDTH) -> Table:
    """One line a layer; a cell is the mean of neighbouring experts (or ranks)."""
    loads = loads_LE(profile, ranked=ranked)
    num_experts = loads.shape[1]
    cells = min(width, num_experts)
    order = "from the busiest to the least" if ranked else f"0 to {num_experts - 1}"
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column(f"experts, {order}", no_wrap=True)
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    table.add_column("never", justify="right", no_wrap=True)
    for figures, load_E in zip(layer_figures(profile), loads, strict=True):
        line = Text()
        for part in np.array_split(load_E, cells):
            step = _step(float(part.mean()))
            line.append(SHADES[step], style=COLOURS[step])
        shares = [figures[f"busiest_{share:.0%}"] for share in SHARES]
        table.add_row(
            str(figures["layer"]),
            line,
            *("-" if share is None else f"{share:.1%}" for share in shares),
            str(figures["never_picked"]),
        )
    return table


def legend() -> str:
    bounds = [FIRST_STEP * 2**power for power in range(len(SHADES) - 1)]
    steps = [f"'{SHADES[0]}' under {bounds[0]:g}"]
    steps += [f"'{shade}' from {bound:g}" for shade, bound in zip(SHADES[1:], bounds, strict=True)]
    shares = " and ".join(f"{share:.0%}" for share in SHARES)
    return (
        f"Of the even share of picks: {', '.join(steps)}.\n"
        f"{shares}: what the busiest experts, so many of them, get of a layer's picks; never: experts without a pick."
    )


def _step(load: float) -> int:
    return sum(load >= FIRST_STEP * 2**power for power in range(len(SHADES) - 1))


def plot_heat(profile: Profile, path: str | Path, *, ranked: bool = False) -> None:
    """The same as PNG or SVG, with a logarithmic scale of colours; written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    loads = loads_LE(profile, ranked=ranked)
    num_layers, num_experts = loads.shape
    with pyplot.rc_context({"svg.hashsalt": "warmset", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(8.0, 1.3 + min(8.0, 0.35 * num_layers)), layout="constrained")
        scale = colors.LogNorm(vmin=1 / 16, vmax=16, clip=True)
        image = axes.imshow(
            np.maximum(loads, 1e-9), aspect="auto", cmap="viridis", norm=scale, interpolation="nearest"
        )
        axes.set_xlabel("experts, the busiest first" if ranked else "expert")
        axes.set_ylabel("layer")
        axes.set_yticks(range(0, num_layers, max(1, num_layers // 12)))
        bar = figure.colorbar(image, ax=axes, ticks=[1 / 16, 1 / 4, 1, 4, 16])
        bar.ax.set_yticklabels(["1/16", "1/4", "1", "4", "16"])
        bar.set_label("picks over an even share")
        title = profile.identity.model or Path(profile.source).name
        axes.set_title(f"{title}: {num_layers} layers of {num_experts} experts, {profile.rows:,.0f} rows")
        _save(figure, Path(path))
        pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(temporary, dpi=160, metadata=metadata, format=path.suffix[1:])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""The figures of a price as tables for people and as Markdown: one column a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

UNKNOWN = "-"


def price_rows(off: dict[str, Any], arms: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Label, then a cell for off and each policy; intervals of 95% after the figures that have one."""
    every = [off, *arms]

    def row(label: str, *cells: str) -> list[str]:
        return [label, *cells]

    return [
        row("argmax as off", *(_share(arm["argmax_same"]) for arm in every)),
        row("KL, nats", *(_kl(arm["kl"]) for arm in every)),
        row("  excess over the null", UNKNOWN, *(_kl(arm["excess_kl"]) for arm in arms)),
        row("  its interval", UNKNOWN, *(_between(arm["excess_kl_interval"], _kl) for arm in arms)),
        row("  rounding null", UNKNOWN, *(_kl((arm["null"] or {}).get("kl")) for arm in arms)),
        row("  lower bound, top 64", *(_kl(arm["kl_top64"]) for arm in every)),
        row("  99% of positions under", *(_kl(arm["kl_p99"]) for arm in every)),
        row("  random swaps instead", UNKNOWN, *(_kl((arm["random_swaps"] or {}).get("kl")) for arm in arms)),
        row("loss, nats", *(f"{arm['loss']:.4f}" for arm in every)),
        row("  change", UNKNOWN, *(_signed(arm["loss_change"]) for arm in arms)),
        row("  its interval", UNKNOWN, *(_between(arm["loss_change_interval"], _signed) for arm in arms)),
        row("perplexity", *(f"{arm['perplexity']:.3f}" for arm in every)),
        row("swaps", *(f"{arm['swaps']:,}" for arm in every)),
        row("cold experts a layer-window", *(f"{arm['cold_experts_per_layer_window']:.2f}" for arm in every)),
        row("kB of cold experts a token", *(f"{arm['bytes_per_token'] / 1e3:.1f}" for arm in every)),
        row("verdict", UNKNOWN, *(arm["verdict"] for arm in arms)),
    ]


def price_table(off: dict[str, Any], arms: Sequence[dict[str, Any]]) -> Table:
    return _table(["", "off", *(short(arm["policy"]) for arm in arms)], price_rows(off, arms))


def split_table(arms: Sequence[dict[str, Any]], key: str, label: str) -> Table:
    """KL and change of loss by kind of text or by place, one row a part."""
    return _table(*split_rows(arms, key, label))


def split_rows(arms: Sequence[dict[str, Any]], key: str, label: str) -> tuple[list[str], list[list[str]]]:
    header = [label, "scored"]
    for arm in arms:
        header += [f"KL {short(arm['policy'])}", "loss change"]
    rows = []
    for part in arms[0][key]:
        cells = [part, f"{arms[0][key][part]['positions']:,}"]
        for arm in arms:
            cells += [_kl(arm[key][part]["kl"]), _signed(arm[key][part]["loss_change"])]
        rows.append(cells)
    return header, rows


def sweep_table(sweep: dict[str, Any]) -> Table:
    """Every policy of a sweep, one row each."""
    return _table(*sweep_rows(sweep))


def sweep_rows(sweep: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            point["policy"],
            f"{point['bytes_per_token'] / 1e3:.1f}",
            _kl(point["excess_kl"]),
            _between(point["excess_kl_interval"], _kl),
            _share(point["argmax_same"]),
            _signed(point["loss_change"]),
        ]
        for points in sweep["families"].values()
        for point in points
    ]
    return ["policy", "kB a token", "excess KL", "interval", "argmax", "loss change"], rows


def free_table(free: Sequence[dict[str, Any]]) -> Table:
    """What became of free answers, one row a policy."""
    return _table(*free_rows(free))


def free_rows(free: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            short(entry["policy"]),
            f"{entry['same']} of {entry['prompts']}",
            f"{entry['parts_at_median']:.0f}",
            f"{entry['loss_off']:.3f}",
            f"{entry['loss']:.3f}",
            _signed(entry["loss_change"]),
            _between(entry["loss_change_interval"], _signed),
        ]
        for entry in free
    ]
    return ["answers with", "same", "part at", "loss of off's", "loss", "change", "interval"], rows


def speed_table(legs: dict[str, dict[str, Any]], prices: dict[str, dict[str, Any]]) -> Table:
    """Gain and price by margin and ranks, one row a leg."""
    return _table(*speed_rows(legs, prices))


def speed_rows(
    legs: dict[str, dict[str, Any]], prices: dict[str, dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """legs: of `speed.run_speed`, off first; prices: leg -> figures of a price, where it was measured."""
    rows = []
    for name, leg in legs.items():
        arm = prices.get(name)
        unknown = "0" if name == "off" else UNKNOWN
        rows.append(
            [
                "off" if name == "off" else str(leg["margin"]),
                UNKNOWN if leg["ranks"] is None else f"{leg['ranks'][0]}-{leg['ranks'][1]}",
                _share(arm["argmax_same"]) if arm else "100.0%" if name == "off" else UNKNOWN,
                _kl(arm["kl"]) if arm else unknown,
                _kl(arm["excess_kl"]) if arm else unknown,
                _signed(arm["loss_change"]) if arm else unknown,
                f"{leg['cold_experts']:.2f}",
                UNKNOWN if leg["cold_wait_ms"] is None else f"{leg['cold_wait_ms']:.2f}",
                f"{leg['ms']:.2f}",
                f"{leg['tokens_per_sec']:.1f}",
            ]
        )
    header = [
        *("margin", "ranks", "argmax as off", "KL, nats", "excess", "loss change"),
        *("cold experts a layer", "cold wait, ms", "window, ms", "tokens a second"),
    ]
    return header, rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines) + "\n"


def short(policy: str) -> str:
    """`margin 0.25` for `margin:margin=0.25`; other policies as they are."""
    name, _, rest = policy.partition(":")
    key, _, value = rest.partition("=")
    return f"margin {value}" if name == "margin" and key == "margin" and "," not in value else policy


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def _share(value: float) -> str:
    return f"{value:.1%}"


def _kl(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.7f}" if 0 < abs(value) < 1e-4 else f"{value:.5f}"


def _signed(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:+.4f}"


def _between(interval: Sequence[float] | None, form: Any) -> str:
    return UNKNOWN if interval is None else f"{form(interval[0])} to {form(interval[1])}"

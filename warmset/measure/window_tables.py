"""Tables of `bench window`, and legs side by side as `warmset stages` shows them.

A leg is one object: name, ms a window, cold experts a layer-window, and its stages. It comes from an answer
(`generate --stages --json`), or from a record of `bench window --trace`, which holds three.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group

from warmset.errors import WarmsetError
from warmset.measure.report import number, plain_table
from warmset.stages import STAGES

MOST_LEGS = 3


def whole_table(results: dict[str, Any]) -> Any:
    """A table for each number of rows, one column a window that was measured: ms, floors, what it read, stages."""
    tables = []
    for part, windows in results.items():
        found = {
            _column(part, name): values
            for name, values in _items(windows)
            if isinstance(values, dict) and "stages" in values
        }
        if found:
            tables.append(_rows_table(found, _items(windows.get("compared"))))
    return Group(*tables)


def _rows_table(found: dict[str, Any], compared: list[tuple[str, Any]]) -> Any:
    table = plain_table("", *found)
    keys = {
        "window, ms": "ms",
        "  least": "least_ms",
        "  most": "most_ms",
        "floor_sum": "floor_sum_ms",
        "floor_overlap": "floor_overlap_ms",
        "floor_chain": "floor_chain_ms",
    }
    for label, key in keys.items():
        table.add_row(label, *(number(values[key]) for values in found.values()))
    table.add_row("x floor_chain", *(number(v["ms"] / v["floor_chain_ms"]) for v in found.values()))
    table.add_row("experts a layer", *(number(values["distinct_experts"]) for values in found.values()))
    table.add_row("  cold", *(number(values["cold_experts"]) for values in found.values()))
    for stage in STAGES:
        ms = [values["stages"]["stages"].get(stage) for values in found.values()]
        if any(value is not None for value in ms):
            table.add_row(stage, *(number(value) for value in ms))
    for label, key in (
        ("sum of stages", "sum_ms"),
        ("with stamps", "total_ms"),
        ("stamps' cost", "stamps_ms"),
    ):
        table.add_row(label, *(number(values["stages"][key]) for values in found.values()))
    for key, value in compared:
        table.add_row(key, number(value, 3))
    return table


def _column(part: str, name: str) -> str:
    """`t4`, `cold0_63` -> `4/0.63`: rows and cold experts; legs keep their names."""
    rows = part.removeprefix("trace_").removeprefix("t")
    return (
        f"{rows}/{name.removeprefix('cold').replace('_', '.')}"
        if name.startswith("cold")
        else f"{rows} {name}"
    )


def decode_table(results: dict[str, Any]) -> Any:
    """One line an arm of `bench decode`."""
    table = plain_table("", "tokens a second", "least", "most", "x transformers", "tokens a window")
    for name, found in results.items():
        table.add_row(
            name,
            *(number(found[key], 1) for key in ("tokens_per_sec", "least", "most")),
            number(found["over_transformers"]),
            number(found.get("accepted_per_window")),
        )
    return table


def read_legs(paths: list[Path]) -> list[dict[str, Any]]:
    """The legs of all files, in order; WarmsetError where there are none or more than three."""
    legs = [leg for path in paths for leg in _legs_of(path)]
    if not 1 <= len(legs) <= MOST_LEGS:
        raise WarmsetError(f"There must be 1 to {MOST_LEGS} legs in all. Got {len(legs)}.")
    return legs


def _legs_of(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WarmsetError(f"{path} is not there.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WarmsetError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise WarmsetError(f"{path} is no answer and no record.")
    if isinstance(value.get("stages"), dict):
        return [_answer_leg(path, value)]
    legs = [
        _bench_leg(f"{name} {part.removeprefix('trace_')}", found)
        for part, values in _items(value.get("results"))
        for name, found in _items(values)
        if isinstance(found, dict) and isinstance(found.get("stages"), dict)
    ]
    if not legs:
        raise WarmsetError(
            f"{path} has no stages: an answer needs --stages, a record is one of `bench window`."
        )
    return legs


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _answer_leg(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    routing = value.get("routing")
    policy = routing.get("policy") if isinstance(routing, dict) else None
    stages = {name: ms for name, ms in value["stages"].items() if name != "total"}
    return {
        "name": f"{path.stem}: {policy}" if policy else path.stem,
        "ms": value.get("ms_per_window"),
        "cold_experts": value.get("cold_experts_per_layer_window"),
        "stages": stages,
        "sum_ms": sum(stages.values()),
    }


def _bench_leg(name: str, found: dict[str, Any]) -> dict[str, Any]:
    table = found["stages"]
    return {
        "name": name,
        "ms": found.get("ms"),
        "cold_experts": found.get("cold_experts"),
        "stages": table["stages"],
        "sum_ms": table["sum_ms"],
        "stamps_ms": table["stamps_ms"],
    }


def legs_table(legs: list[dict[str, Any]]) -> Any:
    """One column a leg: the stages in ms a window, their sum, the window without stamps, cold experts."""
    table = plain_table("ms a window", *(leg["name"] for leg in legs))
    named = [stage for stage in STAGES if any(stage in leg["stages"] for leg in legs)]
    for stage in named:
        table.add_row(stage, *(number(leg["stages"].get(stage)) for leg in legs))
    table.add_row("sum of the stages", *(number(leg["sum_ms"]) for leg in legs))
    if any("stamps_ms" in leg for leg in legs):
        table.add_row("of it the stamps' own cost", *(number(leg.get("stamps_ms")) for leg in legs))
    table.add_row("window", *(number(leg["ms"]) for leg in legs))
    table.add_row("cold experts a layer-window", *(number(leg["cold_experts"]) for leg in legs))
    return table

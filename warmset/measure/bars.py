"""`results/bars.toml` against `results/*.json`: which promises the records keep.

A bar is a row:

    [[bar]]
    name = "route_fused at 8 rows, us a layer"
    file = "routing-kernels.json"     # in the folder of bars.toml
    key = "results.fused_t8_cold2_us" # dotted path into the record
    comparison = "<="                 # <=, <, >=, >, ==
    bar = 3.2
    minus_key = "results.exact_us"    # optional: what is judged is key less this
    floor_key = "results.empty_us"    # optional: shown beside it
    missed = "reason"                 # optional, after honest tries: printed as missed, does not fail

A record of a commit whose tests were red fails, whatever its figures.
"""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmset.errors import WarmsetError
from warmset.measure.record import read_record

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
REQUIRED = ("name", "file", "key", "comparison", "bar")
OPTIONAL = ("minus_key", "floor_key", "missed")


@dataclass(frozen=True, kw_only=True)
class BarResult:
    """One row of the answer. `verdict` is pass, missed (with a reason), miss or red."""

    name: str
    measured: Any
    floor: Any
    bar: str
    verdict: str
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.verdict in ("miss", "red")


def check_bars(bars_file: Path) -> list[BarResult]:
    """Every row of a bars file, judged; WarmsetError on a row that cannot be read."""
    try:
        rows = tomllib.loads(bars_file.read_text(encoding="utf-8")).get("bar", [])
    except FileNotFoundError:
        raise WarmsetError(f"{bars_file} is not there.") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no TOML, no UTF-8
        raise WarmsetError(f"{bars_file} cannot be read: {error}.") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise WarmsetError(f"{bars_file} must hold at least one [[bar]].")
    return [_judge(row, bars_file.parent, number) for number, row in enumerate(rows, start=1)]


def _judge(row: dict[str, Any], folder: Path, number: int) -> BarResult:
    unknown = set(row) - set(REQUIRED) - set(OPTIONAL)
    lacking = [key for key in REQUIRED if key not in row]
    if unknown or lacking or str(row["comparison"]) not in COMPARISONS:
        what = (
            f"lacks {lacking[0]}" if lacking else f"has {sorted(unknown)[0]}" if unknown else "compares badly"
        )
        raise WarmsetError(
            f"Bar {number} {what}: it needs {', '.join(REQUIRED)}, may have {', '.join(OPTIONAL)}."
        )
    texts = [key for key in (*REQUIRED[:4], *OPTIONAL) if key in row and not isinstance(row[key], str)]
    if texts or isinstance(row["bar"], bool) or not isinstance(row["bar"], int | float):
        raise WarmsetError(f"Bar {number}: {texts[0] if texts else 'bar'} has a value of the wrong type.")
    record = read_record(folder / row["file"])
    measured = _lookup(record, row["key"], row["file"])
    if "minus_key" in row:
        measured = round(measured - _lookup(record, row["minus_key"], row["file"]), 6)
    floor = _lookup(record, row["floor_key"], row["file"]) if "floor_key" in row else None
    verdict, why = "pass", ""
    if record.get("tests") != "green":
        verdict, why = "red", f"{row['file']} was made by a commit whose tests were {record.get('tests')}"
    elif not COMPARISONS[row["comparison"]](measured, row["bar"]):
        verdict, why = ("missed", row["missed"]) if row.get("missed") else ("miss", "")
    bar = f"{row['comparison']} {row['bar']}"
    return BarResult(name=row["name"], measured=measured, floor=floor, bar=bar, verdict=verdict, why=why)


def _lookup(record: dict[str, Any], key: str, file: str) -> Any:
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise WarmsetError(f"{file} has no {key}.")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise WarmsetError(f"{file} has no number at {key}.")
    return value

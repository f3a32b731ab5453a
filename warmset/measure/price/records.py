"""Figures of single positions as a file: JSON lines, or Parquet where pyarrow is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.measure.price.documents import ScoredText
from warmset.measure.price.measurement import Pass
from warmset.profile import write_atomically


def check_records_path(path: str | Path) -> None:
    """Refuse a name that is neither .jsonl nor .parquet, and Parquet where it cannot be written."""
    suffix = Path(path).suffix
    if suffix not in (".jsonl", ".parquet"):
        raise WarmsetError(f"records must be written to a .jsonl or .parquet file. Got {shown(str(path))}.")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise WarmsetError("records as Parquet need pyarrow, which is not installed: use a .jsonl file.")


def columns_of(text: ScoredText, name: str, off: Pass, arm: Pass, nulls: list[Pass]) -> dict[str, list[Any]]:
    """One list a column, one entry a position, in the order of the text."""
    of_N, routing = text.of_positions(), arm.routing
    kinds = text.kinds
    null_kl = np.mean([null.kl_N for null in nulls], axis=0) if nulls else None
    return {
        "policy": [name] * len(arm.loss_N),
        "document": of_N["document"].tolist(),
        "kind": [kinds[number] for number in of_N["kind"]],
        "place": of_N["place"].tolist(),
        "window": routing.window_N.tolist(),
        "token": of_N["token"].tolist(),
        "target": of_N["target"].tolist(),
        "loss_off": off.loss_N.tolist(),
        "loss": arm.loss_N.tolist(),
        "kl": arm.kl_N.tolist(),
        "kl_top64": arm.kl_top_N.tolist(),
        "kl_null": [None] * len(arm.loss_N) if null_kl is None else null_kl.tolist(),
        "argmax_same": arm.same_N.tolist(),
        "swaps": routing.swaps_N.tolist(),
        "dropped": routing.dropped_N.tolist(),
    }


def rows_of(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The same, one dictionary a position."""
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def write_records(path: str | Path, tables: list[dict[str, list[Any]]]) -> None:
    """All tables, one after the other, into a .jsonl or .parquet file, whole or not at all."""
    check_records_path(path)
    path = Path(path)
    if path.suffix == ".jsonl":
        lines = (json.dumps(row) + "\n" for table in tables for row in rows_of(table))
        write_atomically(path, "".join(lines))
        return
    import os

    import pyarrow
    import pyarrow.parquet

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pyarrow.parquet.write_table(pyarrow.concat_tables(map(pyarrow.table, tables)), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

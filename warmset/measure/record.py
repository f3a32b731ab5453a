"""Records of measurements: what was measured, on what, at which commit, and whether the tests were green.

A record is one JSON file in `results/`. No speed is recorded from a red run: `write_record` refuses it, and
`bench check` refuses a record that says red.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warmset
from warmset.errors import WarmsetError
from warmset.profile import write_atomically

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Warmset, Python and the libraries that decide figures; None where one is not installed."""
    found: dict[str, str | None] = {"warmset": warmset.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The commit of the tree that the package was imported from, `-dirty` when it has changes; None outside git.

    Where a tree travels without its history, WARMSET_COMMIT names it.
    """
    given = os.environ.get("WARMSET_COMMIT")
    if given:
        return given
    root = Path(warmset.__file__).parent.parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if dirty else head


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def make_record(
    *,
    name: str,
    config: dict[str, Any],
    results: dict[str, Any],
    tests: str,
    gpu: Callable[[], str | None] = gpu_name,
) -> dict[str, Any]:
    """One record as it is written; WarmsetError for a red run.

    tests: `green` or `red`, what the tests of this very tree said before the measurement.
    gpu: names the GPU; a process that must not touch it gives another function.
    """
    if tests not in ("green", "red"):
        raise WarmsetError(f"tests must be 'green' or 'red'. Got {tests!r}.")
    if tests == "red":
        raise WarmsetError(f"{name} is not recorded: the tests were red, and no speed counts then.")
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpu": gpu(),
        "versions": versions(),
        "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
        "tests": tests,
        "config": config,
        "results": results,
    }


def write_record(
    path: str | Path, *, name: str, config: dict[str, Any], results: dict[str, Any], tests: str
) -> dict[str, Any]:
    """Write `make_record`'s record, whole or not at all; returns it."""
    record = make_record(name=name, config=config, results=results, tests=tests)
    write_atomically(Path(path), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def read_record(path: Path) -> dict[str, Any]:
    """A record as written; WarmsetError naming the file when it is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WarmsetError(f"{path} is not there: run the command that records it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WarmsetError(f"{path} cannot be read: {error}.") from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict):
        raise WarmsetError(f"{path} is no record: it has no results.")
    return record

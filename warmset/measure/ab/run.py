"""Runs the legs that are missing, one at a time, and keeps the record whole after each of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from warmset.config import shown
from warmset.errors import WarmsetError, first_line
from warmset.measure.ab.analysis import analyse
from warmset.measure.ab.leg import run_arm
from warmset.measure.ab.plan import Plan
from warmset.measure.record import make_record, read_record
from warmset.profile import write_atomically

NAME = "ab"
Told = Callable[[dict[str, Any], int, int], None]
"""Told of each leg as it ends: the leg, how many are done, how many there are."""


def new_record(plan: Plan) -> dict[str, Any]:
    """The record of an experiment before its first leg. The GPU is named by the legs: asking for it here would take
    memory on it."""
    return make_record(
        name=NAME, config=plan.config(), results={"legs": [], "runs": 0}, tests="green", gpu=lambda: None
    )


def read_record_of_pairs(path: Path) -> dict[str, Any]:
    """The record to continue; WarmsetError where the file is none."""
    record = read_record(path)
    whole = isinstance(record.get("config"), dict) and isinstance(record["results"].get("legs"), list)
    if record.get("name") != NAME or not whole:
        raise WarmsetError(f"{path} is no record of matched pairs.")
    return record


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep a record from a second experiment; WarmsetError where one has it. A kill lets go of it."""
    lock = path.with_name(f".{path.name[:200]}.lock")
    while True:
        file = open(lock, "w")  # noqa: SIM115  # closed below: closing lets go
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise WarmsetError(
                f"{path} is in use by another `warmset ab`: wait until that ends, or name another file."
            ) from None
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            break
        file.close()  # its last holder deleted it in between
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def is_complete(record: dict[str, Any]) -> bool:
    """Whether every leg of the experiment has run."""
    pairs = record["config"].get("pairs")
    return type(pairs) is int and pairs >= 1 and len(record["results"]["legs"]) >= 2 * pairs


def check_same(recorded: dict[str, Any], plan: Plan, path: Path) -> None:
    """Refuse to continue a record of another experiment; WarmsetError names the first thing that differs."""
    _compare(recorded, json.loads(json.dumps(plan.config())), path, "")


def _compare(recorded: Any, asked: Any, path: Path, key: str) -> None:
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in sorted({*recorded, *asked}):
            _compare(recorded.get(name), asked.get(name), path, f"{key}.{name}".lstrip("."))
    elif recorded != asked:
        raise WarmsetError(
            f"{path} is of another experiment: {key} is {shown(recorded)} there and {shown(asked)} here."
        )


def run_legs(
    plan: Plan, record: dict[str, Any], path: Path | None, told: Told, budget_sec: float | None = None
) -> dict[str, Any]:
    """Run what is missing and return the record; where it stops, the record on disk holds every leg that ended.

    A leg that failed is not tried again: its pair is dropped. A pair whose legs ran in two calls is kept and counted.
    budget_sec: no pair begins that would last longer, by the longest of this call; the first begins in any case.
    """
    legs, budget = record["results"]["legs"], _Budget(budget_sec)
    schedule = plan.legs()
    if len(legs) < len(schedule):
        record["results"]["runs"] += 1
    save(record, path)
    for pair, place, arm in schedule[len(legs) :]:
        if place == 0 and not budget.allows_a_pair():
            break
        job, noted = plan.job(pair)
        found = run_arm(plan.arms[arm], job, plan.samples)
        head = {"pair": pair, "place": place, "arm": arm, "run": record["results"]["runs"], **noted}
        legs.append({**head, **found})
        record["gpu"] = record["gpu"] or found.get("gpu")
        conclude(record)
        save(record, path)
        told(legs[-1], len(legs), len(schedule))
    conclude(record)
    save(record, path)
    return record


class _Budget:
    """Whether another pair will be over in time, by the longest of those that ran."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._begun: list[float] = []

    def allows_a_pair(self) -> bool:
        now = time.monotonic()
        longest = max((end - begin for begin, end in pairwise([*self._begun, now])), default=0.0)
        first = not self._begun
        self._begun.append(now)
        return self._end is None or first or now + longest <= self._end


def concluded(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """A complete record judged anew, on disk too; WarmsetError where its legs are not what legs are."""
    try:
        conclude(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WarmsetError(f"{path} is damaged: its legs cannot be read ({first_line(error)}).") from None
    save(record, path)
    return record


def conclude(record: dict[str, Any]) -> None:
    """Put the analysis of the legs so far into the record, which is red where arms that must agree do not."""
    record["results"].update(analyse(record["config"], record["results"]["legs"]))
    record["tests"] = "red" if record["results"]["same_work"]["proven"] is False else "green"


def save(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_atomically(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

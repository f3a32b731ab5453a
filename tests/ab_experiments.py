"""Experiments of `warmset ab` for tests: the command in this process, and legs that `ab_fake.py` stands in for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from warmset import cli
from warmset.measure.ab.order import first_arms

FAKE = Path(__file__).parent / "ab_fake.py"


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """`warmset ab WORDS` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["warmset", "ab", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    return left.value.code or 0, captured.out, captured.err


class Fakes:
    """Runs experiments whose legs are `ab_fake.py`."""

    def __init__(self, folder: Path, monkeypatch, capsys) -> None:
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        self.python.chmod(0o755)
        self.orders = folder / "orders.json"
        self.record = folder / "record.json"
        self.call = lambda *words: call(monkeypatch, capsys, *words)
        monkeypatch.setenv("AB_FAKE", str(self.orders))

    def words(self, *more: str, a: str = "--slots 1", b: str = "--slots 2") -> list[str]:
        own = ["--a-python", str(self.python), "--b-python", str(self.python)]
        return ["--a", a, "--b", b, *own, "--samples", "2", "--json", str(self.record), *more]

    def run(self, *more: str, a: str = "--slots 1", b: str = "--slots 2", **orders) -> tuple[int, str, str]:
        self.orders.write_text(json.dumps(orders))
        return self.call(*self.words(*more, a=a, b=b))

    def results(self) -> dict:
        return json.loads(self.record.read_text())["results"]

    def legs_run(self) -> list[str]:
        return self.orders.with_suffix(".legs").read_text().splitlines()


def speeds(pairs: int, order: str, a: float, b: list[float]) -> list[float]:
    """Tokens a second of each leg in turn: `a` for every leg of A, b[pair] for those of B."""
    found = []
    for pair, first in enumerate(first_arms(pairs, order)):
        legs = {"a": a, "b": b[pair]}
        found += [legs[first], legs["b" if first == "a" else "a"]]
    return found

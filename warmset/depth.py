"""How many rows the next window should have: expected tokens against measured milliseconds.

A further row adds a token only as often as its draft and all before it are right, and it costs what its distinct cold
experts cost to read. Both are measured as the windows run: how often the draft at each depth is right, and how long a
window of each size takes, drafting and cold reads included. The size with the most tokens a millisecond is taken; now
and then a window of the next smaller or larger size is tried, so that the choice follows the text in both directions.
Pure Python on numbers: no clock, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_TRIES = 2
TRY_EVERY = 16
MARGIN = 1.03
"""A change must promise more than 3%: windows of equal worth would otherwise alternate."""
WEIGHT = 0.1
OUTLIER = 3.0


@dataclass
class Mean:
    """A mean that forgets by windows: a value after a long time without one counts more, but never over half."""

    value: float = 0.0
    count: int = 0
    last: int = 0

    def add(self, value: float, window: int) -> None:
        self.count += 1
        fresh = min(0.5, 1 - (1 - WEIGHT) ** (window - self.last))
        self.value += (value - self.value) * max(fresh, 1 / self.count)
        self.last = window


@dataclass
class Depth:
    """Chooses between 1 and `most` rows a window; with `adapt` off it is always `most`."""

    most: int
    adapt: bool = True
    rows: int = 0
    why: str = ""
    right: list[Mean] = field(default_factory=list)
    ms: list[Mean] = field(default_factory=list)
    cold: list[Mean] = field(default_factory=list)
    _windows: int = 0

    def __post_init__(self) -> None:
        self.rows = self.most
        self.why = "windows are as large as they may be" if not self.adapt else "not yet measured"
        for means in (self.right, self.ms, self.cold):
            means.extend(Mean() for _ in range(self.most + 1))

    def next_rows(self) -> int:
        """Rows that the next window may have."""
        if not self.adapt or self.most == 1:
            return self.most
        for rows in range(self.most, 0, -1):
            if self.ms[rows].count < FIRST_TRIES and self._windows < 2 * FIRST_TRIES * self.most:
                return rows
        if self._windows % TRY_EVERY == 0:
            return min(self.most, self.rows + 1)
        if self._windows % TRY_EVERY == TRY_EVERY // 2:
            return max(1, self.rows - 1)
        return self.rows

    def observe(self, *, drafted: int, accepted: int, ms: float, cold: float) -> None:
        """A window with `drafted` drafts ran, `accepted` of them were right; it took `ms` and read `cold` experts."""
        rows = drafted + 1
        self._windows += 1
        for depth in range(1, min(drafted, accepted + 1) + 1):
            self.right[depth].add(1.0 if depth <= accepted else 0.0, self._windows)
        known = self.ms[rows]
        if known.count > FIRST_TRIES:
            ms = min(ms, OUTLIER * known.value)
        known.add(ms, self._windows)
        self.cold[rows].add(cold, self._windows)
        self._choose()

    def expected_tokens(self, rows: int) -> float:
        """Tokens that a window of so many rows gives, by how often each depth was right so far."""
        tokens, chance = 1.0, 1.0
        for depth in range(1, rows):
            chance *= self.right[depth].value
            tokens += chance
        return tokens

    def _choose(self) -> None:
        if not self.adapt:
            return
        measured = [rows for rows in range(1, self.most + 1) if self.ms[rows].count]
        speed = {rows: self.expected_tokens(rows) / max(self.ms[rows].value, 1e-9) for rows in measured}
        best = max(measured, key=lambda rows: (speed[rows], -rows))
        if self.rows not in speed or speed[best] > MARGIN * speed[self.rows]:
            self.rows = best
        others = [rows for rows in measured if rows != self.rows]
        rival = max(others, key=lambda rows: speed[rows], default=None)
        self.why = self._sentence(self.rows) + ("" if rival is None else f"; {self._sentence(rival)}")

    def _sentence(self, rows: int) -> str:
        plural = "row" if rows == 1 else "rows"
        return (
            f"{rows} {plural}: {self.expected_tokens(rows):.2f} tokens in {self.ms[rows].value:.1f} ms, "
            f"{self.cold[rows].value:.1f} cold experts"
        )

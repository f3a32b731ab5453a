"""Intervals for means over positions of a text, whose neighbours are alike: a seeded block bootstrap.

Positions are cut into blocks of neighbours that never span two documents. A replicate draws as many blocks as there
are, with replacement, and takes the mean over their positions. Single positions drawn alone would give intervals that
are too narrow. The same seed draws the same blocks for every figure, so differences are paired.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

BLOCK_POSITIONS = 64
REPLICATES = 2000
LEVEL = 0.95
LEAST_BLOCKS = 5
"""Fewer blocks than these say nothing about how blocks differ."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the percentile interval of its replicates; None where there are too few blocks to draw from."""

    value: float
    low: float | None
    high: float | None

    def as_list(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


class Blocks:
    """Blocks of a text's positions, and how often each replicate drew each of them."""

    def __init__(
        self,
        document_N: np.ndarray,
        *,
        seed: int = 0,
        block: int = BLOCK_POSITIONS,
        replicates: int = REPLICATES,
    ) -> None:
        starts = [0, *(np.flatnonzero(np.diff(document_N)) + 1).tolist(), len(document_N)]
        self.block_N = np.empty(len(document_N), dtype=np.int64)
        number = 0
        for start, end in itertools.pairwise(starts):
            for place in range(start, end, block):
                self.block_N[place : min(place + block, end)] = number
                number += 1
        self.num_blocks = number
        generator = np.random.default_rng(seed)
        self.drawn_RB = generator.multinomial(number, np.full(number, 1 / number), size=replicates)

    def mean(self, values_N: np.ndarray, among_N: np.ndarray | None = None) -> Interval:
        """Mean of the values, or of those positions that `among_N` (bool) names; NaN where it names none."""
        chosen_N = np.ones(len(values_N)) if among_N is None else among_N.astype(float)
        if not chosen_N.any():
            return Interval(float("nan"), None, None)
        sum_B = self._sums(np.where(chosen_N > 0, values_N, 0.0).astype(float))
        count_B = self._sums(chosen_N)
        value = float(sum_B.sum() / count_B.sum())
        counts_R = self.drawn_RB @ count_B
        return self._interval(value, (self.drawn_RB @ sum_B)[counts_R > 0] / counts_R[counts_R > 0], count_B)

    def quantile(self, values_N: np.ndarray, share: float) -> Interval:
        """The smallest value that at least `share` of the positions do not exceed."""
        order_N = np.argsort(values_N, kind="stable")
        sorted_N, block_N = values_N[order_N], self.block_N[order_N]
        found = []
        for drawn_B in self.drawn_RB[: REPLICATES // 4]:  # a sort-free pass over all positions each
            reached_N = np.cumsum(drawn_B[block_N])
            found.append(sorted_N[np.searchsorted(reached_N, share * reached_N[-1])])
        value = float(sorted_N[int(np.ceil(share * len(values_N))) - 1])
        return self._interval(value, np.array(found), self._sums(np.ones(len(values_N))))

    def _sums(self, values_N: np.ndarray) -> np.ndarray:
        return np.bincount(self.block_N, weights=values_N, minlength=self.num_blocks)

    def _interval(self, value: float, found_R: np.ndarray, count_B: np.ndarray) -> Interval:
        if np.count_nonzero(count_B) < LEAST_BLOCKS:
            return Interval(value, None, None)
        outside = (1 - LEVEL) / 2
        low, high = np.quantile(found_R, [outside, 1 - outside])
        return Interval(value, float(low), float(high))

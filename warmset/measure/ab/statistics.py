"""What N paired differences say: sign test, Hodges-Lehmann estimate with its interval, and the verdict.

Plain numbers in, exact small-sample arithmetic, no approximation by a normal law. The rule of the verdict: 'faster' or
'slower' needs both the two-sided sign test at 5% and a 95% signed-rank interval that leaves 0 out; everything else is
'no verdict', with the reason. `simulate` measures how often that rule errs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class SignTest:
    """`wins` differences above 0, `losses` below, `ties` of exactly 0 (not in the test); two-sided p."""

    wins: int
    losses: int
    ties: int
    p: float


def sign_test(differences: Sequence[float]) -> SignTest:
    """Exact two-sided binomial test of 'as often above 0 as below'; p = 1 where every difference is a tie."""
    wins = sum(value > 0 for value in differences)
    losses = sum(value < 0 for value in differences)
    count = wins + losses
    tail = sum(math.comb(count, k) for k in range(max(wins, losses), count + 1))
    p = min(1.0, 2 * tail / 2**count)
    return SignTest(wins=wins, losses=losses, ties=len(differences) - count, p=p)


@lru_cache
def fewest_wins(count: int, alpha: float = ALPHA) -> int | None:
    """The fewest wins of `count` untied pairs whose two-sided p is at most alpha; None where no number is enough."""
    tail = 0
    for wins in range(count, -1, -1):
        tail += math.comb(count, wins)
        if 2 * tail > alpha * 2**count:
            return wins + 1 if wins < count else None
    return None


@lru_cache
def signed_rank_counts(count: int) -> tuple[int, ...]:
    """How many of the 2**count sign patterns give each signed-rank sum 0 ... count(count+1)/2."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    return tuple(ways)


@lru_cache
def most_excluded(count: int, alpha: float = ALPHA) -> int | None:
    """The greatest c with P(signed-rank sum <= c) <= alpha / 2 under no effect; None where even c = 0 is likelier."""
    below = 0
    for total, ways in enumerate(signed_rank_counts(count)):
        below += ways
        if below > alpha / 2 * 2**count:
            return total - 1 if total else None
    return None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hodges-Lehmann: the median of the averages of all pairs of differences. The interval's true coverage is at
    least 95% and stands in `coverage`; all three are None with fewer than 6 differences, which cannot give one."""

    value: float
    low: float | None
    high: float | None
    coverage: float | None


def hodges_lehmann(differences: Sequence[float]) -> Estimate:
    """Location of one or more differences with its exact signed-rank interval (assumes symmetry about the centre)."""
    count = len(differences)
    averages = sorted((differences[i] + differences[j]) / 2 for i in range(count) for j in range(i, count))
    excluded = most_excluded(count)
    if excluded is None:
        return Estimate(value=median(averages), low=None, high=None, coverage=None)
    outside = sum(signed_rank_counts(count)[: excluded + 1])
    return Estimate(
        value=median(averages),
        low=averages[excluded],
        high=averages[-1 - excluded],
        coverage=1 - 2 * outside / 2**count,
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`word`: faster, slower or no verdict; `reason`: one sentence without its full stop."""

    word: str
    reason: str


NO_VERDICT = "no verdict"
FEWEST = 1 + math.ceil(math.log2(1 / ALPHA))
"""With fewer untied pairs even a clean sweep has p above 5%."""


def decide(gains: Sequence[float]) -> Verdict:
    """The verdict on paired gains: above 0 where B is faster than A."""
    test = sign_test(gains)
    count = test.wins + test.losses
    tied = f" ({test.ties} tied)" if test.ties else ""
    if count < FEWEST:
        if not count:
            return Verdict(word=NO_VERDICT, reason=f"no pair shows a difference{tied}")
        best = f"{count} of {count} is p = {2.0 ** (1 - count):.4f}"
        return Verdict(word=NO_VERDICT, reason=f"too few pairs{tied}: even {best}, and {FEWEST} are needed")
    counted = f"B is faster in {test.wins} of {count} pairs{tied}, p = {test.p:.4f}"
    if test.p > ALPHA:
        return Verdict(word=NO_VERDICT, reason=f"{counted}: chance alone gives that too often")
    estimate = hodges_lehmann(gains)
    assert estimate.low is not None and estimate.high is not None
    if estimate.low > 0 and test.wins > test.losses:
        return Verdict(word="faster", reason=counted)
    if estimate.high < 0 and test.losses > test.wins:
        return Verdict(word="slower", reason=counted)
    return Verdict(word=NO_VERDICT, reason=f"{counted}, but the interval of the effect does not leave 0 out")

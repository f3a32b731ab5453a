"""The experiment on a synthetic clock: how often the verdict errs, how many pairs an effect needs, what drift does.

A leg's speed is exp(effect + drift + noise): `effect` in arm B only; `drift` falls evenly from the first leg to the
last; `noise` is normal, of a size such that a pair's difference has the standard deviation that was asked for. All
orders are judged on the same clock. Shapes: S experiments, N pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from warmset.config import require
from warmset.errors import WarmsetError
from warmset.measure.ab.order import ORDERS, first_arms
from warmset.measure.ab.statistics import (
    FEWEST,
    NO_VERDICT,
    Verdict,
    decide,
    fewest_wins,
    hodges_lehmann,
    most_excluded,
    sign_test,
)

EXPERIMENTS = 2_000
MOST_PAIRS = 1_000
WANTED_POWER = 0.8
PAIR_NOISE = 0.04


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A synthetic experiment. `effect` 0.05: B is 5% faster; `drift` 0.1: the last leg is 10% slower than the first;
    `noise`: standard deviation of a pair's difference."""

    pairs: int = 12
    effect: float = 0.0
    drift: float = 0.0
    noise: float = PAIR_NOISE
    seed: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.pairs <= MOST_PAIRS, "pairs", f"1 to {MOST_PAIRS:,}", self.pairs)
        require(-0.9 <= self.effect <= 9, "effect", "-90% to 900%", f"{100 * self.effect:.4g}%")
        require(-0.9 <= self.drift <= 0.9, "drift", "-90% to 90%", f"{100 * self.drift:.4g}%")
        require(0 <= self.noise <= 1, "noise", "0% to 100%", f"{100 * self.noise:.4g}%")

    def gains_SN(self, order: str, experiments: int) -> np.ndarray:
        """Logarithms of speed B / speed A by pair, float64 [S, N]; experiment s is the same for any S above it."""
        generator = np.random.default_rng(self.seed)
        noise = generator.standard_normal((experiments, self.pairs, 2)) * (self.noise / math.sqrt(2))
        num_legs = 2 * self.pairs
        drift = math.log1p(-self.drift) * np.arange(num_legs).reshape(self.pairs, 2) / max(1, num_legs - 1)
        legs = noise + drift
        later = legs[:, :, 1] - legs[:, :, 0]
        sign_N = np.array([1.0 if first == "a" else -1.0 for first in first_arms(self.pairs, order)])
        return later * sign_N + math.log1p(self.effect)


def signs_say(gains_SN: np.ndarray) -> np.ndarray:
    """+1, -1 or 0 for each experiment by the sign test alone, int [S]; for gains without ties."""
    num, pairs = gains_SN.shape
    enough = fewest_wins(pairs)
    if enough is None:
        return np.zeros(num, int)
    wins_S = (gains_SN > 0).sum(1)
    return (wins_S >= enough).astype(int) - (pairs - wins_S >= enough).astype(int)


def interval_says(gains_SN: np.ndarray) -> np.ndarray:
    """+1, -1 or 0 by whether the Hodges-Lehmann interval leaves 0 out, int [S]; for gains without ties."""
    num, pairs = gains_SN.shape
    excluded = most_excluded(pairs)
    if excluded is None:
        return np.zeros(num, int)
    # Averages above 0 number as many as the signed-rank sum of the gains above 0.
    ranks_SN = np.abs(gains_SN).argsort(1).argsort(1) + 1
    sum_S = (ranks_SN * (gains_SN > 0)).sum(1)
    most = pairs * (pairs + 1) // 2
    return (most - sum_S <= excluded).astype(int) - (sum_S <= excluded).astype(int)


def both_say(gains_SN: np.ndarray) -> np.ndarray:
    """+1 'faster', -1 'slower', 0 'no verdict': `statistics.decide` for many experiments at once, int [S]."""
    signs_S, interval_S = signs_say(gains_SN), interval_says(gains_SN)
    return np.where(signs_S == interval_S, signs_S, 0)


RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sign test": signs_say,
    "interval": interval_says,
    "both": both_say,
}


def shares(verdicts_S: np.ndarray) -> dict[str, float]:
    """Shares of 'faster', 'slower' and 'no verdict'."""
    names = {"faster": 1, "slower": -1, NO_VERDICT: 0}
    return {name: float((verdicts_S == value).mean()) for name, value in names.items()}


def simulate(clock: Clock, order: str) -> dict[str, Any]:
    """One experiment in full, what a fixed order would have claimed on the same clock, and shares over many.

    `orders`: each order by the rule of the verdict; `rules`: each rule in the order asked for. A clock without noise
    gives the same experiment again and again, so it has no shares.
    """
    require(order in ORDERS, "order", f"one of {', '.join(ORDERS)}", order)
    found: dict[str, Any] = {"clock": vars(clock), "order": order, "experiments": EXPERIMENTS}
    many_SN = clock.gains_SN(order, EXPERIMENTS)
    found["rules"] = {name: shares(rule(many_SN)) for name, rule in RULES.items()} if clock.noise else None
    for name in dict.fromkeys((order, *ORDERS, "fixed")):
        gains = [float(gain) for gain in clock.gains_SN(name, 1)[0]]
        verdict, test, estimate = decide(gains), sign_test(gains), hodges_lehmann(gains)
        found.setdefault("orders", {})[name] = {
            "verdict": verdict.word,
            "reason": verdict.reason,
            "wins": test.wins,
            "losses": test.losses,
            "p": test.p,
            "effect": math.expm1(estimate.value),
            "low": None if estimate.low is None else math.expm1(estimate.low),
            "high": None if estimate.high is None else math.expm1(estimate.high),
            "shares": shares(both_say(clock.gains_SN(name, EXPERIMENTS))) if clock.noise else None,
        }
    return found


def verdict_of(found: dict[str, Any]) -> Verdict:
    """The verdict of the order that was asked for."""
    chosen = found["orders"][found["order"]]
    return Verdict(word=chosen["verdict"], reason=chosen["reason"])


def power(clock: Clock, rule: str = "both") -> float:
    """Share of experiments in which the rule finds the direction of the effect, in alternating order."""
    verdicts_S = RULES[rule](clock.gains_SN("alternating", EXPERIMENTS))
    return float((verdicts_S == (1 if clock.effect > 0 else -1)).mean())


def pairs_needed(effect: float, noise: float, seed: int) -> dict[str, Any]:
    """The fewest pairs whose power is at least 80%, and the power of every number of pairs that was tried.

    Begins where the sign test alone has that power by the binomial law, since both tests together have at most that.
    """
    require(effect != 0, "power", "an effect other than 0%", "0%")
    require(noise > 0, "noise", "above 0%", "0%")
    clock = Clock(effect=effect, noise=noise, seed=seed)
    chance = min(0.5 * math.erfc(-abs(math.log1p(effect)) / noise / math.sqrt(2)), 1 - 1e-12)
    tried: dict[int, float] = {}
    for pairs in range(FEWEST, MOST_PAIRS + 1):
        if _sign_power(pairs, chance) < WANTED_POWER - 0.03:  # the simulation has noise of its own
            continue
        tried[pairs] = power(replace(clock, pairs=pairs))
        if tried[pairs] >= WANTED_POWER:
            return {"effect": effect, "noise": noise, "pairs": pairs, "power": tried[pairs], "tried": tried}
    raise WarmsetError(
        f"power must be an effect that {MOST_PAIRS:,} pairs can show at {noise:.4g} noise. Got {effect:.4g}."
    )


def _sign_power(pairs: int, chance: float) -> float:
    """Power of the sign test where each pair is a win with this chance, below 1."""
    enough = fewest_wins(pairs)
    if enough is None:
        return 0.0
    total = 0.0
    for wins in range(enough, pairs + 1):
        ways = math.lgamma(pairs + 1) - math.lgamma(wins + 1) - math.lgamma(pairs - wins + 1)
        total += math.exp(ways + wins * math.log(chance) + (pairs - wins) * math.log1p(-chance))
    return total

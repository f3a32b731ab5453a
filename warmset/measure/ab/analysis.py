"""From legs to figures and a verdict: medians by leg, differences by pair, statistics over pairs, proof of equal work.

Differences of times and rates are logarithms of B / A, shown as percent: swapping the arms turns each answer round
exactly. Counts differ by plain subtraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from warmset.measure.ab.proof import Sides, compare_work, equal_tokens, of_windows
from warmset.measure.ab.statistics import NO_VERDICT, Verdict, decide, hodges_lehmann, sign_test


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a sample. `better`: +1 where more is better; `relative`: differences are ratios."""

    key: str
    label: str
    better: int
    relative: bool

    def difference(self, a: float, b: float) -> float | None:
        """B against A on the scale of the statistics; None where a ratio does not exist."""
        if not self.relative:
            return b - a
        return math.log(b / a) if a > 0 and b > 0 else None

    def shown(self, difference: float) -> float:
        """The same as a person reads it: percent for ratios."""
        return 100 * math.expm1(difference) if self.relative else difference


METRICS = (
    Metric(key="tokens_per_sec", label="decode tokens a second", better=1, relative=True),
    Metric(key="ms_per_window", label="ms a window", better=-1, relative=True),
    Metric(
        key="cold_experts_per_layer_window", label="cold experts a layer-window", better=-1, relative=False
    ),
    Metric(key="accepted_per_window", label="accepted tokens a window", better=1, relative=False),
    Metric(key="prompt_ms", label="prompt, ms", better=-1, relative=True),
)


def primary_of(config: dict[str, Any]) -> Metric:
    """The metric that the verdict is about: windows of a trace draw no tokens that mean anything."""
    return METRICS[1] if of_windows(config) else METRICS[0]


def analyse(config: dict[str, Any], legs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that a record says about its legs; JSON values only."""
    complete, dropped = pair_up(legs)
    pairs = [_pair(number, sides) for number, sides in complete]
    same_work = compare_work(config, complete)
    missing = config["pairs"] - len(pairs) - len(dropped)
    return {
        "pairs": pairs,
        "dropped": dropped,
        "missing_pairs": missing,
        "metrics": {metric.key: summarise(metric, pairs) for metric in METRICS},
        "by_order": {
            f"{arm}_first": {
                metric.key: summarise(metric, [pair for pair in pairs if pair["first"] == arm])
                for metric in METRICS
            }
            for arm in ("a", "b")
        },
        "same_work": same_work,
        "verdict": vars(_verdict(primary_of(config), pairs, same_work, missing)),
        "notes": _notes(complete),
    }


def pair_up(legs: Sequence[dict[str, Any]]) -> tuple[list[tuple[int, Sides]], list[dict[str, Any]]]:
    """Pairs of two good legs by number, and the pairs that a failed leg dropped, with the reason."""
    by_pair: dict[int, Sides] = {}
    for leg in legs:
        by_pair.setdefault(leg["pair"], {})[leg["arm"]] = leg
    complete, dropped = [], []
    for number, sides in sorted(by_pair.items()):
        failed = [leg for leg in sides.values() if leg["failed"] is not None]
        if failed:
            why = "; ".join(f"leg {leg['arm'].upper()}: {leg['failed']}" for leg in failed)
            dropped.append({"pair": number, "why": why})
        elif len(sides) == 2:
            complete.append((number, sides))
    return complete, dropped


def medians(leg: dict[str, Any]) -> dict[str, float | None]:
    """The median of each metric over a leg's samples; None where no sample has it."""
    found: dict[str, float | None] = {}
    for metric in METRICS:
        values = [sample[metric.key] for sample in leg["samples"] if sample.get(metric.key) is not None]
        found[metric.key] = median(values) if values else None
    return found


def _pair(number: int, sides: Sides) -> dict[str, Any]:
    first = min(sides, key=lambda arm: sides[arm]["place"])
    a, b = medians(sides["a"]), medians(sides["b"])
    differences: dict[str, float | None] = {}
    for metric in METRICS:
        left, right = a[metric.key], b[metric.key]
        known = left is not None and right is not None
        differences[metric.key] = metric.difference(left, right) if known else None  # type: ignore[arg-type]
    equal, total = equal_tokens(sides)
    return {
        "pair": number,
        "first": first,
        "split": sides["a"]["run"] != sides["b"]["run"],
        "a": a,
        "b": b,
        "difference": differences,
        "equal_tokens": equal / total if total else None,
    }


def summarise(metric: Metric, pairs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A metric over pairs: both arms, the differences as people read them, what the tests say; None without data."""
    known = [pair for pair in pairs if pair["difference"][metric.key] is not None]
    if not known:
        return None
    differences = [pair["difference"][metric.key] for pair in known]
    test, estimate = sign_test(differences), hodges_lehmann(differences)
    more, less = ("better", "worse") if metric.better > 0 else ("worse", "better")
    return {
        "n": len(known),
        "a": _spread([pair["a"][metric.key] for pair in known]),
        "b": _spread([pair["b"][metric.key] for pair in known]),
        "unit": "percent" if metric.relative else "count",
        "difference": _spread([metric.shown(difference) for difference in differences]),
        more: test.wins,
        less: test.losses,
        "ties": test.ties,
        "p": test.p,
        "estimate": metric.shown(estimate.value),
        "low": None if estimate.low is None else metric.shown(estimate.low),
        "high": None if estimate.high is None else metric.shown(estimate.high),
        "coverage": estimate.coverage,
        "pair_noise_sd": metric.shown(stdev(differences)) if len(known) > 1 else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "mean": mean(values), "min": min(values), "max": max(values)}


def _verdict(
    metric: Metric, pairs: Sequence[dict[str, Any]], same_work: dict[str, Any], missing: int
) -> Verdict:
    if missing:
        left = "1 pair is" if missing == 1 else f"{missing} pairs are"
        return Verdict(word=NO_VERDICT, reason=f"{left} still to run: looking early and stopping misleads")
    if same_work["proven"] is False:
        numbers = ", ".join(str(number + 1) for number in same_work["pairs_that_differ"])
        return Verdict(word=NO_VERDICT, reason=f"{same_work['claim']} differ in pair {numbers}")
    gains = [
        metric.better * pair["difference"][metric.key]
        for pair in pairs
        if pair["difference"][metric.key] is not None
    ]
    return decide(gains)


def _notes(complete: Sequence[tuple[int, Sides]]) -> list[str]:
    """What a reader must know beside the figures, one sentence each."""
    notes = []
    split = [number + 1 for number, sides in complete if sides["a"]["run"] != sides["b"]["run"]]
    if split:
        which = f"pair{'s' if len(split) > 1 else ''} {', '.join(map(str, split))}"
        notes.append(f"The legs of {which} ran in two calls.")
    for arm in ("a", "b"):
        legs = [sides[arm] for _, sides in complete]
        for key, what in (
            ("commit", "commits"),
            ("profile_sha256", "profiles"),
            ("slots", "numbers of slots"),
            ("gpu", "GPUs"),
        ):
            found = {str(leg.get(key)) for leg in legs}
            if len(found) > 1:
                notes.append(f"Arm {arm.upper()} ran with {len(found)} {what}: {', '.join(sorted(found))}.")
    return notes

"""The largest margins that a budget of KL allows: one for all layers, then one for each.

    single      closing in on the budget from both sides, by the measured excess KL
    by layer    each layer alone at each margin of a grid: its KL and the bytes it saves. Then greedily the step with
                the most bytes saved for its KL, as long as the sum stays within the budget; then the sum is measured,
                and all margins are scaled until the measured KL meets the budget

KL of single layers is assumed to add up only while the order of steps is chosen; what counts is measured. A budget is
excess KL over the full vocabulary: the policy's less its rounding null's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmset.errors import WarmsetError
from warmset.routing import MarginSwap

GRID = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
OFF = -1e30
"""A margin that no pair of scores meets: the layer routes exactly."""
GREATEST = 8.0
CLOSE = 0.04
MOST_PASSES = 9


@dataclass(frozen=True)
class Point:
    """One measured policy: excess KL in nats, and the share of off's bytes that it saves."""

    policy: MarginSwap
    excess_kl: float
    bytes_saved: float


Measure = Callable[[MarginSwap], Point]
Curve = Sequence[tuple[float, float, float]]
"""(margin, excess KL, bytes saved) of one layer alone, by margin."""


def find_single(measure: Measure, budget: float, ranks: tuple[int, int] | None = None) -> list[Point]:
    """Points on the way, all measured; the last one is the best within the budget.

    WarmsetError where no margin above 0 stays within it.
    """
    return _close_in(lambda margin: MarginSwap(margin=margin, ranks=ranks), measure, budget, 0.25, GREATEST)


def find_by_layer(
    measure: Measure, curves: Sequence[Curve], budget: float, ranks: tuple[int, int] | None = None
) -> list[Point]:
    """The same with a margin for each layer; curves: what each layer costs and saves alone."""
    margins = choose_steps([[(OFF, 0.0, 0.0), *curve] for curve in curves], budget)
    if all(margin == OFF for margin in margins):
        raise WarmsetError(
            f"budget-kl {budget:g} is too small: no layer stays within it at margin {GRID[0]}."
        )

    def scaled(factor: float) -> MarginSwap:
        return MarginSwap(
            margin=tuple(margin if margin == OFF else margin * factor for margin in margins), ranks=ranks
        )

    return _close_in(scaled, measure, budget, 1.0, 4.0)


def alone(layer: int, margin: float, num_layers: int, ranks: tuple[int, int] | None = None) -> MarginSwap:
    """The policy that swaps in one layer only."""
    margins = tuple(margin if number == layer else OFF for number in range(num_layers))
    return MarginSwap(margin=margins, ranks=ranks)


def choose_steps(curves: list[list[tuple[float, float, float]]], budget: float) -> list[float]:
    """A margin a layer: greedily the step up with the most bytes saved for its KL that the budget still allows.

    curves: (margin, KL, bytes saved) of each layer alone, from off on; a step may pass over points of a curve.
    """
    at = [0] * len(curves)
    spent = 0.0
    while True:
        best: tuple[float, int, int] | None = None
        for layer, curve in enumerate(curves):
            _, kl_now, saved_now = curve[at[layer]]
            for place in range(at[layer] + 1, len(curve)):
                kl, saved = curve[place][1] - kl_now, curve[place][2] - saved_now
                if saved <= 0 or spent + kl > budget:
                    continue
                gain = saved / max(kl, 1e-12)
                if best is None or gain > best[0]:
                    best = gain, layer, place
        if best is None:
            return [curve[place][0] for curve, place in zip(curves, at, strict=True)]
        _, layer, place = best
        spent += curves[layer][place][1] - curves[layer][at[layer]][1]
        at[layer] = place


def _close_in(
    make: Callable[[float], MarginSwap], measure: Measure, budget: float, start: float, greatest: float
) -> list[Point]:
    """Measured points, the last the best that keeps within the budget; stops when one is close to it.

    Between a factor that keeps it and one that does not, KL is taken for a power of the factor.
    """
    points: list[Point] = []
    low, low_kl, high, high_kl, factor = 0.0, 0.0, math.inf, math.inf, start
    best: Point | None = None
    while len(points) < MOST_PASSES:
        point = measure(make(factor))
        points.append(point)
        if point.excess_kl <= budget:
            low, low_kl = factor, point.excess_kl
            if best is None or point.bytes_saved >= best.bytes_saved:
                best = point
            if point.excess_kl >= budget * (1 - CLOSE) or factor >= greatest:
                break
        else:
            high, high_kl = factor, point.excess_kl
        factor = _next_factor(budget * (1 - CLOSE / 2), (low, low_kl), (high, high_kl), greatest)
    if best is None or best.bytes_saved <= 0:
        raise WarmsetError(f"budget-kl {budget:g} is too small: no margin that saves a byte stays within it.")
    points.remove(best)
    return [*points, best]


def _next_factor(
    wanted: float, low: tuple[float, float], high: tuple[float, float], greatest: float
) -> float:
    """Where the KL is likely to be `wanted`, from (factor, KL) below and above it."""
    if math.isinf(high[0]):
        return min(greatest, 2 * low[0])
    if low[0] == 0 or low[1] <= 0:
        return high[0] * min(0.9, max(0.1, wanted / high[1]))
    share = math.log(wanted / low[1]) / math.log(high[1] / low[1])
    return low[0] * (high[0] / low[0]) ** min(0.9, max(0.1, share))

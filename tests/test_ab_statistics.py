"""Sign test, signed-rank interval and verdict against tables, scipy and brute force; the bars by simulation."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from warmset.errors import WarmsetError
from warmset.measure.ab import simulate
from warmset.measure.ab.order import ORDERS, first_arms
from warmset.measure.ab.simulate import Clock
from warmset.measure.ab.statistics import (
    FEWEST,
    decide,
    fewest_wins,
    hodges_lehmann,
    most_excluded,
    sign_test,
    signed_rank_counts,
)

# Two-sided p of the sign test: pairs, the fewest wins that are shown here, p.
SIGN_TABLE = [
    (5, 5, 0.0625),  # the clean sweep that is still too few
    (6, 6, 0.03125),
    (8, 7, 0.0703125),
    (8, 8, 0.0078125),
    (9, 8, 0.0390625),
    (10, 8, 0.109375),
    (10, 9, 0.021484375),
    (12, 9, 0.14599609375),
    (12, 10, 0.03857421875),
    (12, 11, 0.00634765625),  # the reference document's 11 of 12, p = 0.006
    (12, 6, 1.0),
    (1, 1, 1.0),
]


@pytest.mark.parametrize("pairs, wins, p", SIGN_TABLE)
def test_sign_table(pairs, wins, p):
    gains = [1.0] * wins + [-1.0] * (pairs - wins)
    for sign in (1, -1):
        found = sign_test([sign * gain for gain in gains])
        assert found.p == p
        assert (found.wins, found.losses)[:: int(sign)] == (wins, pairs - wins)


def test_fewest_wins_agrees_with_the_test():
    for pairs in range(1, 40):
        enough = [
            w for w in range(pairs // 2, pairs + 1) if sign_test([1.0] * w + [-1.0] * (pairs - w)).p <= 0.05
        ]
        assert fewest_wins(pairs) == min(enough, default=None)


def test_ties_are_dropped_and_counted():
    found = sign_test([0.0, 1.0, 0.0, 2.0, -1.0])
    assert (found.wins, found.losses, found.ties, found.p) == (2, 1, 2, 1.0)
    assert sign_test([0.0, 0.0]).p == 1.0


def test_signed_rank_counts_by_brute_force():
    for count in range(8):
        sums = [sum(kept) for kept in itertools.product(*((0, rank) for rank in range(1, count + 1)))]
        assert signed_rank_counts(count) == tuple(sums.count(value) for value in range(max(sums) + 1))


# Published two-sided 5% critical values of the signed-rank sum.
CRITICAL = {5: None, 6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 11: 10, 12: 13, 15: 25, 20: 52, 25: 89}


@pytest.mark.parametrize("pairs, critical", CRITICAL.items())
def test_critical_values(pairs, critical):
    assert most_excluded(pairs) == critical


def gains_of(seed: int, pairs: int, effect: float) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(effect, 0.04) for _ in range(pairs)]


def test_interval_leaves_out_what_the_signed_rank_test_refuses():
    scipy_stats = pytest.importorskip("scipy.stats")
    for seed, pairs in itertools.product(range(20), (6, 9, 12)):
        gains = gains_of(seed, pairs, 0.03)
        estimate = hodges_lehmann(gains)
        assert estimate.low < estimate.value < estimate.high
        for end, inward in ((estimate.low, 1e-9), (estimate.high, -1e-9)):
            for shift, refused in ((-inward, True), (inward, False)):
                moved = [gain - end - shift for gain in gains]
                assert (scipy_stats.wilcoxon(moved, method="exact").pvalue <= 0.05) == refused
        assert 0.95 <= estimate.coverage < 0.985


def test_estimate_of_known_numbers():
    found = hodges_lehmann([1.0, 2.0, 6.0])  # averages 1, 1.5, 2, 3.5, 4, 6
    assert found.value == 2.75
    assert (found.low, found.high, found.coverage) == (None, None, None)
    six = hodges_lehmann([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (six.value, six.low, six.high, six.coverage) == (3.5, 1.0, 6.0, 1 - 2 / 64)


VERDICTS = [
    ([0.05] * 5, "no verdict", "even 5 of 5 is p = 0.0625, and 6 are needed"),
    ([0.05] * 5 + [0.0], "no verdict", "too few pairs (1 tied)"),
    ([0.01, 0.02, 0.03, 0.04, 0.05, 0.06], "faster", "6 of 6 pairs, p = 0.0312"),
    ([-0.01, -0.02, -0.03, -0.04, -0.05, -0.06], "slower", "0 of 6 pairs"),
    ([0.05] * 9 + [-0.05] * 3, "no verdict", "p = 0.1460"),
    ([0.0] * 12, "no verdict", "no pair shows a difference"),
    ([0.001 * i for i in range(1, 11)] + [-0.5, -0.6], "no verdict", "the interval"),
]


@pytest.mark.parametrize("gains, word, part", VERDICTS)
def test_verdicts(gains, word, part):
    found = decide(gains)
    assert found.word == word and part in found.reason, found


def test_opposite_tests_give_no_verdict():
    """Of many pairs most can be a little faster while the interval says slower."""
    gains = [1e-4 * i for i in range(1, 61)] + [-1.0 - 1e-3 * i for i in range(40)]
    assert sign_test(gains).p > 0.05  # 60 of 100 is not enough; 61 of 100 is
    gains = [1e-4 * i for i in range(1, 123)] + [-1.0 - 1e-3 * i for i in range(78)]
    assert sign_test(gains).p <= 0.05 and hodges_lehmann(gains).high < 0
    assert decide(gains).word == "no verdict"


def test_swapping_the_arms_turns_the_verdict_round():
    opposite = {"faster": "slower", "slower": "faster", "no verdict": "no verdict"}
    for seed in range(60):
        gains = gains_of(seed, 12, (seed % 3 - 1) * 0.04)
        assert decide([-gain for gain in gains]).word == opposite[decide(gains).word]


@pytest.mark.parametrize("pairs", [3, 6, 7, 12, 31])
def test_many_at_once_equal_one_by_one(pairs):
    gains_SN = Clock(pairs=pairs, effect=0.025, drift=0.1).gains_SN("alternating", 120)
    words = {1: "faster", -1: "slower", 0: "no verdict"}
    assert [words[v] for v in simulate.both_say(gains_SN)] == [decide(list(g)).word for g in gains_SN]


def test_bars_of_the_rule():
    """2,000 experiments, pair noise 4%: false verdicts at most 5%, power at 5% with 12 pairs at least 80%."""
    for drift, order in itertools.product((0.0, 0.1), ORDERS):
        shares = simulate.simulate(Clock(drift=drift), order)["orders"][order]["shares"]
        assert shares["faster"] + shares["slower"] <= 0.05
        assert (
            simulate.simulate(Clock(drift=drift, effect=0.05), order)["orders"][order]["shares"]["faster"]
            >= 0.8
        )
    assert simulate.EXPERIMENTS == 2_000


def test_noise_of_a_pair_is_what_was_asked_for():
    gains_SN = Clock(effect=0.05).gains_SN("halves", 2_000)
    assert gains_SN.std() == pytest.approx(0.04, rel=0.02)
    assert gains_SN.mean() == pytest.approx(math.log(1.05), abs=0.001)


@pytest.mark.parametrize("order", ORDERS)
def test_c40_drift_misleads_a_fixed_order_only(order):
    found = simulate.simulate(Clock(pairs=10, drift=0.1, noise=0.0), order)
    chosen, fixed = found["orders"][order], found["orders"]["fixed"]
    assert (chosen["verdict"], chosen["wins"], chosen["losses"]) == ("no verdict", 5, 5)
    assert (fixed["verdict"], fixed["wins"], fixed["losses"]) == ("slower", 0, 10)


def test_drift_misleads_a_fixed_order_with_noise_too():
    orders = simulate.simulate(Clock(drift=0.25, noise=0.01), "alternating")["orders"]
    assert orders["fixed"]["shares"]["slower"] > 0.8
    for order in ORDERS:
        assert orders[order]["shares"]["no verdict"] > 0.95


def test_shown_experiments():
    none = simulate.simulate(Clock(effect=0.0, drift=0.1), "alternating")
    assert simulate.verdict_of(none).word == "no verdict"
    assert simulate.verdict_of(simulate.simulate(Clock(effect=0.05), "alternating")).word == "faster"
    assert simulate.simulate(Clock(), "halves") == simulate.simulate(Clock(), "halves")


def test_pairs_needed():
    found = simulate.pairs_needed(0.05, 0.04, 0)
    assert found["pairs"] == 12 and found["power"] >= 0.8
    assert all(power < 0.8 for pairs, power in found["tried"].items() if pairs < 12)
    assert simulate.pairs_needed(-0.05, 0.04, 0)["pairs"] == 12
    assert simulate.pairs_needed(0.5, 0.01, 0)["pairs"] == FEWEST
    assert 20 <= simulate.pairs_needed(0.03, 0.04, 0)["pairs"] <= 30


@pytest.mark.parametrize(
    "effect, noise", [(0.0, 0.04), (0.05, 0.0), (0.001, 0.04), (0.05, 2.0), (-0.95, 0.04)]
)
def test_power_refuses_what_has_no_answer(effect, noise):
    with pytest.raises(WarmsetError):
        simulate.pairs_needed(effect, noise, 0)


def test_rules_compared_as_the_docs_show_them():
    """Both rules alone would keep the bars too; together they err least."""
    null_SN, effect_SN = (
        Clock().gains_SN("alternating", 2_000),
        Clock(effect=0.05).gains_SN("alternating", 2_000),
    )
    wrong = {name: float((rule(null_SN) != 0).mean()) for name, rule in simulate.RULES.items()}
    found = {name: float((rule(effect_SN) == 1).mean()) for name, rule in simulate.RULES.items()}
    assert wrong["both"] <= min(wrong.values()) and max(wrong.values()) <= 0.05
    assert found["interval"] > found["sign test"] >= found["both"] >= 0.8


def test_orders():
    assert first_arms(4, "alternating") == list("abab")
    assert first_arms(4, "halves") == list("aabb")
    assert first_arms(5, "halves") == list("aaabb")
    assert first_arms(3, "fixed") == list("aaa")
    for order in ORDERS:
        for pairs in range(1, 9):
            assert abs(first_arms(pairs, order).count("a") - pairs / 2) <= 0.5


def test_gains_do_not_depend_on_how_many_experiments_are_drawn():
    clock = Clock()
    assert np.array_equal(clock.gains_SN("alternating", 3), clock.gains_SN("alternating", 50)[:3])

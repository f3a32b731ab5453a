"""Every policy against a third reference in plain Python, on rows that hypothesis makes up."""

from __future__ import annotations

import math

import pure_routing as pure
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmset.kernels import reference
from warmset.routing import (
    AdditiveBias,
    CachePrior,
    CumulativeMass,
    DropCold,
    Exact,
    FewerPicks,
    MarginSwap,
    MaxRank,
    PolicyTable,
    RandomSwap,
    ResidentOnly,
    RouteContext,
    RouterRule,
    WindowJoint,
)
from warmset.routing.scores import clean

VALUES = [-math.inf, math.nan, math.inf, 0.0, -0.0, -1.5, -0.5, 0.25, 0.5, 1.0, 1.25, 3.0, 1.0000001]
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def windows(draw):
    """(rows, K, resident, ranks)."""
    num_experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, num_experts))
    value = st.sampled_from(VALUES) | st.floats(-4, 4, width=32)
    row = st.lists(value, min_size=num_experts, max_size=num_experts)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    resident = draw(st.sets(st.integers(0, num_experts - 1)))
    lo, hi = draw(st.integers(0, top_k)), draw(st.integers(0, top_k - 1))
    return rows, top_k, resident, (lo, hi)


def slots(num_experts: int, resident) -> torch.Tensor:
    return torch.tensor([3 + e if e in resident else -1 for e in range(num_experts)], dtype=torch.int32)


def route(policy, window, **context):
    rows, top_k, resident, _ = window
    rule = RouterRule(top_k=top_k)
    logits_TE = torch.tensor(rows, dtype=torch.float32)
    return policy.route(
        logits_TE,
        slots(len(rows[0]), resident),
        rule=rule,
        context=RouteContext(**context) if context else None,
    )


def check(routed, window, expect):
    """Ids, weights and counters of every row; `expect(row, own)` gives (ids, tail_cold or None, swaps or None)."""
    rows, top_k, resident, _ = window
    for t, row in enumerate(pure.clean(r) for r in rows):
        own = pure.own(row, top_k)
        if own is None:
            assert routed.error_T[t] == 1
            assert routed.ids_TK[t].tolist() == [-1] * top_k
            assert routed.weights_TK[t].abs().sum() == 0
            assert routed.counters_T5[t].sum() == 0
            continue
        ids, tail_cold, swaps = expect(row, own, t)
        ids = pure.same_set_keeps_order(own, ids)
        padded = ids + [-1] * (top_k - len(ids))
        assert routed.error_T[t] == 0
        assert routed.own_ids_TK[t].tolist() == own
        assert routed.ids_TK[t].tolist() == padded
        cold_before = sum(e not in resident for e in own)
        cold_after = sum(e not in resident for e in ids)
        tail_cold = cold_before if tail_cold is None else tail_cold
        swaps = len(set(ids) - set(own)) if swaps is None else swaps
        counters = [tail_cold, swaps, cold_before, cold_after, top_k - len(ids)]
        assert routed.counters_T5[t].tolist() == counters
        torch.testing.assert_close(
            routed.weights_TK[t],
            torch.tensor(pure.weights(row, padded), dtype=torch.float32),
            rtol=1e-5,
            atol=1e-7,
        )


@QUICK
@given(windows())
def test_exact(window):
    check(route(Exact(), window), window, lambda row, own, t: (own, None, None))


@QUICK
@given(windows(), st.sampled_from([-0.5, 0.0, 0.25, 0.75, 1.5, 1e30]))
def test_margin_swap(window, margin):
    _, _, resident, (lo, hi) = window
    check(
        route(MarginSwap(margin=margin, ranks=(lo, hi)), window),
        window,
        lambda row, own, t: pure.margin_swap(row, own, resident, margin, lo, hi),
    )


@QUICK
@given(windows(), st.sampled_from([0.0, 0.5, 2.0, 1e30]))
def test_window_joint_and_its_laws(window, margin):
    rows, top_k, resident, (lo, hi) = window
    cleaned = [pure.clean(row) for row in rows]
    joint = pure.window_joint(cleaned, top_k, resident, margin, lo, hi)

    def expect(row, own, t):
        tail_cold = pure.margin_swap(row, own, resident, margin, lo, hi)[1]
        return joint[t], tail_cold, sum(a != b for a, b in zip(joint[t], own, strict=True))

    routed = route(WindowJoint(margin=margin, ranks=(lo, hi)), window)
    check(routed, window, expect)
    alone = route(MarginSwap(margin=margin, ranks=(lo, hi)), window)

    def cold(ids_TK):
        return {e for ids in ids_TK.tolist() for e in ids if e >= 0 and e not in resident}

    assert cold(routed.ids_TK) == cold(alone.ids_TK)
    assert (routed.counters_T5[:, 1] <= alone.counters_T5[:, 1]).all()
    for t, row in enumerate(cleaned):
        if joint[t] is not None:
            scores = [sum(row[e] for e in ids[t].tolist()) for ids in (routed.ids_TK, alone.ids_TK)]
            assert scores[0] >= scores[1] or math.isclose(scores[0], scores[1], rel_tol=1e-9)


@QUICK
@given(windows(), st.sampled_from([-1.0, 0.0, 0.5, 2.0, 1e38]), st.integers(0, 5))
def test_additive_bias(window, beta, protect):
    _, top_k, resident, _ = window
    check(
        route(AdditiveBias(beta=beta, protect=protect), window),
        window,
        lambda row, own, t: (pure.additive_bias(row, top_k, resident, beta, protect), None, None),
    )


@QUICK
@given(windows(), st.sampled_from([0.0, 0.125, 0.5]), st.integers(0, 5))
def test_cache_prior(window, strength, protect):
    _, top_k, resident, _ = window
    check(
        route(CachePrior(strength=strength, protect=protect), window, mean_range_L=torch.tensor([4.0])),
        window,
        lambda row, own, t: (pure.additive_bias(row, top_k, resident, strength * 4.0, protect), None, None),
    )


@QUICK
@given(windows(), st.integers(0, 14), st.integers(0, 5))
def test_max_rank(window, limit, protect):
    _, top_k, resident, _ = window
    check(
        route(MaxRank(max_rank=limit, protect=protect), window),
        window,
        lambda row, own, t: (pure.max_rank(row, top_k, resident, protect, limit), None, None),
    )


@QUICK
@given(windows(), st.sampled_from([0.0, 0.3, 0.7]), st.integers(0, 5))
def test_cumulative_mass(window, mass, protect):
    _, top_k, resident, _ = window

    def expect(row, own, t):
        return pure.max_rank(row, top_k, resident, protect, pure.mass_rank(row, pure.f32(mass))), None, None

    check(route(CumulativeMass(mass=mass, protect=protect), window), window, expect)


@QUICK
@given(windows(), st.integers(1, 14))
def test_fewer_picks(window, k):
    check(route(FewerPicks(k=k), window), window, lambda row, own, t: (own[:k], None, None))


@QUICK
@given(windows())
def test_resident_only(window):
    _, top_k, resident, _ = window
    check(
        route(ResidentOnly(), window),
        window,
        lambda row, own, t: ([e for e in pure.ranking(row) if e in resident][:top_k], None, None),
    )


@QUICK
@given(windows(), st.sampled_from([0.0, 0.03, 0.3, 1.1]))
def test_drop_cold(window, weight):
    _, _, resident, _ = window

    def expect(row, own, t):
        given_weights = pure.weights(row, own)
        near = [abs(w - weight) < 1e-6 for w in given_weights]
        if any(near):  # a weight this close may round to either side
            return routed.ids_TK[t][routed.ids_TK[t] >= 0].tolist(), None, None
        return (
            [e for e, w in zip(own, given_weights, strict=True) if e in resident or w >= weight],
            None,
            None,
        )

    routed = route(DropCold(weight=weight), window)
    check(routed, window, expect)


@QUICK
@given(windows(), st.sampled_from([0.0, 0.5, 1e30]), st.integers(0, 3))
def test_random_swap_swaps_where_margin_swap_does(window, margin, seed):
    rows, _, resident, ranks = window
    routed = route(RandomSwap(margin=margin, ranks=ranks, seed=seed), window)
    alone = route(MarginSwap(margin=margin, ranks=ranks), window)
    assert torch.equal(routed.ids_TK != routed.own_ids_TK, alone.ids_TK != alone.own_ids_TK)
    assert torch.equal(routed.counters_T5, alone.counters_T5)
    for t, row in enumerate(pure.clean(r) for r in rows):
        ids = routed.ids_TK[t].tolist()
        new = [e for e, o in zip(ids, routed.own_ids_TK[t].tolist(), strict=True) if e != o]
        assert all(e in resident and row[e] > -math.inf for e in new)
        assert len(set(ids)) == len(ids) or ids[0] == -1


@QUICK
@given(windows(), st.data())
def test_swap_of_any_ids(window, data):
    """Repeats, padding and picks that no router would make."""
    rows, top_k, resident, (lo, hi) = window
    num_experts = len(rows[0])
    id_ = st.integers(-1, num_experts)
    ids = data.draw(
        st.lists(st.lists(id_, min_size=top_k, max_size=top_k), min_size=len(rows), max_size=len(rows))
    )
    margin = data.draw(st.sampled_from([-0.25, 0.0, 0.5, 10.0]))
    logits_TE = torch.tensor(rows, dtype=torch.float32)
    weights_TK = torch.rand(len(rows), top_k)
    routed = reference.swap_warp(
        logits_TE,
        logits_TE,
        slots(num_experts, resident),
        torch.tensor(ids, dtype=torch.int32),
        weights_TK,
        rule=RouterRule(top_k=top_k),
        table=PolicyTable.full(1, margin, lo, hi, top_k=top_k),
    )
    for t, row in enumerate(pure.clean(r) for r in rows):
        expected, tail_cold, swaps = pure.margin_swap(row, ids[t], resident, margin, lo, hi)
        assert routed.ids_TK[t].tolist() == expected
        assert routed.counters_T5[t, :2].tolist() == [tail_cold, swaps]
        if swaps == 0:
            assert torch.equal(routed.weights_TK[t], weights_TK[t])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@QUICK
@given(window=windows())
def test_weights(scoring, renormalize, window):
    rows, top_k, _, _ = window
    rule = RouterRule(top_k=top_k, scoring=scoring, renormalize=renormalize, scale=2.5)
    logits_TE = torch.tensor(rows, dtype=torch.float32)
    routed = Exact().route(logits_TE, slots(len(rows[0]), ()), rule=rule)
    for t, row in enumerate(clean(logits_TE).tolist()):
        if not routed.error_T[t] and max(row) < 80:
            ids = routed.ids_TK[t].tolist()
            expected = pure.weights(row, ids, renormalize=renormalize, scoring=scoring, scale=2.5)
            torch.testing.assert_close(
                routed.weights_TK[t], torch.tensor(expected, dtype=torch.float32), rtol=2e-5, atol=1e-6
            )

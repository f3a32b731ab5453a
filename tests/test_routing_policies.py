"""Policies as values: names and numbers, what is refused, tables in device memory, laws that hold for any input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from warmset.errors import PolicyError
from warmset.routing import (
    POLICIES,
    AdditiveBias,
    CachePrior,
    Exact,
    FewerPicks,
    MarginSwap,
    MaxRank,
    Policy,
    PolicyTable,
    RandomSwap,
    ResidentOnly,
    RouteContext,
    RouterRule,
    WindowJoint,
    default_ranks,
    describe,
    parse_policy,
    resolve_ranks,
)

RULE = RouterRule(top_k=10)
TEXTS = [
    "exact",
    "margin:margin=0.25,ranks=6-9",
    "margin:margin=0.25",
    "additive-bias:protect=2,beta=0.5",
    "cache-prior:protect=1,strength=0.125",
    "max-rank:protect=1,max-rank=20",
    "cumulative-mass:protect=1,mass=0.5",
    "window-joint:margin=0.5,ranks=0-3",
    "drop-cold:weight=0.05",
    "fewer-picks:k=6",
    "resident-only",
    "random-swap:margin=0.25,seed=7",
]


@dataclass(frozen=True)
class Own:
    """A user's policy."""

    depth: int = 3

    def route(self, logits_TE, slot_E, *, rule, bias_E=None, context=None):
        return FewerPicks(k=self.depth).route(logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)


def window(seed=0, num_rows=6, num_experts=96, share=0.4):
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_rows, num_experts, generator=generator)
    resident = torch.rand(num_experts, generator=generator) < share
    return logits_TE, torch.where(resident, 5, -1).int()


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_policy_are_the_same_thing(text):
    policy = parse_policy(text)
    assert isinstance(policy, Policy)
    assert describe(policy) == text
    assert parse_policy(describe(policy)) == policy


def test_every_policy_has_a_name():
    assert {text.split(":")[0] for text in TEXTS} == set(POLICIES)


def test_spellings():
    assert parse_policy("margin:margin=.25,ranks=6-9") == MarginSwap(margin=0.25, ranks=(6, 9))
    assert parse_policy("margin:ranks=3") == MarginSwap(ranks=(3, 3))
    assert parse_policy("max-rank:max_rank=4") == MaxRank(max_rank=4)
    own = parse_policy(f"{__name__}:Own:depth=2")
    assert own == Own(depth=2)
    assert describe(own) == f"{__name__}:Own:depth=2"
    assert parse_policy(f"{__name__}:Own") == Own()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nearest", "`policy` must be one of exact, margin, .*, module:Class, or a file .*. Got 'nearest'."),
        ("margin:width=3", "`policy` margin takes margin, ranks. Got 'width'."),
        ("margin:margin", "key=value"),
        ("margin:margin=1,margin=2", "twice"),
        ("margin:ranks=a-b", "`ranks` must be LO-HI, two whole numbers. Got 'a-b'."),
        ("margin:ranks=-1-3", "`ranks` must start at 0 or later. Got -1."),
        ("margin:margin=nan", "`margin` must be a finite number in float32. Got nan."),
        ("margin:margin=inf", "`margin` must be a finite number in float32. Got inf."),
        ("margin:margin=1e39", "`margin` must be a finite number in float32. Got 1e"),
        ("margin:margin=wide", "`margin` must be a finite number. Got 'wide'."),
        ("additive-bias", "`policy` additive-bias needs beta=..."),
        ("additive-bias:beta=1,protect=-1", "`protect` must be a whole number of at least 0. Got -1."),
        ("cumulative-mass:mass=1.5", "`mass` must be 0 to 1. Got 1.5."),
        ("fewer-picks:k=0", "`k` must be a whole number of at least 1. Got 0."),
        ("fewer-picks:k=2.5", "`k` must be a whole number"),
        ("drop-cold:weight=inf", "`weight` must be a finite number"),
        ("random-swap:seed=x", "`seed` must be a whole number"),
        ("no_such_module:Thing", "cannot be loaded"),
        ("math:pi", "must be a class with a method `route`"),
        ("warmset.routing:MarginSwap:margin=nan", "`margin` must be a finite number"),
    ],
)
def test_bad_text_is_one_sentence(text, sentence):
    with pytest.raises(PolicyError, match=sentence) as raised:
        parse_policy(text)
    assert "\n" not in str(raised.value)


def test_default_tail_is_the_last_40_percent():
    assert [default_ranks(k) for k in (10, 8, 4, 2, 1)] == [(6, 9), (5, 7), (3, 3), (1, 1), (0, 0)]


def test_ranks_past_the_end_are_capped_and_said():
    assert resolve_ranks((6, 99), 10) == (6, 9, "ranks 6-99 end at 9: a row has 10 picks")
    assert resolve_ranks((6, 9), 10) == (6, 9, None)
    lo, hi, _ = resolve_ranks((10**12, 10**13), 10)
    assert lo > hi
    table = MarginSwap(ranks=(6, 99)).table(RULE, num_layers=2)
    assert table.notes == ["ranks 6-99 end at 9: a row has 10 picks"]
    assert FewerPicks(k=99).table(RULE, num_layers=1).notes == ["k 99 is 10: a row has 10 picks"]
    assert AdditiveBias(beta=1.0, protect=99).table(RULE, num_layers=1).notes


@pytest.mark.parametrize("ranks", [(-1, 3), (1,), (0.5, 2), "6-9", 7])
def test_ranks_that_are_none_are_refused(ranks):
    with pytest.raises(PolicyError, match="`ranks` must"):
        MarginSwap(ranks=ranks)


@pytest.mark.parametrize("margin", [math.nan, math.inf, -math.inf, 1e300])
def test_a_margin_that_is_no_number_is_refused_everywhere(margin):
    with pytest.raises(PolicyError, match="finite"):
        MarginSwap(margin=margin)
    table = MarginSwap().table(RULE, num_layers=1)
    with pytest.raises(PolicyError, match="finite"):
        table.set_value(margin)


def test_a_table_is_read_by_layer_and_changed_in_place():
    logits_TE, slot_E = window()
    table = MarginSwap(margin=-9.0, ranks=(0, 9)).table(RULE, num_layers=3)
    pointer = table.margin_L.data_ptr()

    def swaps(layer):
        context = RouteContext(layer=layer, table=table)
        return int(MarginSwap().route(logits_TE, slot_E, rule=RULE, context=context).counters[1])

    assert [swaps(layer) for layer in range(3)] == [0, 0, 0]
    table.set_value(9.0, layer=1)
    assert swaps(0) == 0 < swaps(1)
    many = swaps(1)
    assert table.set_ranks((8, 99), layer=1) == "ranks 8-99 end at 9: a row has 10 picks"
    assert 0 < swaps(1) < many
    table.set_value(9.0)
    assert swaps(2) == many
    assert table.margin_L.data_ptr() == pointer


def test_a_margin_is_rounded_to_float32_once():
    logits_TE = torch.tensor([[1.0, 0.9]])
    gap = float(logits_TE[0, 0] - logits_TE[0, 1])  # float32
    rule = RouterRule(top_k=1)
    slot_E = torch.tensor([-1, 0], dtype=torch.int32)
    margin = math.nextafter(gap, 0.0)  # rounds to the gap in float32
    assert MarginSwap(margin=margin, ranks=(0, 0)).route(logits_TE, slot_E, rule=rule).ids_TK.tolist() == [
        [1]
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 1.0])
def test_laws_of_all_policies(text, share):
    policy = parse_policy(text)
    for seed in range(3):
        logits_TE, slot_E = window(seed, share=share)
        routed = policy.route(
            logits_TE, slot_E, rule=RULE, context=RouteContext(mean_range_L=torch.tensor([5.0]))
        )
        exact = Exact().route(logits_TE, slot_E, rule=RULE)
        assert torch.equal(routed.own_ids_TK, exact.ids_TK)
        tail_cold, swaps, before, after, dropped = routed.counters_T5.unbind(1)
        for t in range(logits_TE.shape[0]):
            ids = [e for e in routed.ids_TK[t].tolist() if e >= 0]
            assert len(set(ids)) == len(ids) == 10 - int(dropped[t])
            assert routed.ids_TK[t, len(ids) :].tolist() == [-1] * (10 - len(ids))
            assert routed.weights_TK[t, len(ids) :].abs().sum() == 0
            assert not ids or abs(float(routed.weights_TK[t].sum()) - 1) < 1e-5
            if set(ids) == set(exact.ids_TK[t].tolist()):
                assert torch.equal(routed.ids_TK[t], exact.ids_TK[t])
                assert torch.equal(routed.weights_TK[t], exact.weights_TK[t])
        assert torch.equal(before, exact.counters_T5[:, 2])
        if isinstance(policy, MarginSwap | WindowJoint | RandomSwap):
            assert (swaps <= tail_cold).all()
        if isinstance(policy, MarginSwap | RandomSwap):
            assert torch.equal(after, before - swaps)
        if share == 1.0 and not isinstance(policy, FewerPicks):
            assert int(swaps.sum()) == 0 and torch.equal(routed.ids_TK, exact.ids_TK)
        if isinstance(policy, ResidentOnly):
            assert int(after.sum()) == 0


def test_random_swap_depends_on_seed_and_position_not_on_the_window():
    logits_TE, slot_E = window()
    policy = RandomSwap(margin=9.0, seed=1)

    def ids(policy, rows, positions):
        context = RouteContext(position_T=torch.tensor(positions))
        return policy.route(logits_TE[rows], slot_E, rule=RULE, context=context).ids_TK

    together = ids(policy, slice(None), [3, 4, 5, 6, 7, 8])
    assert torch.equal(together, ids(policy, slice(None), [3, 4, 5, 6, 7, 8]))
    assert torch.equal(together[2:3], ids(policy, slice(2, 3), [5]))
    assert not torch.equal(together, ids(RandomSwap(margin=9.0, seed=2), slice(None), [3, 4, 5, 6, 7, 8]))
    assert not torch.equal(together, ids(policy, slice(None), [13, 14, 15, 16, 17, 18]))


def test_cache_prior_without_means_is_the_routers_pick():
    logits_TE, slot_E = window()
    routed = CachePrior(strength=0.5).route(logits_TE, slot_E, rule=RULE)
    assert torch.equal(routed.ids_TK, routed.own_ids_TK)
    assert routed.range_T is not None
    assert torch.equal(routed.range_T, logits_TE.amax(1) - logits_TE.amin(1))


def test_a_table_of_one_layer_for_any_device_has_one_entry_a_layer():
    table = PolicyTable.full(48, 0.25, 6, 9, top_k=10)
    assert table.margin_L.shape == table.lo_L.shape == table.hi_L.shape == (48,)
    assert (table.margin_L.dtype, table.lo_L.dtype, table.hi_L.dtype) == (
        torch.float32,
        torch.int32,
        torch.int32,
    )

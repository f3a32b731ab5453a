"""Admission on integers: the laws of lfu and lru, a naive form beside the heaps, and the same in an engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conftest import PROMPT_IDS
from helpers import decode_with_logits, open_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from warmset import admission as adm
from warmset.admission import Admission, Arrival, Frequency
from warmset.config import SamplingConfig
from warmset.routing import MarginSwap
from warmset.text import load_tokenizer

LAYERS, EXPERTS, SIZE = 3, 7, 10
TOTAL = LAYERS * EXPERTS


class Naive:
    """The same rule with nothing clever: every weight is compared in every window."""

    def __init__(self, rule, owners, budget, prior):
        self.rule, self.owners, self.budget, self.credit = rule, list(owners), budget, 0
        self.worth, self.now, self.windows, self.pending = adm.FIRST_WORTH, 0, 0, []
        self.home = set(owners) - {None} if prior and any(prior) and rule == "lfu" else set()
        if rule == "lru":
            self.values = [-len(owners) - 1] * TOTAL
            for slot, owner in enumerate(owners):
                if owner is not None:
                    self.values[owner] = -slot
        else:
            mass = 6 * adm.FIRST_WORTH * 2**adm.MEMORY_SHIFT
            self.values = [
                count * mass // sum(prior) if prior and any(prior) else 0 for count in prior or [0] * TOTAL
            ]

    def weight(self, expert):
        return self.values[expert] + (adm.HOME_PICKS * self.worth if expert in self.home else 0)

    def after_window(self, rows):
        for slot, expert in self.pending:
            self.owners[slot] = expert
        awaited = []
        self.windows += 1
        self.now += 1
        for row in rows:
            self.worth += self.worth // 2**adm.MEMORY_SHIFT
            for expert in row:
                self.values[expert] = self.now if self.rule == "lru" else self.values[expert] + self.worth
        if self.rule == "lfu" and self.worth >= adm.MOST_WORTH:
            self.worth //= 2**32
            self.values = [value // 2**32 for value in self.values]
        self.credit = min(max(self.budget, SIZE) if self.budget else 0, self.credit + self.budget)
        wanted = {expert for row in rows for expert in row} - set(self.owners)
        order = lambda e: (-self.weight(e), (e // EXPERTS - self.windows) % LAYERS, e)  # noqa: E731
        for expert in sorted(wanted, key=order):
            taken = {slot for slot, _ in awaited}
            free = [slot for slot, owner in enumerate(self.owners) if owner is None and slot not in taken]
            residents = sorted((self.weight(owner), owner) for owner in self.owners if owner is not None)
            step = adm.STEP_PICKS * self.worth if self.rule == "lfu" else 0
            if self.credit < SIZE or (not free and not residents):
                break
            if free:
                slot = free[0]
            elif self.weight(expert) - residents[0][0] > step:
                slot = self.owners.index(residents[0][1])
                self.owners[slot] = None
            else:
                break
            self.credit -= SIZE
            awaited.append((slot, expert))
        self.pending = awaited
        return awaited


rows_of = st.lists(st.lists(st.integers(0, TOTAL - 1), max_size=6, unique=True), min_size=1, max_size=4)


@st.composite
def cases(draw):
    slots = draw(st.integers(0, TOTAL))
    chosen = draw(st.permutations(range(TOTAL)))[:slots]
    owners = [None if draw(st.integers(0, 5)) == 0 else expert for expert in chosen]
    prior = draw(st.one_of(st.none(), st.lists(st.integers(0, 50), min_size=TOTAL, max_size=TOTAL)))
    budget = draw(st.sampled_from([0, 3, 10, 25, 10**9]))
    return draw(st.sampled_from(["lfu", "lru"])), owners, budget, prior, draw(st.lists(rows_of, max_size=40))


def make(rule, owners, budget=10**9, prior=None):
    return Admission(
        rule, num_layers=LAYERS, num_experts=EXPERTS, owners=owners, expert_bytes=SIZE, budget_bytes=budget,
        prior=prior, picks_a_row=6,
    )  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(cases())
def test_the_heaps_decide_as_the_naive_form(case):
    rule, owners, budget, prior, windows = case
    quick, naive = make(rule, owners, budget, prior), Naive(rule, owners, budget, prior)
    for rows in windows:
        asked = quick.after_window(rows)
        assert [(arrival.slot, arrival.expert) for arrival in asked] == naive.after_window(rows)
        assert quick.owners == naive.owners


@settings(deadline=None, max_examples=150)
@given(cases())
def test_laws_of_any_rule(case):
    """Only wanted experts come in, none twice; nobody that is hotter leaves for them; the budget holds on average."""
    rule, owners, budget, prior, windows = case
    admission = make(rule, owners, budget, prior)
    moved = 0
    for number, rows in enumerate(windows, start=1):
        before = dict(enumerate(admission.owners))
        arriving = {arrival.slot: arrival.expert for arrival in admission._pending}
        asked = admission.after_window(rows)
        resident = {**before, **arriving}
        picked = {expert for row in rows for expert in row}
        assert len({a.slot for a in asked}) == len({a.expert for a in asked}) == len(asked)
        for arrival in asked:
            assert arrival.expert in picked and arrival.expert not in resident.values()
            assert admission.owners[arrival.slot] is None and not admission.is_resident(arrival.expert)
            left = resident[arrival.slot]
            assert left is None or admission._weight(arrival.expert) > admission._weight(left)
        moved += SIZE * len(asked)
        assert moved <= number * budget + SIZE
        stays = [owner for owner in admission.owners if owner is not None]
        assert len(stays) == len(set(stays)) and all(admission.is_resident(owner) for owner in stays)


def test_lru_keeps_what_was_picked_last():
    admission = make("lru", [0, 1, 2])
    admission.after_window([[0, 2]])
    assert admission.after_window([[5, 6]]) == [Arrival(1, 5), Arrival(0, 6)]  # 1 never, then 0 before 2
    assert admission.after_window([[5, 6]]) == [] and admission.owners == [6, 5, 2]


def test_lru_never_turns_out_an_expert_of_the_same_window():
    admission = make("lru", [0, 1])
    assert admission.after_window([[0, 1, 2, 3]]) == []


def test_lfu_wants_more_than_a_step():
    admission = make("lfu", [0])
    admission.after_window([[0]])
    assert admission.after_window([[1]]) == []  # hotter, by less than a step
    assert admission.after_window([[1]]) == [Arrival(0, 1)]


def test_a_resident_of_the_profile_is_at_home():
    prior = [0] * TOTAL
    prior[20] = 1  # some expert elsewhere has all the heat: the residents have none, but their home
    admission = make("lfu", [0, 1], prior=prior)
    windows = 0
    while not admission.after_window([[2]]):
        windows += 1
    assert windows == adm.HOME_PICKS + adm.STEP_PICKS


def test_a_switch_of_text_is_followed_and_the_old_text_forgotten():
    draw = random.Random(3)
    old, new = range(6), range(6, 12)
    admission = make("lfu", list(old), prior=[int(e in old) for e in range(TOTAL)])
    for _ in range(400):
        admission.after_window([draw.sample(old, 3)])
    assert set(admission.owners) == set(old)
    windows = 0
    while set(admission.owners) != set(new):
        admission.after_window([draw.sample(new, 3)])
        windows += 1
    assert windows < 300


def test_a_small_budget_saves_up_for_a_large_expert():
    admission = make("lru", [0], budget=4)
    asked = [bool(admission.after_window([[1 + number]])) for number in range(9)]
    assert asked == [False, False, True] * 3


def test_what_arrives_is_resident_one_window_later():
    admission = make("lfu", [None])
    assert admission.after_window([[3]]) == [Arrival(0, 3)] and not admission.is_resident(3)
    assert admission.after_window([[3]]) == [] and admission.is_resident(3)


def test_heat_that_grew_past_its_limit_is_scaled_down_and_keeps_its_order():
    heat = Frequency(3, None, 2)
    scaled = [heat.see([[0]] if number % 3 else [[0, 1]]) for number in range(6000)]
    assert sum(scaled) == 2 and heat.worth < adm.MOST_WORTH
    assert heat.values[0] > heat.values[1] > heat.values[2] == 0


def test_layers_take_turns_among_equals():
    admission = make("lru", [0], budget=SIZE)
    came = []
    for _ in range(6):
        row = [
            layer * EXPERTS + 5 for layer in range(LAYERS) if not admission.is_resident(layer * EXPERTS + 5)
        ]
        came += [arrival.expert // EXPERTS for arrival in admission.after_window([row])]
    assert set(came) == set(range(LAYERS))


# -- in an engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["lfu", "lru"])
@pytest.mark.parametrize("family", ["qwen4_exp", "mixtral"])
def test_exact_mode_is_exact_while_experts_come_and_go(checkpoints, family, rule):
    expected = decode_with_logits(open_engine(checkpoints[family], "all"), PROMPT_IDS, 40)
    for slots in ("10%", "50%"):
        engine = open_engine(checkpoints[family], slots, admission=rule, check_slots=True)
        tokens, logits = decode_with_logits(engine, PROMPT_IDS, 40)
        assert tokens == expected[0] and torch.equal(logits, expected[1])
        assert engine.stats()["admission"]["moves"] > 0
        assert_mirrored(engine)


def assert_mirrored(engine) -> None:
    """Admission knows the slots as they are, those that are awaited too."""
    engine.slots.check_integrity()
    residency = engine.residency
    assert residency.admission.owners == residency._owners()
    awaited = [
        (move.slot, move.layer * residency._num_experts + move.expert) for move in engine.slots.pending
    ]
    assert [(arrival.slot, arrival.expert) for arrival in residency.admission._pending] == awaited


def test_experts_that_a_policy_swapped_away_are_brought_in(checkpoints, prompt_ids):
    """Trap of the field: swaps hide what is wanted. Heat is of the router's own picks, so fewer swaps are needed."""
    swaps, hits = {}, {}
    for rule in ("off", "lfu"):
        engine = open_engine(
            checkpoints["qwen3_moe"], "30%", MarginSwap(margin=99.0, ranks=(0, 3)), admission=rule
        )
        list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=120)))
        swaps[rule], hits[rule] = engine.stats()["routing"]["swaps"], engine.stats()["routing"]["cold_before"]
    assert swaps["lfu"] < 0.8 * swaps["off"] and hits["lfu"] < 0.8 * hits["off"]


def test_all_resident_or_no_slot_nothing_is_decided(checkpoints, prompt_ids):
    for slots in ("all", "0"):
        engine = open_engine(checkpoints["mixtral"], slots, admission="lfu")
        assert not engine.residency.watches
        list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=10)))
        assert engine.stats()["admission"] == {"rule": "lfu", "moves": 0, "bytes": 0}


def test_rejected_rows_change_no_heat(checkpoints, prompt_ids):
    engines = [open_engine(checkpoints["olmoe"], "30%", admission="lfu") for _ in range(2)]
    for engine, junk in zip(engines, ([], [11, 12]), strict=True):
        sequence = engine.windows.start()
        engine.windows.read_prompt(sequence, prompt_ids[:2])
        for token in prompt_ids[2:]:
            engine.windows.verify(sequence, [token, *junk])
            engine.windows.commit(sequence, 1)
    assert engines[0].residency.admission.heat.values == engines[1].residency.admission.heat.values
    assert engines[0].slots.owner == engines[1].slots.owner


def test_a_copy_that_fails_is_reported_and_is_no_hit(checkpoints, prompt_ids, monkeypatch):
    engine = open_engine(checkpoints["olmoe"], "30%", admission="lru")
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=10)))
    begin = engine.slots._begin

    def broken(move, store):
        copy = begin(move, store)
        copy.wait()
        copy._wait = lambda: (_ for _ in ()).throw(OSError("gone"))
        return copy

    monkeypatch.setattr(engine.slots, "_begin", broken)
    with pytest.raises(OSError, match="gone"):
        list(engine.decode(prompt_ids[::-1], SamplingConfig(max_new_tokens=40)))
    monkeypatch.setattr(engine.slots, "_begin", begin)
    assert_mirrored(engine)
    assert None in engine.slots.owner
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=40)))
    assert_mirrored(engine)
    assert None not in engine.residency.admission.owners or engine.slots.pending


def test_slots_shrink_and_grow_under_a_cache_that_learns(checkpoints, prompt_ids):
    expected = list(
        open_engine(checkpoints["olmoe"], "all").decode(prompt_ids, SamplingConfig(max_new_tokens=60))
    )
    engine = open_engine(checkpoints["olmoe"], 16, admission="lfu", check_slots=True)
    tokens = []
    for number, token in enumerate(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=60))):
        tokens.append(token)
        if number % 10 == 5:
            keep = engine.residency.admission.hottest()[:5]
            engine.residency.resize((5, 20, 0, 32, 9, 3)[number // 10])
            assert_mirrored(engine)
            stayed = [owner for owner in engine.residency.admission.owners if owner is not None]
            assert len(stayed) >= min(len(keep), engine.slots.num_slots)
            assert set(keep[: engine.slots.num_slots]) <= set(stayed) | set(keep[engine.slots.num_slots :])
    assert tokens == expected
    assert_mirrored(engine)


def test_frozen_inside_and_learning_again_after(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["olmoe"], "30%", admission="lru")
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=10)))
    with engine.residency.frozen():
        owners = list(engine.slots.owner)
        list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=20)))
        assert engine.slots.owner == owners and not engine.slots.pending
    list(engine.decode(prompt_ids[::-1], SamplingConfig(max_new_tokens=20)))
    assert engine.slots.owner != owners
    assert_mirrored(engine)


def test_closing_waits_for_copies_under_way(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["olmoe"], "30%", admission="lru")
    answer = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=30))
    while not engine.slots.pending:
        next(answer)
    engine.close()
    assert not engine.slots.pending


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["off", "lfu", "lru"])
def test_c14_a_long_prompt_leaves_the_working_set(rule):
    """C14: warm decode, a prompt of 4,096 tokens of another kind, decode again."""
    engine = open_engine("builtin:tiny", "33%", admission=rule)
    tokenizer = load_tokenizer(engine.prepared)
    ids = tokenizer.encode("When a query is executed, the server")
    code = tokenizer.encode(Path(adm.__file__).read_text(encoding="utf-8"))
    sampling = SamplingConfig(max_new_tokens=150, temperature=0.7)
    list(engine.decode(ids, sampling))
    engine.conversation.forget()
    list(engine.decode(ids, sampling))
    before, residents = engine.stats()["hit_rate"], list(engine.slots.owner)
    list(engine.decode((code * 4)[:4096], SamplingConfig(max_new_tokens=1)))
    engine.residency.settle()
    assert engine.slots.owner == residents
    engine.conversation.forget()
    list(engine.decode(ids, sampling))
    assert engine.stats()["hit_rate"] > before - 0.05

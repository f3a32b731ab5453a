"""The search for margins within a budget, the policy file it writes, and free answers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from helpers import open_engine

import warmset
from warmset.errors import PolicyError, WarmsetError
from warmset.measure.price.budget import GRID, OFF, Point, alone, choose_steps, find_by_layer, find_single
from warmset.measure.price.documents import documents_of
from warmset.measure.price.free import FreeText, shipped_prompts
from warmset.measure.price.run import PriceConfig, Source, price_engine, run, scored_text
from warmset.measure.price.session import Search, write_policy_file
from warmset.measure.price.sweep import all_policies, cold_with
from warmset.routing import FewerPicks, MarginSwap, RouterRule, describe, parse_policy
from warmset.routing.parse import policy_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Model:
    """Three layers whose KL and bytes are known functions of their margins, and add up."""

    costs, gains = (1.0, 4.0, 0.5), (0.3, 0.2, 0.1)

    def __init__(self) -> None:
        self.measured: list[MarginSwap] = []

    def __call__(self, policy: MarginSwap) -> Point:
        self.measured.append(policy)
        margins = policy.margin if isinstance(policy.margin, tuple) else (policy.margin,) * 3
        kl = saved = 0.0
        for margin, cost, gain in zip(margins, self.costs, self.gains, strict=True):
            if margin > 0:
                kl += cost * margin**2 * 1e-2
                saved += gain * (1 - np.exp(-2 * margin))
        return Point(policy, kl, saved)

    def curves(self) -> list[list[tuple[float, float, float]]]:
        found = [[Model()(alone(layer, margin, 3)) for margin in GRID] for layer in range(3)]
        return [
            [(margin, point.excess_kl, point.bytes_saved) for margin, point in zip(GRID, points, strict=True)]
            for points in found
        ]


def test_one_margin_meets_the_budget_and_does_not_pass_it():
    points = find_single(Model(), 0.01)
    best = points[-1]
    assert best.excess_kl <= 0.01 and best.excess_kl >= 0.96 * 0.01
    assert best.bytes_saved == max(point.bytes_saved for point in points if point.excess_kl <= 0.01)


def test_a_margin_a_layer_saves_more_at_the_same_budget():
    single = find_single(Model(), 0.01)[-1]
    model = Model()
    best = find_by_layer(model, model.curves(), 0.01)[-1]
    assert best.excess_kl <= 0.01 and best.bytes_saved > 1.05 * single.bytes_saved
    assert best.policy.margin[0] > best.policy.margin[1], "the layer that costs more gets less"
    assert len(model.measured) <= 9


def test_steps_are_greedy_and_stay_within_the_budget():
    curves = [
        [(OFF, 0.0, 0.0), (1.0, 1.0, 10.0), (2.0, 5.0, 11.0)],
        [(OFF, 0.0, 0.0), (1.0, 2.0, 4.0), (2.0, 2.5, 30.0)],
    ]
    assert choose_steps(curves, 0.5) == [OFF, OFF]
    assert choose_steps(curves, 1.0) == [1.0, OFF]
    assert choose_steps(curves, 2.6) == [OFF, 2.0], (
        "30 for 2.5 comes before 10 for 1, over a point in between"
    )
    assert choose_steps(curves, 3.5) == [1.0, 2.0]
    assert choose_steps(curves, 7.5) == [2.0, 2.0]


def test_greedy_is_near_the_best_of_all_combinations():
    generator = np.random.default_rng(0)
    for _ in range(30):
        curves = []
        for _ in range(4):
            kl = np.concatenate([[0], generator.uniform(0.05, 0.5, 5)]).cumsum()
            saved = np.concatenate([[0], np.sort(generator.uniform(0.1, 1, 5))[::-1]]).cumsum()
            curves.append(
                [(float(n), float(k), float(s)) for n, (k, s) in enumerate(zip(kl, saved, strict=True))]
            )
        chosen = [int(margin) for margin in choose_steps(curves, 2.0)]
        saved = sum(curve[place][2] for curve, place in zip(curves, chosen, strict=True))
        assert sum(curve[place][1] for curve, place in zip(curves, chosen, strict=True)) <= 2.0
        best = max(
            sum(curve[place][2] for curve, place in zip(curves, places, strict=True))
            for places in itertools.product(range(6), repeat=4)
            if sum(curve[place][1] for curve, place in zip(curves, places, strict=True)) <= 2.0
        )
        assert saved >= 0.85 * best


def test_a_budget_that_nothing_meets_is_one_sentence():
    with pytest.raises(WarmsetError, match="budget-kl 1e-40 is too small"):
        find_single(Model(), 1e-40)
    with pytest.raises(WarmsetError, match="no margin that saves a byte"):
        find_single(lambda policy: Point(policy, 0.0, 0.0), 1.0)
    with pytest.raises(WarmsetError, match="no layer stays within it"):
        find_by_layer(Model(), Model().curves(), 1e-12)


def words(seed: int, count: int) -> str:
    generator = np.random.default_rng(seed)
    return " ".join("".join(chr(97 + c) for c in generator.integers(0, 26, 6)) for _ in range(count))


def test_search_on_one_text_and_report_on_another(checkpoints, tmp_path):
    engine = warmset.Engine.load(checkpoints["qwen3_moe"], slots="33%")
    tokens, config = engine.tokens, PriceConfig(controls=False)
    calibration = Source("calibration", documents_of([words(1, 30)]))
    reported = scored_text(Source.of(words(2, 30)), engine.tokenizer, config, tokens)
    tail = (0, 3)
    kl = price_engine(tokens, reported, config, "33%", None).arm(MarginSwap(margin=0.25, ranks=tail))["kl"]
    search = Search(
        tokens, engine.tokenizer, reported, config, "33%", calibration=calibration, positions=60, ranks=tail
    )
    found = search.find(kl)
    assert all(points[-1].excess_kl <= kl for points in (found.single, found.by_layer))
    folder = search._pricing.work.folder
    kept = len(list(folder.glob("pass-*")))
    search.find(kl)
    assert len(list(folder.glob("pass-*"))) == kept, "a second search needs no new pass"
    search.finish()
    report = run(price_engine(tokens, reported, config, "33%", None), found.policies).results
    results = found.results(tokens.identity(), report["policies"])
    assert results["calibration"]["token_hash"] != report["token_hash"]
    saved = {arm["policy"]: arm["bytes_saved"] for arm in report["policies"]}
    one, each = (saved[results[side]["policy"]] for side in ("single", "by_layer"))
    assert results["compared"] == {"bytes_saved_ratio": pytest.approx(each / one), "excess_kl_ratio": None}
    write_policy_file(tmp_path / "p.json", results, "x", report)
    policy = parse_policy(str(tmp_path / "p.json"))
    assert policy == found.by_layer[-1].policy and len(policy.margin) == 2
    held = json.loads((tmp_path / "p.json").read_text())
    assert held["fingerprint"] == tokens.identity().fingerprint and held["measured"]["excess_kl"] is None
    again = open_engine(checkpoints["qwen3_moe"], "33%", policy)
    assert again.windows.routing.table.value_L.tolist() == pytest.approx(list(policy.margin))
    with pytest.raises(PolicyError, match=r"one for each of the 2 layers. Got 3"):
        open_engine(checkpoints["qwen3_moe"], "33%", MarginSwap(margin=(0.1, 0.2, 0.3)))


def test_a_calibration_text_that_is_part_of_the_other_is_refused(checkpoints):
    engine = warmset.Engine.load(checkpoints["qwen3_moe"], slots="33%")
    config = PriceConfig()
    reported = scored_text(Source.of(words(1, 80)), engine.tokenizer, config, engine.tokens)
    same = Source("mine", documents_of([words(1, 70)]))
    with pytest.raises(WarmsetError, match=r"must share no run of 50 tokens. Got"):
        Search(engine.tokens, engine.tokenizer, reported, config, "33%", calibration=same, positions=100)


# -- policy files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.25, (0.1, 0.2, -1.0), (0.5,), (OFF, 1e-3)])
def test_a_policy_file_gives_an_equal_policy(tmp_path, margin):
    policy, file = MarginSwap(margin=margin, ranks=(2, 3)), tmp_path / "p.json"
    file.write_text(policy_file(policy, {"model": "x"}))
    assert parse_policy(str(file)) == policy == parse_policy(describe(policy))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not whole JSON"),
        ("[]", "is no warmset-policy of version 1"),
        ('{"format": "warmset-policy", "version": 2, "policy": "exact"}', "of version 1"),
        ('{"format": "warmset-policy", "version": 1, "policy": 3}', "of version 1"),
        ('{"format": "warmset-policy", "version": 1, "policy": "nearest"}', "`policy` must be one of"),
        ('{"format": "warmset-policy", "version": 1, "policy": "p.json"}', "not the name of another file"),
    ],
)
def test_bad_policy_files_are_one_sentence(tmp_path, content, sentence):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(PolicyError, match=sentence):
        parse_policy(str(file))


def test_a_missing_policy_file_is_one_sentence(tmp_path):
    with pytest.raises(PolicyError, match=r"none\.json cannot be read: No such file"):
        parse_policy(str(tmp_path / "none.json"))


def test_margins_of_layers_are_checked():
    with pytest.raises(PolicyError, match=r"one for each of the 4 layers. Got 2"):
        MarginSwap(margin=(0.1, 0.2)).table(RouterRule(top_k=4), num_layers=4)
    with pytest.raises(PolicyError, match=r"one a layer. Got none"):
        MarginSwap(margin=())
    with pytest.raises(PolicyError, match=r"`margin` must be a finite number"):
        MarginSwap(margin=(0.1, float("nan")))


# -- the sweep ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [2, 4, 8, 10])
def test_every_family_can_be_made_for_any_number_of_picks(top_k):
    families = all_policies(top_k)
    every = [policy for policies in families.values() for policy in policies]
    assert len({describe(policy) for policy in every}) == len(every) > 20
    assert {describe(policy).partition(":")[0] for policy in every} == set(families)


def test_more_slots_with_exact_routing_read_what_an_engine_with_them_reads(checkpoints, tmp_path):
    few, more = (open_engine(checkpoints["qwen3_moe"], slots) for slots in ("33%", "60%"))
    text = scored_text(Source.of(words(3, 40)), warmset.text.load_tokenizer(few.prepared), PriceConfig(), few)
    off = price_engine(few, text, PriceConfig(), "33%", None).measurement.reference()
    pricing = price_engine(more, text, PriceConfig(), "60%", None)
    read = pricing.summary.traffic(pricing.measurement.reference())["cold_experts_per_token"]
    assert cold_with(off.routing, more.windows.routing.slot_LE) == pytest.approx(read)
    assert 0 < read < cold_with(off.routing, few.windows.routing.slot_LE)


# -- free answers ---------------------------------------------------------------------------------------------


def test_free_answers_part_where_a_policy_acts_and_nowhere_where_it_does_not(checkpoints):
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    prompts = [[5, 6, 7], [900, 3, 44, 1]]
    free = FreeText(engine, prompts, new_tokens=30, temperature=1.0)
    idle = free.policy(MarginSwap(margin=-100.0))
    assert idle["same"] == 2 and idle["parts_at"] == [None] * 2 and idle["loss_change"] == 0.0
    busy = free.policy(FewerPicks(k=1))
    assert busy["same"] < 2 and busy["loss"] != busy["loss_off"]
    null = free.null()
    assert null["policy"] == "null" and null["same"] >= busy["same"]
    assert engine.policy is None


def test_shipped_prompts():
    prompts = shipped_prompts()
    assert len(prompts) == len(set(prompts)) == 20 and all(prompts)

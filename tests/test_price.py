"""A price through the real decode path: against transformers, with its controls, and what it refuses to say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import open_engine

import warmset
from warmset.errors import WarmsetError
from warmset.measure.price.controls import RoundingNull, round_once
from warmset.measure.price.documents import ScoredText, Segment
from warmset.measure.price.measurement import Measurement, Pass, check_tokens
from warmset.measure.price.run import PriceConfig, price_engine, run
from warmset.measure.price.scorers import EngineScorer, TransformersScorer
from warmset.measure.price.work import Work
from warmset.routing import CachePrior, DropCold, FewerPicks, MarginSwap

WIDE = MarginSwap(margin=4.0, ranks=(1, 3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def some_text(positions: int = 60, seed: int = 0) -> ScoredText:
    """Two documents of random tokens, the second one of another kind; a window of 4 ends short in both."""
    generator = np.random.default_rng(seed)
    first = positions // 2 + 1
    ids = [tuple(generator.integers(1, 8192, size=n + 2).tolist()) for n in (first, positions - first)]
    return ScoredText((Segment(0, "prose", ids[0], 0), Segment(1, "code", ids[1], first)))


def measurement_of(scorer, folder, text: ScoredText | None = None, rows: int = 4, **more) -> Measurement:
    work = Work(folder, {"test": 1}, resume=more.pop("resume", False))
    return Measurement(scorer, text or some_text(), work, rows=rows, **more)


# -- against transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_moe", "mixtral"])
def test_the_price_is_that_of_transformers_own_model(checkpoints, tmp_path, family):
    """The same policy put into transformers' own model by hooks: the same picks, KL and losses."""
    from transformers import AutoModelForCausalLM

    policy = MarginSwap(margin=4.0, ranks=(0, 3))
    engine = open_engine(checkpoints[family], "33%")
    plain = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32).eval()
    other = TransformersScorer(plain, engine.windows.routing.slot_LE.clone())
    ours = measurement_of(EngineScorer(engine), tmp_path / "ours")
    theirs = measurement_of(other, tmp_path / "theirs")
    for name in ("reference", "policy"):
        one, two = ((m.reference() if name == "reference" else m.policy(policy)) for m in (ours, theirs))
        assert np.array_equal(one.routing.own_NLK, two.routing.own_NLK)
        assert np.array_equal(one.routing.moved_NLK, two.routing.moved_NLK)
        assert np.array_equal(one.routing.cold_WL, two.routing.cold_WL)
        assert np.allclose(one.loss_N, two.loss_N, atol=1e-4)
        assert np.allclose(one.kl_N, two.kl_N, atol=1e-5, rtol=1e-3)
    assert one.routing.swaps_N.sum() > 10 and one.kl_N.mean() > 1e-3
    before = plain(torch.tensor([[5, 6, 7, 8]])).logits
    other.close()
    assert torch.equal(before, plain(torch.tensor([[5, 6, 7, 8]])).logits)


@pytest.mark.parametrize("policy", [DropCold(weight=0.3), FewerPicks(k=2)])
def test_dropped_picks_weigh_nothing_in_transformers_too(checkpoints, tmp_path, policy):
    from transformers import AutoModelForCausalLM

    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    plain = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3_moe"], dtype=torch.float32).eval()
    other = TransformersScorer(plain, engine.windows.routing.slot_LE.clone())
    ours = measurement_of(EngineScorer(engine), tmp_path / "ours").policy(policy)
    theirs = measurement_of(other, tmp_path / "theirs").policy(policy)
    assert ours.routing.dropped_N.sum() > 10
    assert np.array_equal(ours.routing.dropped_N, theirs.routing.dropped_N)
    assert np.allclose(ours.kl_N, theirs.kl_N, atol=1e-5, rtol=1e-3)


# -- what is counted ------------------------------------------------------------------------------------------


def test_cold_experts_are_those_that_the_engine_read(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    measurement = measurement_of(EngineScorer(engine), tmp_path)
    for find in (measurement.reference, lambda: measurement.policy(WIDE)):
        engine.windows.reset_counts()
        found = find()
        assert found.routing.cold_WL.sum() == engine.runner.counts.cold_experts
        assert found.routing.swaps_N.sum() == engine.windows.counts.routing()["swaps"]
        assert found.routing.window_N[-1] + 1 == len(found.routing.cold_WL) == engine.windows.counts.windows
    assert found.routing.moved_NLK.sum() == found.routing.swaps_N.sum() > 0
    assert found.routing.moved_NLK[:, :, 0].sum() == 0, "rank 0 is not in the tail"


def test_simulated_residency_gives_the_same_bits(checkpoints, tmp_path):
    """Exact mode does not depend on where an expert lies, so a mask over a loaded model gives the real figures."""
    real = open_engine(checkpoints["qwen4_exp"], "33%")
    loaded = open_engine(checkpoints["qwen4_exp"], "all")
    config = PriceConfig(simulate_residency=True)
    pricing = price_engine(loaded, some_text(), config, "33%", None)
    one = measurement_of(EngineScorer(real), tmp_path).policy(WIDE)
    two = pricing.measurement.policy(WIDE)
    assert np.array_equal(one.kl_N, two.kl_N) and np.array_equal(one.loss_N, two.loss_N)
    assert np.array_equal(one.routing.cold_WL, two.routing.cold_WL)
    assert loaded.runner.counts.cold_experts == 0


def test_windows_of_every_size_give_the_same_swaps_when_residency_is_frozen(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    found = [
        measurement_of(EngineScorer(engine), tmp_path / str(rows), rows=rows).policy(WIDE) for rows in (1, 4)
    ]
    assert np.array_equal(found[0].routing.moved_NLK, found[1].routing.moved_NLK)
    assert np.allclose(found[0].kl_N, found[1].kl_N, atol=1e-5, rtol=1e-3)
    assert found[0].routing.cold_WL.sum() > found[1].routing.cold_WL.sum(), "rows of a window share reads"


def test_a_policy_that_learns_starts_anew_in_every_pass(checkpoints, tmp_path):
    """CachePrior keeps means over past rows: a second pass must not start with those of the first."""
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    policy = CachePrior(strength=0.3)
    found = [measurement_of(EngineScorer(engine), tmp_path / str(n)).policy(policy) for n in range(2)]
    assert np.array_equal(found[0].kl_N, found[1].kl_N) and found[0].routing.swaps_N.sum() > 0


def test_live_residency_moves_experts_and_every_pass_begins_alike(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", admission="lfu")
    start = engine.windows.routing.slot_LE.clone()
    frozen = measurement_of(EngineScorer(engine), tmp_path / "frozen").policy(WIDE)
    assert torch.equal(engine.windows.routing.slot_LE, start), "frozen residency stays"
    live = [measurement_of(EngineScorer(engine), tmp_path / str(n), residency="live") for n in range(2)]
    found = [measurement.policy(WIDE) for measurement in live]
    assert not torch.equal(engine.windows.routing.slot_LE, start)
    assert np.array_equal(found[0].kl_N, found[1].kl_N)
    assert np.array_equal(found[0].routing.cold_WL, found[1].routing.cold_WL)
    assert not np.array_equal(found[0].kl_N, frozen.kl_N)
    engine.refill()
    engine.windows.reset_counts()
    assert live[0].policy(MarginSwap(margin=0.5)).routing.cold_WL.sum() == engine.runner.counts.cold_experts
    assert live[0].check_off() == 60, "what is resident changes no bit of off"
    with pytest.raises(WarmsetError, match="live residency needs an engine with admission"):
        off = open_engine(checkpoints["qwen3_moe"], "33%", admission="off")
        price_engine(off, some_text(), PriceConfig(residency="live"), "33%", None)


# -- controls -------------------------------------------------------------------------------------------------


def test_rounding_in_float32_is_to_bfloat16():
    x = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_once(x, torch.Generator()), x.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_goes_to_a_neighbour_by_a_seeded_bit(dtype):
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1] = torch.finfo(dtype).max
    rounded = [round_once(x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(rounded[0], rounded[1]) and not torch.equal(rounded[0], rounded[2])
    step = rounded[0].view(torch.int16).int() - x.view(torch.int16).int()
    assert step[0].eq(0).all() and torch.isfinite(rounded[0]).all()
    assert step[1].le(0).all(), "the greatest number goes down or stays"
    assert step[2:].abs().eq(1).all() and 0.4 < step[2:].gt(0).float().mean() < 0.6


def test_the_null_rounds_the_rows_that_the_policy_changed_and_no_other(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    measurement = measurement_of(EngineScorer(engine), tmp_path)
    arm = measurement.policy(WIDE)
    (null,) = measurement.nulls(arm, torch.float32)
    assert 0 < null.kl_N.mean() < 0.1 * arm.kl_N.mean()
    assert np.array_equal(null.routing.own_NLK[0], measurement.reference().routing.own_NLK[0])
    assert null.routing.swaps_N.sum() == 0
    nothing = measurement._null("nothing", np.zeros_like(arm.routing.changed_NL), 0)
    assert np.array_equal(nothing.kl_N, np.zeros(60))
    everywhere = measurement.null_everywhere()
    assert everywhere.kl_N.mean() > 0.5 * null.kl_N.mean()
    first = np.zeros_like(arm.routing.changed_NL)
    first[7, 1] = True
    alone = measurement._null("one row", first, 0)
    assert np.array_equal(alone.kl_N[:7], np.zeros(7)) and alone.kl_N[7] > 0
    measurement.scorer.experts_of = lambda layer: torch.nn.Identity()
    with pytest.raises(WarmsetError, match="rounding null reached 0 of 1 rows"):
        measurement._null("out of reach", first, 1)
    del measurement.scorer.experts_of
    counted = RoundingNull(first)
    with counted.installed(measurement.scorer):
        sequence = measurement.scorer.start()
        ids = list(measurement.text.segments[0].ids)
        measurement.scorer.read(sequence, ids[:1])
        counted.at(4, 4)
        measurement.scorer.score(sequence, ids[1:5])
    assert counted.rounded_rows == 1


def test_random_swaps_are_as_many_in_the_same_rows_layers_and_ranks(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    measurement = measurement_of(EngineScorer(engine), tmp_path)
    arm = measurement.policy(WIDE)
    random = measurement.random_swaps(arm)
    assert np.array_equal(random.routing.moved_NLK, arm.routing.moved_NLK)
    assert random.routing.swaps_N.sum() == arm.routing.swaps_N.sum() > 0
    assert not np.array_equal(random.kl_N, arm.kl_N)
    again = measurement_of(EngineScorer(engine), tmp_path / "again", seed=1).random_swaps(arm)
    assert not np.array_equal(random.kl_N, again.kl_N)


def test_off_against_off_is_refused_where_one_bit_differs(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    measurement = measurement_of(EngineScorer(engine), tmp_path)
    assert measurement.check_off(10) == 12, "windows stay whole"
    score, calls = measurement.scorer.score, []

    def unsteady(sequence, tokens):
        logits = score(sequence, tokens)
        calls.append(tokens)
        return logits if len(calls) < 3 else logits.nextafter(logits + 1)

    measurement.scorer.score = unsteady
    with pytest.raises(WarmsetError, match="off differ at position 8"):
        measurement.check_off()


# -- verdicts -------------------------------------------------------------------------------------------------


def test_c43_everything_resident_is_kl_zero_and_no_verdict(checkpoints):
    engine = open_engine(checkpoints["qwen4_exp"], "all")
    pricing = price_engine(engine, some_text(), PriceConfig(), "all", None)
    arm = run(pricing, [MarginSwap(margin=100.0, ranks=(0, 3))]).results["policies"][0]
    assert arm["verdict"] == "no verdict" and arm["swaps"] == 0
    assert arm["kl"] == 0.0 and arm["kl_top64"] == 0.0 and arm["argmax_same"] == 1.0
    assert arm["loss_change"] == 0.0 and arm["null"] is None and arm["random_swaps"] is None


def test_c43_a_large_margin_costs_something(checkpoints):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    pricing = price_engine(engine, some_text(400), PriceConfig(), "33%", None)
    report = run(pricing, [MarginSwap(margin=m, ranks=(0, 3)) for m in (0.5, 100.0)])
    small, large = report.results["policies"]
    assert large["verdict"] == "measured" and large["swaps"] > small["swaps"] > 0
    assert large["kl"] > small["kl"] > 0 and large["kl"] >= large["kl_top64"] > 0
    assert large["excess_kl"] == pytest.approx(large["kl"] - large["null"]["kl"])
    low, high = large["excess_kl_interval"]
    assert low < large["excess_kl"] < high
    assert large["bytes_saved"] > small["bytes_saved"] > 0
    assert report.results["off"]["checked_positions"] == 400
    swaps = np.array(large["swaps_by_layer_and_rank"])
    assert swaps.shape == (2, 4) and swaps.sum() == large["swaps"]
    for key in ("by_kind", "by_place"):
        assert sum(part["positions"] for part in large[key].values()) == 400
    mean = sum(part["kl"] * part["positions"] for part in large["by_kind"].values()) / 400
    assert mean == pytest.approx(large["kl"])


def test_arms_that_scored_other_tokens_are_not_compared(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    measurement = measurement_of(EngineScorer(engine), tmp_path)
    off, arm = measurement.reference(), measurement.policy(WIDE)
    assert off.token_hash == arm.token_hash
    other = measurement_of(EngineScorer(engine), tmp_path / "other", some_text(seed=1)).reference()
    with pytest.raises(WarmsetError, match="scored other tokens than off"):
        check_tokens(off, Pass(**{**vars(arm), "token_hash": other.token_hash}))


# -- interruptions, records -----------------------------------------------------------------------------------


def test_an_interrupted_measurement_goes_on_where_it_was(checkpoints, tmp_path):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    policies = [WIDE, MarginSwap(margin=1.0)]
    whole = run(price_engine(engine, some_text(), PriceConfig(), "33%", None), policies).results

    def stop_in_the_second_arm(what, done, total):
        if what == "policy margin:margin=1.0" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(price_engine(engine, some_text(), PriceConfig(), "33%", stop_in_the_second_arm), policies)
    assert engine.policy is None
    passes: list[str] = []
    resumed = price_engine(
        engine, some_text(), PriceConfig(resume=True), "33%", lambda what, done, total: passes.append(what)
    )
    again = run(resumed, policies).results
    assert set(passes) == {"off against off", "policy margin:margin=1.0"} | {
        f"{control} of policy margin:margin=1.0" for control in ("null 0", "random swaps")
    }
    for results in (whole, again):
        for arm in (results["off"], *results["policies"]):
            arm.pop("seconds")
    assert again == whole
    resumed.finish()
    assert not resumed.work.folder.exists()


def test_records_of_every_position(checkpoints, tmp_path):
    engine = warmset.Engine.load(checkpoints["qwen4_exp"], slots="33%")
    texts = [("prose", "The server reads the query and " * 12), ("code", "def f(x):\n    return x\n" * 12)]
    report = warmset.price(engine, texts, policies=[WIDE], positions=90)
    rows = list(report.records("margin:margin=4.0,ranks=1-3"))
    assert len(rows) == report.results["positions"] == 90
    assert np.mean([row["kl"] for row in rows]) == pytest.approx(report.results["policies"][0]["kl"])
    assert {row["kind"] for row in rows} == {"prose", "code"}
    assert [row["target"] for row in rows[:-1] if row["document"] == 0][:5] == [
        row["token"] for row in rows[1:6]
    ]
    report.save_records(tmp_path / "r.jsonl")
    read = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert read == rows
    with pytest.raises(WarmsetError, match=r"must be written to a .jsonl or .parquet file. Got '.*r.csv'"):
        report.save_records(tmp_path / "r.csv")
    with pytest.raises(WarmsetError, match=r"policy must be one of margin:margin=4\.0"):
        list(report.records("off"))


def test_parquet_holds_the_same_records(checkpoints, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    report = run(price_engine(engine, some_text(), PriceConfig(controls=False), "33%", None), [WIDE])
    report.save_records(tmp_path / "r.parquet")
    assert parquet.read_table(tmp_path / "r.parquet").to_pylist() == list(report.records(*report.arms))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rows": 0}, "window must be 1 to 8 rows. Got 0."),
        ({"rows": 9}, "window must be 1 to 8 rows. Got 9."),
        ({"residency": "melting"}, "residency must be one of frozen, live. Got 'melting'."),
        ({"residency": "live", "simulate_residency": True}, "simulated residency is frozen"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"positions": 0}, "positions must be 1 or more. Got 0."),
        ({"policies": [WIDE, WIDE]}, "policies must differ"),
        ({"text": "ab"}, "at least 3 tokens"),
        ({"slots": "120%"}, "slots must be"),
    ],
)
def test_bad_input_is_one_sentence(checkpoints, settings, sentence):
    with pytest.raises(WarmsetError, match=sentence):
        warmset.price(
            str(checkpoints["mixtral"]), **{"text": "a text of some words", "policies": [WIDE], **settings}
        )

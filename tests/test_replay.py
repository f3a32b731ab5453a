"""A replay counts what the engine counts, for slots and admissions that were not recorded; and says what is unknown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import PROMPT_IDS
from helpers import open_engine
from windows import ScriptedDraft, use_draft

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError
from warmset.measure.recording import Recording, load_recording, of_kind, ranked, read_texts, recording
from warmset.measure.replay import Rates, replay, why_unknown
from warmset.measure.replay_check import check, forms_agree, learned_on, shipped_check
from warmset.models import BUILTIN_PROFILES, DATA
from warmset.profile import Profile, read_profile, save_profile
from warmset.routing import (
    COUNTER_NAMES,
    AdditiveBias,
    CachePrior,
    CumulativeMass,
    DropCold,
    Exact,
    FewerPicks,
    MarginSwap,
    MaxRank,
    RandomSwap,
    ResidentOnly,
    RouteContext,
    RouterRule,
    WindowJoint,
)

NEW = 60
ANSWER = SamplingConfig(max_new_tokens=NEW)


def record_answer(folder, margin=0.5, script=None, **settings) -> Recording:
    """An answer with drafts, recorded with other slots than any that are replayed."""
    engine = open_engine(folder, "66%", adapt=False, **settings)
    if script is not None:
        use_draft(engine, ScriptedDraft(script, wrong=0.3), 4)
    with recording(engine, margin) as recorder:
        recorder.kind = "answer"
        list(engine.decode(PROMPT_IDS * 2, ANSWER))
        return recorder.recording()


def figures_of(engine) -> dict:
    """The engine's counters of its last answer under the names of a replay."""
    counts, reads, stats = engine.windows.counts, engine.runner.counts, engine.stats()
    return {
        "windows": counts.windows,
        "rows": counts.rows,
        "picks": counts.picks,
        "hit_rate": stats["hit_rate"],
        "cold_experts_per_layer_window": stats["cold_experts_per_layer_window"],
        "cold_experts": reads.cold_experts,
        "distinct_experts": reads.distinct_experts,
        "bytes_slow": reads.bytes_slow,
        "moves": stats["admission"]["moves"],
        "bytes_moved": stats["admission"]["bytes"],
        "routing": counts.routing(),
        "verified": counts.verified_routing(),
    }


@pytest.mark.parametrize("rule", ["off", "lfu", "lru"])
@pytest.mark.parametrize("family", ["qwen4_exp", "olmoe"])
def test_replayed_counters_are_the_engines_for_what_was_not_recorded(checkpoints, tmp_path, family, rule):
    folder = checkpoints[family]
    prompt_ids = PROMPT_IDS * 2
    script = prompt_ids + list(open_engine(folder, "0").decode(prompt_ids, ANSWER))
    windows = dict(window=4, draft="lookup")
    recorded = record_answer(folder, script=script, **windows)
    assert any(end - first > kept for first, end, kept in recorded.windows), "no row was rejected"
    identity = open_engine(folder, "0").identity()
    counts_LE = np.random.default_rng(1).integers(0, 40, (2, 16)).astype(float)
    save_profile(Profile(identity=identity, counts_LE=counts_LE), tmp_path / "p.json")
    moves = 0
    for slots, path in ((3, None), (10, str(tmp_path / "p.json")), (21, None), (32, None), (0, None)):
        engine = open_engine(folder, slots, admission=rule, profile=path, adapt=False, **windows)
        use_draft(engine, ScriptedDraft(script, wrong=0.3), 4)
        list(engine.decode(prompt_ids, ANSWER))
        learned = None if path is None else read_profile(tmp_path / "p.json")
        found = replay(recorded, num_slots=slots, rule=rule, learned=learned).figures()
        expected = figures_of(engine)
        assert {key: found[key] for key in expected} == expected
        moves += found["moves"]
    assert (moves > 0) == (rule != "off")


def test_the_embedded_model_too(tmp_path):
    settings = dict(window=4, draft="mtp", adapt=False)
    recorded = record_answer("builtin:tiny", 0.0, window=4, draft="mtp")
    engine = open_engine("builtin:tiny", "16%", admission="lfu", **settings)
    list(engine.decode(PROMPT_IDS * 2, ANSWER))
    learned = read_profile(BUILTIN_PROFILES["builtin:tiny"])
    found = replay(recorded, num_slots=engine.slots.num_slots, rule="lfu", learned=learned).figures()
    expected = figures_of(engine)
    assert {key: found[key] for key in expected} == expected and found["moves"] > 0


# -- a small recording of random scores ------------------------------------------------------------------------------


def random_recording(margin, seed=0, layers=2, experts=24, top_k=4, windows=40, most_rows=4) -> Recording:
    draw = np.random.default_rng(seed)
    rows_W = draw.integers(1, most_rows + 1, windows)
    kept_W = [int(draw.integers(1, rows + 1)) for rows in rows_W]
    num_rows = int(rows_W.sum())
    scores_NLE = draw.normal(size=(num_rows, layers, experts)).astype(np.float32)
    scores_NLE[:, :, :6] += 1.0
    expert_P, score_P, count_NL = ranked(scores_NLE, top_k, margin)
    return Recording(
        expert_P=expert_P, score_P=score_P, count_NL=count_NL,
        window_N=np.repeat(np.arange(windows), rows_W).astype(np.uint32),
        committed_N=np.concatenate([np.arange(rows) < kept for rows, kept in zip(rows_W, kept_W, strict=True)])
        .astype(np.uint8),
        position_N=np.arange(num_rows, dtype=np.uint32), kind_N=np.zeros(num_rows, np.uint8), kinds=("text",),
        num_experts=experts, top_k=top_k, renormalize=True, margin=margin, expert_bytes=100, model="m",
        fingerprint="f",
    )  # fmt: skip


POLICIES = [
    Exact(),
    MarginSwap(margin=0.4, ranks=(1, 3)),
    MarginSwap(margin=0.5),
    WindowJoint(margin=0.5, ranks=(0, 3)),
    AdditiveBias(beta=0.5),
    AdditiveBias(beta=-0.3, protect=0),
    DropCold(weight=0.2),
    FewerPicks(k=2),
    MaxRank(max_rank=4, protect=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("rule", ["off", "lfu"])
def test_enough_scores_are_as_good_as_all(policy, rule):
    few = replay(random_recording(0.5), num_slots=20, policy=policy, rule=rule).figures()
    every = replay(random_recording(None), num_slots=20, policy=policy, rule=rule).figures()
    assert few == every and few["unknown"] is None
    if not isinstance(policy, Exact | FewerPicks | MaxRank):
        changed = few["routing"]["swaps"] + few["routing"]["dropped"]
        assert changed > 0, "the policy was not seen to act"


@pytest.mark.parametrize(
    "policy",
    [
        MarginSwap(margin=0.6), WindowJoint(margin=0.51), AdditiveBias(beta=0.6), AdditiveBias(beta=-0.6),
        MaxRank(max_rank=20), CachePrior(strength=0.1), CumulativeMass(mass=0.5), ResidentOnly(),
        RandomSwap(margin=0.1),
    ],
    ids=str,
)  # fmt: skip
def test_too_few_scores_are_unknown_and_say_why(policy):
    found = replay(random_recording(0.5), num_slots=20, policy=policy).figures()
    assert "recorded" in found["unknown"]
    assert all(value is None for key, value in found.items() if key not in ("slots", "unknown"))
    assert why_unknown(policy, random_recording(None)) is None
    assert replay(random_recording(None), num_slots=20, policy=policy).figures()["hit_rate"] is not None


def test_a_policys_counters_are_its_references(checkpoints):
    recorded = random_recording(None)
    policy, rule = MarginSwap(margin=0.7, ranks=(1, 3)), RouterRule(top_k=4, renormalize=True)
    slot_LE = torch.full((2, 24), -1, dtype=torch.int32)
    slot_LE[:, :10] = torch.arange(20).view(10, 2).T.int()
    totals = {name: np.zeros(len(COUNTER_NAMES), np.int64) for name in ("routing", "verified")}
    cold = 0
    for first, end, kept in recorded.windows:
        for layer in range(2):
            scores_TE = torch.from_numpy(recorded.scores_TE(first, end, layer))
            routed = policy.route(scores_TE, slot_LE[layer], rule=rule, context=RouteContext(layer=layer))
            totals["routing"] += routed.counters_T5[:kept].sum(dim=0).numpy()
            totals["verified"] += routed.counters_T5.sum(dim=0).numpy()
            picked = set(routed.ids_TK.flatten().tolist()) - {-1}
            cold += sum(int(slot_LE[layer, expert]) < 0 for expert in picked)
    found = replay(recorded, num_slots=20, policy=policy).figures()
    for name, expected_5 in totals.items():
        assert list(found[name].values()) == expected_5.tolist()
    assert found["cold_experts"] == cold and found["routing"]["swaps"] > 0


def test_predicted_ms_by_hand():
    """Windows of one row, two layers, 4 picks each; 3 of 8 are cold; one copy is under way in the second window."""
    recorded = random_recording(0.0, windows=2, most_rows=1)
    own_LK = recorded.own_NLK[0]
    unpicked = next(expert for expert in range(24) if expert not in recorded.own_NLK[:, 1])
    counts_LE = np.zeros((2, 24))
    counts_LE[0, own_LK[0, :3]] = counts_LE[1, own_LK[1, :2]] = counts_LE[1, unpicked] = 1
    learned = learned_on(recorded, counts_LE)
    rates = Rates(fast_gbs=100, cold_gbs=2, copy_gbs=4, expert_bytes=1_000_000, layer_bytes=5_000_000)
    found = replay(recorded, num_slots=6, learned=learned, rates=rates)
    # 2 layers x 0.05 ms; layer 0: the longer of 3 x 0.01 and 1 x 0.5; layer 1: of 2 x 0.01 and 2 x 0.5
    assert found.ms_W[0] == pytest.approx(0.1 + 0.5 + 1.0)
    moving = replay(recorded, num_slots=6, rule="lru", learned=learned, rates=rates, budget_bytes=1_000_000)
    # the expert that nobody picked leaves, and who comes in its place is not there yet
    assert moving.cold_picks_W.tolist() == found.cold_picks_W.tolist()
    assert moving.ms_W.tolist() == pytest.approx([found.ms_W[0], found.ms_W[1] + 0.25])


def test_windows_rows_and_scores_are_given_back():
    recorded = random_recording(None, seed=4)
    part = recorded.rows(recorded.windows[3][0], recorded.windows[9][1])
    assert len(part.windows) == 7 and part.num_rows == sum(
        end - first for first, end, _ in recorded.windows[3:10]
    )
    first = recorded.windows[3][0]
    assert np.array_equal(part.own_NLK, recorded.own_NLK[first : first + part.num_rows])
    assert np.array_equal(part.scores_TE(0, 2, 1), recorded.scores_TE(first, first + 2, 1))
    committed = recorded.committed_N.sum()
    assert recorded.counts_LE().sum() == committed * 2 * 4


# -- the trace that ships --------------------------------------------------------------------------------------------


def test_the_shipped_trace_is_read_and_both_forms_agree():
    recorded = load_recording(DATA / "trace.safetensors")
    assert forms_agree(recorded, read_profile(BUILTIN_PROFILES["builtin:tiny"]))
    assert {end - first for first, end, _ in recorded.windows} >= {1, 2, 4, 8}
    assert any(1 < kept < end - first for first, end, kept in recorded.windows)
    for kind, rows in (("prose", 400), ("code", 800)):
        text = of_kind(recorded, kind).row_by_row()
        assert text.position_N.tolist() == list(range(rows)), "every token of the text, once"
    with pytest.raises(WarmsetError, match="kind must be one of prose, code"):
        of_kind(recorded, "verse")


@pytest.mark.slow
def test_the_bars_of_check_are_met():
    results = shipped_check()
    assert results["ok"] and results["points_below_learned"] <= 5 and results["worst_ms_ratio"] <= 1.03


def test_check_refuses_another_trace():
    with pytest.raises(WarmsetError, match="prose, then"):
        check(random_recording(None), None, None)  # type: ignore[arg-type]


def test_a_recording_of_windows_of_given_text_has_all_rows_committed(checkpoints):
    engine = open_engine(checkpoints["olmoe"], "50%", max_model_len=16)
    with recording(engine, None) as recorder:
        recorder.kind = "text"
        read_texts(engine, list(range(5, 45)), 4)
        recorded = recorder.recording()
    assert recorded.num_rows == 40 and recorded.committed_N.all()
    assert recorded.position_N.tolist() == [*range(16), *range(16), *range(8)]
    assert not engine.residency.listeners and not engine.residency.watches

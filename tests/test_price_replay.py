"""`warmset.as_windows`: a transformers model's own forwards, run as decode windows."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import open_engine

import warmset
from warmset.errors import WarmsetError
from warmset.measure.price.replay import resident_table
from warmset.routing import FewerPicks, MarginSwap

IDS = torch.tensor([[257, 901, 44, 1203, 77, 3000, 12, 8000, 5, 450, 451, 452, 1000, 2000]])
WIDE = MarginSwap(margin=100.0, ranks=(0, 3))


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def model(checkpoints):
    return load(checkpoints["qwen3_moe"])


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_moe", "olmoe"])
def test_without_swaps_the_logits_are_those_of_one_forward(checkpoints, family):
    model = load(checkpoints[family])
    plain = model(IDS, labels=IDS)
    with (
        pytest.warns(UserWarning, match="4 windows and not one swap"),
        warmset.as_windows(model, rows=4, slots="33%") as replay,
    ):
        output = replay.model(IDS, labels=IDS)
    assert torch.allclose(output.logits, plain.logits, atol=1e-5 * float(plain.logits.abs().max()))
    assert float(output.loss) == pytest.approx(float(plain.loss), abs=1e-5)
    assert replay.windows == 4 and replay.swaps == 0
    assert torch.equal(model(IDS).logits, plain.logits), "the model is as it was"


@torch.no_grad()
def test_a_policy_acts_and_an_engine_gives_the_same(checkpoints, model):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", WIDE)
    table = engine.windows.routing.slot_LE.clone()
    plain = model(IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warmset.as_windows(model, rows=4, policy=WIDE, slots=table) as replay:
            ours = model(IDS).logits
        with warmset.as_windows(engine, rows=4) as other:
            theirs = other.model(IDS).logits
    assert replay.swaps == other.swaps > 0
    assert torch.allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()))
    assert torch.equal(ours[:, 0], plain[:, 0]) or torch.allclose(ours[:, 0], plain[:, 0], atol=1e-5)
    assert not torch.allclose(ours[:, 1:], plain[:, 1:], atol=1e-3)
    assert engine.policy is WIDE


@torch.no_grad()
def test_a_batch_is_replayed_sequence_by_sequence_without_its_padding(model):
    short = IDS[:, :6]
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), short], dim=1)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, :8] = 0
    with warmset.as_windows(model, rows=4, policy=WIDE, slots="33%"):
        both = model(input_ids=torch.cat([IDS, padded]), attention_mask=mask).logits
        alone = [model(IDS).logits, model(short).logits]
        last = model(IDS, logits_to_keep=2).logits
    assert torch.equal(both[:1], alone[0]) and torch.equal(both[1:, 8:], alone[1])
    assert both[1, :8].eq(0).all() and torch.equal(last, alone[0][:, -2:])


@torch.no_grad()
def test_generation_runs_as_it_is_and_the_policy_acts_after_the_prompt(checkpoints, model):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", WIDE, admission="off")
    config = warmset.SamplingConfig(max_new_tokens=12)
    expected = list(engine.decode(IDS[0].tolist(), config))
    with warmset.as_windows(
        model, rows=4, policy=WIDE, slots=engine.windows.routing.slot_LE.clone()
    ) as replay:
        out = model.generate(IDS, max_new_tokens=12, do_sample=False)
        assert out[0, IDS.shape[1] :].tolist() == expected
        assert replay.windows == 11 and replay.swaps > 0
        with pytest.raises(WarmsetError, match=r"one sequence at a time\. Got a batch of 2"):
            model.generate(torch.cat([IDS, IDS]), max_new_tokens=3, do_sample=False)


@torch.no_grad()
def test_fewer_picks_warn_of_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warmset.as_windows(model, policy=FewerPicks(k=2), slots="33%") as replay:
            model(IDS)
    assert replay.dropped > 0 and replay.swaps == 0


def test_residents_of_the_embedded_model_come_from_its_profile():
    from warmset.models import BUILTIN

    engine = open_engine("builtin:tiny", "33%")
    model = load(BUILTIN["builtin:tiny"])
    assert torch.equal(resident_table(model, "33%") >= 0, engine.windows.routing.slot_LE >= 0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rows": 0}, "rows must be 1 to 8. Got 0"),
        ({"policy": 3}, "policy must be an object with a method `route`"),
        ({"slots": "999"}, "slots must be 0 to 32 for this model"),
        ({"slots": torch.zeros(3, 3)}, r"slots must have shape \(2, 16\)"),
        ({"slots": 4, "profile": "/nowhere.json"}, "profile /nowhere.json does not exist"),
    ],
)
def test_bad_input_is_one_sentence(model, given, sentence):
    with pytest.raises(WarmsetError, match=sentence), warmset.as_windows(model, **given):
        pass


def test_what_cannot_be_replayed_is_refused(checkpoints, model):
    from transformers import AutoModelForCausalLM, LlamaConfig

    dense = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with (
        pytest.raises(WarmsetError, match="has no Mixture-of-Experts layers"),
        warmset.as_windows(dense, slots=torch.zeros(1, 1)),
    ):
        pass
    with (
        warmset.as_windows(model, policy=WIDE, slots="33%"),
        pytest.raises(WarmsetError, match="inputs_embeds cannot be split"),
    ):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    engine = open_engine(checkpoints["qwen3_moe"], "33%")
    with (
        pytest.raises(WarmsetError, match="an engine has its own"),
        warmset.as_windows(engine, slots="33%"),
    ):
        pass

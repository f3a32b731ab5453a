"""Answers whose windows the device leads, on a CPU as the same code in Python: all is as if the host led them."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from helpers import open_engine
from windows import NOISE, decode

from warmset.config import SamplingConfig
from warmset.errors import RowError, WarmsetError
from warmset.routing import CachePrior, MarginSwap

TOKENS = 32
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
COUNTED = ("windows", "accepted_per_window", "cold_experts_per_layer_window", "hit_rate", "bytes_slow", "bytes_fast",
           "new_tokens", "finish_reason", "admission")  # fmt: skip


class Picks(list):
    """Listens to what a residency is told."""

    def __call__(self, own_LTK):
        self.append(own_LTK.copy())


def open_pair(folder, slots="33%", policy=None, **settings):
    """The same engine led by the host and by the device, and what each gives to its residency's listener."""
    pair = []
    for graphs in ("off", "on"):
        engine = open_engine(folder, slots, policy, graphs=graphs, **settings)
        picks = Picks()
        engine.residency.listeners.append(picks)
        pair.append((engine, picks))
    return pair


def figures(engine) -> dict:
    stats = engine.stats()
    return {key: stats[key] for key in COUNTED} | {"routing": stats["routing"], "drafts": stats["drafts"]}


def without_timing(found: dict) -> dict:
    drafts = {key: value for key, value in found["drafts"].items() if key != "rows_why"}
    return {**found, "drafts": drafts}


@pytest.mark.parametrize("policy", [None, MarginSwap(margin=0.5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_counters_and_heat_are_the_hosts(checkpoints, prompt_ids, family, policy):
    """With residents that follow the text, so a window's picks decide where the next one's experts lie."""
    (host, heard), (device, told) = open_pair(checkpoints[family], policy=policy, admission="lfu")
    for sampling in ({}, SAMPLED):
        expected = decode(host, prompt_ids, TOKENS, **sampling)
        assert decode(device, prompt_ids, TOKENS, **sampling) == expected
        assert device.stats()["graphs"]["used"] and not host.stats()["graphs"]["used"]
        assert figures(device) == figures(host)
        assert len(told) == len(heard) and all((a == b).all() for a, b in zip(told, heard, strict=True))
    assert figures(device)["admission"]["moves"] > 0
    if policy is not None:
        assert figures(device)["routing"]["swaps"] > 0
    assert torch.equal(host.slots.table_LE, device.slots.table_LE)


def misleading(engine, ids: list[int]) -> list[int]:
    """A prompt in which the answer's first token was followed by something else before: lookup's drafts are wrong."""
    said: list[int] = []
    for _ in range(30):
        prompt = [number for token in said for number in (ids[-1], token, 7, 8, 9)] + ids
        (token,) = decode(engine, prompt, 1)
        if token in said:
            return prompt
        said.append(token)
    raise AssertionError("no such prompt was found")


@pytest.mark.parametrize("family", ["qwen3_next", "mixtral", "qwen4_exp_sparse"])
def test_windows_of_several_rows(checkpoints, prompt_ids, family):
    """Drafts by lookup, wrong ones among them, and the host's counters."""
    pair = open_pair(checkpoints[family], window=4, draft="lookup", adapt=False)
    prompt = misleading(pair[0][0], prompt_ids)
    for _, picks in pair:
        picks.clear()
    texts = [decode(engine, prompt, TOKENS) for engine, _ in pair]
    assert texts[0] == texts[1]
    (host, heard), (device, told) = pair
    ours, theirs = without_timing(figures(device)), without_timing(figures(host))
    assert ours == theirs
    assert ours["drafts"]["rejected"] > 0
    assert all((a == b).all() for a, b in zip(told, heard, strict=True))


def test_the_number_of_rows_adapts(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["olmoe"], "all", window=4, draft="lookup", graphs="on")
    reference = open_engine(checkpoints["olmoe"], "all")
    assert decode(engine, prompt_ids * 3, 60) == decode(reference, prompt_ids * 3, 60)
    drafts = engine.stats()["drafts"]
    assert "tokens in" in drafts["rows_why"] and 1 <= drafts["rows"] <= 4
    assert all(engine.depth.ms[rows].count for rows in (1, 2, 3, 4))


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "qwen3_moe"])
def test_an_answer_that_ends_inside_a_window_leaves_what_it_kept(checkpoints, prompt_ids, family):
    """Stop token, a watcher (as a stop text), a cap: tokens, counters, and a next turn that goes on from there."""
    prompt = prompt_ids * 3
    pair = open_pair(checkpoints[family], window=8, draft="lookup", adapt=False)
    text = decode(pair[0][0], prompt, TOKENS)
    places = [number for number in range(4, TOKENS - 2) if text.index(text[number]) == number]
    for place in places[:: max(1, len(places) // 3)][:3] or [9]:
        token = text[place]
        ends = (
            {"stop_ids": frozenset([token])},
            {"watch": lambda drawn, token=token: drawn == token},
            {"cap": place + 1},
        )
        for settings in ends:
            answers, counted = [], []
            for engine, picks in pair:
                engine.conversation.forget()
                picks.clear()
                sampling = SamplingConfig(max_new_tokens=settings.get("cap", TOKENS))
                more = {key: value for key, value in settings.items() if key != "cap"}
                first = list(engine.decode(prompt, sampling, **more))
                counted.append((without_timing(figures(engine)), sum(own.shape[1] for own in picks)))
                again = list(engine.decode([*prompt, *first, 77, 78], SamplingConfig(max_new_tokens=6)))
                answers.append((first, again, engine.stats()["cached_tokens"]))
            assert answers[0] == answers[1], settings
            assert counted[0] == counted[1], settings
            assert answers[1][2] >= len(prompt)


def test_a_reader_that_leaves_in_the_middle_leaves_a_whole_sequence(checkpoints, prompt_ids):
    (host, _), (device, _) = open_pair(checkpoints["qwen4_exp"])
    texts = []
    for engine in (host, device):
        stream = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=TOKENS))
        begun = [next(stream) for _ in range(5)]
        stream.close()
        more = list(engine.decode([*prompt_ids, *begun, 9], SamplingConfig(max_new_tokens=6)))
        texts.append((begun, more, engine.stats()["cached_tokens"]))
    assert texts[0] == texts[1]


def test_who_leads_is_said(checkpoints, prompt_ids):
    folder = checkpoints["qwen3_next"]
    off = open_engine(folder, "33%")
    decode(off, prompt_ids, 3)
    assert off.stats()["graphs"] == {"used": False, "why_not": "the device is the CPU", "captures": 0}
    engine = open_engine(folder, "33%", graphs="on")
    for sampling, why in (
        ({}, None),
        ({"repetition_penalty": 1.1}, "penalties and biases are applied on the host"),
        ({"logprobs": 2}, "log-probabilities are taken on the host"),
    ):
        decode(engine, prompt_ids, 3, **sampling)
        assert engine.stats()["graphs"]["why_not"] == why
    engine.use_policy(CachePrior(strength=1.0))
    decode(engine, prompt_ids, 3)
    assert engine.stats()["graphs"]["why_not"] == "the policy learns between windows"
    with pytest.raises(WarmsetError, match="graphs must be one of auto, on, off"):
        open_engine(folder, "33%", graphs="yes")


def test_a_policy_may_change_between_answers(checkpoints, prompt_ids):
    (host, _), (device, _) = open_pair(checkpoints["mixtral"])
    for policy in (MarginSwap(margin=2.0), None, MarginSwap(margin=0.1)):
        for engine in (host, device):
            engine.use_policy(policy)
        assert decode(device, prompt_ids, 12) == decode(host, prompt_ids, 12)
        assert figures(device) == figures(host)


def test_slots_may_be_resized_between_answers(checkpoints, prompt_ids):
    """C50: exact mode writes the same text whatever lies in the slots."""
    device = open_engine(checkpoints["qwen4_exp"], "33%", graphs="on")
    text = decode(device, prompt_ids, 12)
    for slots in (3, 0, 9):
        device.residency.resize(slots)
        assert decode(device, prompt_ids, 12) == text


def test_a_row_that_cannot_be_routed_ends_the_answer_and_breaks_the_sequence(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "all", graphs="on")
    stream = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=8))
    next(stream)
    router = next(
        module for module in engine.windows.trunk.modules() if getattr(module, "layer", None) is not None
        and module.layer.index == 1 and hasattr(module, "original")
    )  # fmt: skip
    kept = router.original.weight.clone()
    with torch.inference_mode():
        router.original.weight.fill_(float("nan"))
    with pytest.raises(RowError, match="Layer 1, row 0"):
        list(stream)
    with torch.inference_mode():
        router.original.weight.copy_(kept)
    fresh = open_engine(checkpoints["qwen3_moe"], "all")
    assert list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=8))) == decode(fresh, prompt_ids, 8)
    assert engine.stats()["cached_tokens"] == 0


def test_the_states_that_come_back_are_those_of_the_host(checkpoints, prompt_ids):
    for family in ("qwen4_exp", "qwen3_next"):
        (host, _), (device, _) = open_pair(checkpoints[family])
        texts = [decode(engine, prompt_ids, 9) for engine in (host, device)]
        assert texts[0] == texts[1]
        after = [engine.windows.step(engine.conversation._sequence, 5) for engine in (host, device)]
        assert torch.allclose(*after, rtol=0, atol=NOISE * float(after[0].abs().max()))


def test_the_stage_table_adds_up(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_next"], "33%", graphs="on", stages=True)
    decode(engine, prompt_ids, 20)
    stages = engine.stats()["stages"]
    total = stages.pop("total")
    assert sum(stages.values()) == pytest.approx(total) and engine.stats()["ms_per_window"] == total
    assert all(
        stages[name] > 0 for name in ("token mixer", "resident experts", "cold wait", "head", "commit")
    )
    assert total * 19 <= 1.05 * engine.run.decode_ms + 1e-6 * total

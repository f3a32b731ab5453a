"""Answers whose drafts the MTP layer makes inside the windows that the device leads: all is as if the host led them."""

from __future__ import annotations

import json
import random
from itertools import count

import pytest
import torch
from helpers import open_engine
from mtp_checkpoints import add_mtp
from tokenizers import Tokenizer
from windows import BY_NOISE, NOISE, decode

from warmset.config import SamplingConfig
from warmset.models import BUILTIN, DATA
from warmset.routing import MarginSwap

TOKENS = 40
TINY = "builtin:tiny"
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    made = {name: add_mtp(checkpoints[name], root / name) for name in ("qwen3_next", "qwen4_exp_sparse")}
    return {TINY: TINY, **made}


@pytest.fixture(scope="module")
def prompt():
    text = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))["prose"][0]
    return Tokenizer.from_file(str(BUILTIN[TINY] / "tokenizer.json")).encode(text).ids[:40]


def open_pair(folder, rows: int = 4, slots="33%", policy=None, **settings):
    """The same engine led by the host and by the device."""
    settings = {"window": rows, "draft": "mtp", "adapt": False, **settings}
    return [open_engine(folder, slots, policy, graphs=graphs, **settings) for graphs in ("off", "on")]


def counted(engine) -> dict:
    """What must be the same whoever leads."""
    stats = engine.stats()
    names = ("windows", "new_tokens", "finish_reason", "hit_rate", "bytes_slow", "routing", "cached_tokens")
    drafts = {key: value for key, value in stats["drafts"].items() if key != "rows_why"}
    return {name: stats[name] for name in names} | {"drafts": drafts}


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("family", [TINY, "qwen3_next", "qwen4_exp_sparse"])
def test_text_drafts_and_counters_are_the_hosts(folders, prompt, family, rows):
    """Wrong drafts (random layers guess badly), right ones (by noise alone), and a policy that acts on the trunk."""
    host, device = open_pair(folders[family], rows, policy=MarginSwap(margin=0.5))
    for sampling in ({}, SAMPLED, BY_NOISE):
        expected = decode(host, prompt, TOKENS, **sampling)
        assert decode(device, prompt, TOKENS, **sampling) == expected
        assert device.stats()["graphs"] == {"used": True, "why_not": None, "captures": 0}
        assert counted(device) == counted(host)
        drafts = device.stats()["drafts"]
        assert drafts["source"] == "mtp" and drafts["drafted"] > 0
        if sampling is BY_NOISE:
            assert drafts["rejected"] == 0 and device.stats()["windows"] == -(-(TOKENS - 1) // rows)
        elif not (family == TINY and rows == 2):
            assert drafts["rejected"] > 0
    assert device.stats()["routing"]["swaps"] > 0


@pytest.mark.parametrize("family", [TINY, "qwen4_exp_sparse"])
def test_the_layer_is_given_back_as_the_host_leaves_it(folders, prompt, family):
    """Its keys and values, the row that waits, and what it drafts next, whoever leads the next answer."""
    host, device = open_pair(folders[family])
    texts = [decode(engine, prompt, TOKENS) for engine in (host, device)]
    assert texts[0] == texts[1]
    drafts, states = [], []
    for engine in (host, device):
        sequence = engine.conversation._sequence
        ahead = sequence.drafting
        assert ahead.length + ahead.num_waiting == sequence.length == len(prompt) + TOKENS - 1
        drafts.append(
            engine.draft.propose(sequence, 77, 5, lambda logits_V, position: int(logits_V.argmax()))
        )
        layer = ahead.state.cache.layers[0]
        states += [(ahead.length, layer.keys, layer.values, sequence.hidden_H)]
    assert drafts[0] == drafts[1] and states[0][0] == states[1][0]
    for ours, theirs in zip(states[1][1:], states[0][1:], strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=10 * NOISE * float(theirs.abs().max()))


@pytest.mark.parametrize("family", [TINY, "qwen4_exp_sparse"])
def test_turns_go_on_and_back(folders, prompt, family):
    """A longer prompt, the same prompt again, and an end at every row of a window, by a watcher or a stop token."""
    host, device = open_pair(folders[family])
    text = decode(host, prompt, TOKENS, **BY_NOISE)
    for place in range(5, 9):
        token = text[place]
        for ends in ({"stop_ids": frozenset([token])}, {"watch": lambda drawn, token=token: drawn == token}):
            found = []
            for engine in (host, device):
                engine.conversation.forget()
                sampling = SamplingConfig(max_new_tokens=TOKENS, **BY_NOISE)
                first = list(engine.decode(prompt, sampling, **ends))
                figures = [counted(engine)]
                turns = []
                for turn in ([*prompt, *first, 77, 78], prompt):
                    turns.append(list(engine.decode(turn, SamplingConfig(max_new_tokens=12))))
                    figures.append(counted(engine))
                found.append((first, turns, figures))
            assert found[0] == found[1], (place, ends)
            assert found[1][2][1]["cached_tokens"] >= len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", [TINY, "qwen3_next", "qwen4_exp_sparse"])
def test_random_turns_are_the_hosts(folders, family, seed):
    """Turns that go on, back or begin anew; caps, stop tokens, watchers, readers that leave; policies and resizes."""
    draw = random.Random(seed)
    pair = open_pair(folders[family], draw.choice([2, 3, 5, 8]), max_model_len=200)
    ids: list[int] = [draw.randrange(8000) for _ in range(draw.choice([1, 2, 9, 30]))]
    earlier, led = [ids], 0
    for _ in range(25):
        way, place = draw.choice(["cap", "stop", "watch", "close", "logprobs"]), draw.randrange(1, 12)
        more = draw.choice([{}, {"temperature": 0.7, "seed": place}, BY_NOISE, BY_NOISE])
        sampling = SamplingConfig(
            max_new_tokens=draw.choice([1, 2, 5, 17, 400]), logprobs=1 if way == "logprobs" else None, **more
        )
        stop = frozenset([draw.randrange(8000) for _ in range(9)]) if way == "stop" else frozenset()
        found = []
        for engine in pair:
            seen: list[int] = []
            drawn = count(1)
            watch = (lambda token, drawn=drawn, place=place: next(drawn) == place) if way == "watch" else None
            stream = engine.decode(ids, sampling, stop, watch=watch)
            for token in stream:
                seen.append(token)
                if way == "close" and len(seen) == place:
                    break
            stream.close()
            sequence = engine.conversation._sequence
            kept = (
                sequence.ids,
                sequence.state.length,
                sequence.drafting.length + sequence.drafting.num_waiting,
            )
            found.append((seen, counted(engine), kept if way != "close" else None))
        assert found[0] == found[1], (way, place, sampling)
        led += pair[1].stats()["graphs"]["used"]
        ids = draw.choice(
            [[*ids, *found[0][0], 9], draw.choice(earlier), [draw.randrange(8000) for _ in range(9)]]
        )
        ids = ids if len(ids) < 195 else earlier[0]
        earlier.append(ids)
        if draw.random() < 0.2:
            policy, slots = draw.choice([None, MarginSwap(margin=0.5)]), draw.choice([0, 5, 11])
            for engine in pair:
                engine.use_policy(policy)
                engine.residency.resize(slots)
    assert led > 10


def test_answers_led_by_turns_go_on_from_each_other(prompt):
    """Log-probabilities keep an answer with the host: the layer's states go there and come back."""
    host, device = open_pair(TINY)
    ids, found = list(prompt), []
    for number in range(4):
        sampling = SamplingConfig(max_new_tokens=11, logprobs=1 if number % 2 else None)
        texts = [list(engine.decode(ids, sampling)) for engine in (host, device)]
        assert texts[0] == texts[1] and counted(host) == counted(device)
        found.append(device.stats()["graphs"]["used"])
        ids += [*texts[0], 9]
    assert found == [True, False, True, False]


def test_short_and_long_sequences(prompt):
    """A prompt of one token, a cap of two, and a sequence that outgrows the pages of the one before it."""
    host, device = open_pair(TINY, max_model_len=1024)
    for ids, tokens in (([5], 20), (prompt, 2), ((prompt * 40)[:800], 30), (prompt, 20)):
        assert decode(device, ids, tokens) == decode(host, ids, tokens)
        assert counted(device) == counted(host)


def test_the_number_of_rows_adapts(prompt):
    (device,) = open_pair(TINY, slots="all", adapt=True)[1:]
    reference = open_engine(TINY, "all")
    assert decode(device, prompt, 80) == decode(reference, prompt, 80)
    assert device.stats()["graphs"]["used"] and all(device.depth.ms[rows].count for rows in (1, 2, 3, 4))


def test_a_layer_whose_states_have_no_static_form_stays_with_the_host(checkpoints, tmp_path, prompt):
    from conftest import save_random
    from test_drafts import mellum

    folder = add_mtp(save_random(tmp_path / "bare", mellum("full_attention")), tmp_path / "mellum")
    host, device = open_pair(folder)
    assert decode(device, prompt, 20) == decode(host, prompt, 20)
    assert "DynamicSlidingWindowLayer have no static form" in device.stats()["graphs"]["why_not"]


def test_drafting_has_its_time_in_the_stage_table(prompt):
    (device,) = open_pair(TINY, stages=True)[1:]
    decode(device, prompt, TOKENS)
    stages = device.stats()["stages"]
    total = stages.pop("total")
    assert sum(stages.values()) == pytest.approx(total) and stages["draft"] > 0.02 * total

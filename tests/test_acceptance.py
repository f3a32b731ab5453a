"""What a window's drafts change: nothing but the time. Ends, caps, stop texts, seeds, penalties, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import open_engine
from windows import ScriptedDraft, decode, use_draft

import warmset
from warmset.config import SamplingConfig
from warmset.errors import WarmsetError
from warmset.sample import Sampler
from warmset.text import StopTexts, Writer, encode

TOKENS = 32
SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 4},
    "top-k": {"temperature": 1.2, "top_k": 50, "seed": 5},
    "min-p": {"temperature": 1.0, "min_p": 0.05, "seed": 6},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {
        "temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "seed": 7,
    },
    "bias": {"logit_bias": {77: 3.0, 44: -100.0}, "temperature": 0.5, "seed": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(checkpoints):
    return open_engine(checkpoints["qwen4_exp"], "33%")


def both_ways(engine, ids: list[int], rows: int, tokens: int = TOKENS, **sampling):
    """The text one row at a time, and in windows of `rows` with drafts that are wrong in a third of the cases."""
    use_draft(engine, ScriptedDraft([], wrong=1.0), 1)
    alone = decode(engine, ids, tokens, **sampling)
    use_draft(engine, ScriptedDraft(ids + alone, wrong=0.33, seed=rows), rows)
    return alone, decode(engine, ids, tokens, **sampling)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_c29_every_setting_writes_the_same_at_every_window(engine, prompt_ids, name, rows):
    alone, windowed = both_ways(engine, prompt_ids, rows, **SETTINGS[name])
    assert alone == windowed
    assert engine.stats()["drafts"]["rejected"] > 0 and engine.stats()["drafts"]["accepted"] > 0


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("greedy", "warm")])
def test_every_setting_changes_what_is_drawn(name):
    """On a few tokens with a spread of logits, so that each setting has something to act on."""
    setting = {**SETTINGS[name]}
    if "logit_bias" in setting:
        setting["logit_bias"] = {3: 3.0, 0: -100.0}
    if "top_k" in setting:
        setting["top_k"] = 2
    plain = {key: value for key, value in setting.items() if key in ("temperature", "seed")}

    def draw(**sampling) -> list[int]:
        sampler, out = Sampler(SamplingConfig(**sampling), seen={0}), []
        for position in range(200):
            out.append(sampler.draw(torch.tensor([2.0, 1.9, 0.5, 0.0, -1.5]), position))
            sampler.take(out[-1])
        return out

    assert draw(**setting) != draw(**plain)


def test_c29_twenty_thousand_draws_through_windows_follow_the_distribution():
    """Each window of 4 rows has the same logits in all rows, and drafts that are often right."""
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    config = SamplingConfig(temperature=0.9, seed=12)
    expected = torch.softmax(logits_V / config.temperature, 0).numpy()
    sampler, position, seen = Sampler(config), 0, np.zeros(5)
    guesses = np.random.default_rng(1)
    sizes = set()
    while position < 20_000:
        drafts = guesses.choice(5, size=3, p=expected).tolist()
        drawn = sampler.accept(logits_V.expand(4, 5), drafts, position, lambda token: False)
        np.add.at(seen, drawn, 1)
        position += len(drawn)
        sizes.add(len(drawn))
    chi_square = float(((seen - expected * position) ** 2 / (expected * position)).sum())
    assert chi_square < 18.47  # p = 0.001 at 4 degrees of freedom
    assert sizes == {1, 2, 3, 4}


@pytest.mark.parametrize("wrong", [0.0, 0.5])
@pytest.mark.parametrize("place", range(1, 9))
def test_c25_nothing_after_the_end_of_text_is_delivered_counted_or_kept(engine, prompt_ids, place, wrong):
    """C25: the end falls on each place of a window whose later rows were drafted right, and of others."""
    use_draft(engine, ScriptedDraft([], wrong=1.0), 1)
    alone = decode(engine, prompt_ids, 12)
    end = alone[place]
    first = alone.index(end)
    use_draft(engine, ScriptedDraft(prompt_ids + alone, wrong=wrong, seed=3), 8)
    out = list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=12), frozenset({end})))
    assert out == alone[:first]
    assert engine.run.finish_reason == "stop" and engine.run.new_tokens == first
    assert engine.conversation._sequence.ids == prompt_ids + alone[:first]
    assert engine.windows.counts.rows == first
    assert wrong == 0.0 or engine.stats()["drafts"]["rejected"] > 0


@pytest.mark.parametrize("tokens", range(1, 11))
def test_c26_the_cap_is_exact_inside_a_window(engine, prompt_ids, tokens):
    use_draft(engine, ScriptedDraft([], wrong=1.0), 1)
    alone = decode(engine, prompt_ids, 12)
    use_draft(engine, ScriptedDraft(prompt_ids + alone, wrong=0.0), 8)
    assert decode(engine, prompt_ids, tokens) == alone[:tokens]
    assert engine.run.finish_reason == "length" and engine.run.new_tokens == tokens
    assert engine.windows.counts.verified_rows == tokens - 1, (
        "no row is run whose token could not be delivered"
    )
    use_draft(engine, ScriptedDraft(prompt_ids + alone, wrong=0.6, seed=3), 8)
    assert decode(engine, prompt_ids, tokens) == alone[:tokens]
    assert tokens < 3 or engine.stats()["drafts"]["rejected"] > 0


def test_c26_the_context_is_a_cap_too(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", max_model_len=len(prompt_ids) + 6)
    alone = decode(engine, prompt_ids, 50)
    assert len(alone) == 6
    use_draft(engine, ScriptedDraft(prompt_ids + alone + [5] * 8, wrong=0.5, seed=3), 8)
    assert decode(engine, prompt_ids, 50) == alone
    assert engine.stats()["drafts"]["rejected"] > 0


def test_c30_logprobs_are_those_of_the_undrafted_run(engine, prompt_ids):
    """C30: drafted and accepted tokens have the log-probabilities that they have one at a time, up to arithmetic."""
    sampling = {"temperature": 0.8, "seed": 3, "logprobs": 3, "repetition_penalty": 1.2}
    use_draft(engine, ScriptedDraft([], wrong=1.0), 1)
    alone = decode(engine, prompt_ids, TOKENS, **sampling)
    expected = engine.run.logprobs
    use_draft(engine, ScriptedDraft(prompt_ids + alone, wrong=0.33), 4)
    assert decode(engine, prompt_ids, TOKENS, **sampling) == alone
    drafts = engine.stats()["drafts"]
    assert drafts["accepted"] > 0 and drafts["rejected"] > 0
    seen = engine.run.logprobs
    assert [entry.token for entry in seen] == [entry.token for entry in expected] == alone
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [logprob for _, logprob in ours.top] == pytest.approx(
            [other for _, other in theirs.top], abs=1e-4
        )
        assert len(ours.top) == 3 and ours.top[0][1] >= ours.logprob - 1e-12


def test_logprobs_are_the_models_own():
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    sampler = Sampler(SamplingConfig(logprobs=2, logit_bias={4: 100.0}))
    assert sampler.draw(logits_V, 0) == 4
    (entry,) = sampler.logprobs
    own = torch.log_softmax(logits_V.double(), 0)
    assert entry.logprob == pytest.approx(float(own[4])) and [token for token, _ in entry.top] == [0, 1]


# -- stop texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_stop_texts_are_found_over_any_split(size):
    text, stop = "one two END three", ("END", "two EN?")
    finder, out = StopTexts(stop), ""
    for start in range(0, len(text), size):
        clear, found = finder.feed(text[start : start + size])
        out += clear
        if found:
            break
    assert out == "one two " and found


def test_what_looks_like_a_stop_text_is_delivered_once_it_is_none():
    finder = StopTexts(("</s>",))
    assert finder.feed("a <") == ("a ", False)
    assert finder.feed("/") == ("", False)
    assert finder.feed("b> </") == ("</b> ", False)
    assert finder.rest() == "</"


@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_c27_a_stop_text_inside_a_window_ends_the_answer_there(window):
    """C27: across tokens and windows; what follows it in the same window is neither shown, nor counted, nor kept."""
    engine = warmset.Engine.load(
        "builtin:tiny", slots="33%", window=window, draft="mtp" if window > 1 else None, adapt=False
    )
    prompt = "When a query is executed, the server"
    whole = "".join(engine.stream(prompt, max_new_tokens=40))
    assert window == 1 or engine.stats()["drafts"]["rejected"] > 0
    stop = whole[60:67]
    cut = whole.index(stop)
    engine.tokens.conversation.forget()
    assert "".join(engine.stream(prompt, max_new_tokens=40, stop=stop)) == whole[:cut]
    run, tokenizer = engine.tokens.run, engine.tokenizer
    assert run.finish_reason == "stop"
    ids = tokenizer.encode(prompt)
    writer, count = Writer(tokenizer, (stop,)), 0
    for token in tokenizer.encode(whole):
        count += 1
        if writer.take(token):
            break
    assert run.new_tokens == count
    assert engine.tokens.conversation._sequence.length == len(ids) + count - 1


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (5,)}, "stop"),
    ],
)
def test_c17_settings_out_of_range_are_refused_by_name(setting, name):
    with pytest.raises(WarmsetError, match=name):
        SamplingConfig(**setting)


def test_chat_uses_the_models_template_and_is_refused_without_one(checkpoints):
    engine = warmset.Engine.load(str(checkpoints["mixtral"]), slots="0")
    tokenizer = engine.tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    assert tokenizer.decode(encode(tokenizer, "Hello", chat=True)) == "<user>Hello<answer>"
    tokenizer.chat_template = None
    with pytest.raises(WarmsetError, match="This one has none"):
        encode(tokenizer, "Hello", chat=True)


def test_a_bias_for_no_token_is_refused(engine, prompt_ids):
    with pytest.raises(WarmsetError, match=r"logit_bias ids must be 0 to 8191\. Got 8192"):
        next(engine.decode(prompt_ids, SamplingConfig(logit_bias={8192: 1.0})))

"""A conversation goes on where its earlier turns ended: nothing is read twice, and nothing else changes."""

from __future__ import annotations

import pytest
from conftest import FAMILIES
from helpers import open_engine
from windows import ScriptedDraft, decode, use_draft

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError

TURN = [11, 22, 33, 44, 55]
REST = [600, 700, 800]


def answer(engine, ids: list[int], tokens: int = 8) -> list[int]:
    return list(engine.decode(ids, SamplingConfig(max_new_tokens=tokens)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_extends_the_last_answer_is_continued(checkpoints, prompt_ids, family):
    """Three turns in windows of 4 with drafts that are often wrong, against prompts read anew one row at a time."""
    alone = open_engine(checkpoints[family], "33%")
    ids, expected = list(prompt_ids), []
    for extra in ([], TURN, REST):
        ids += extra
        expected.append(decode(alone, ids, 8))
        ids += expected[-1]
    engine = open_engine(checkpoints[family], "33%", window=4)
    use_draft(engine, ScriptedDraft(ids, wrong=0.5, seed=1), 4)
    ids, known = list(prompt_ids), 0
    for extra, own in zip(([], TURN, REST), expected, strict=True):
        ids += extra
        assert answer(engine, ids) == own
        assert engine.stats()["cached_tokens"] == known
        assert engine.stats()["drafts"]["rejected"] > 0
        ids += own
        known = len(ids) - 1  # the last token was never read


@pytest.mark.parametrize("family", FAMILIES)
def test_another_answer_to_the_same_prompt_goes_back_to_its_end(checkpoints, prompt_ids, family):
    """The same states and logits as the first time, so the same bits; a longer prompt goes on from there."""
    engine = open_engine(checkpoints[family], "33%", window=4)
    first = answer(engine, prompt_ids)
    assert answer(engine, prompt_ids) == first
    assert engine.stats()["cached_tokens"] == len(prompt_ids)
    other = answer(engine, prompt_ids + TURN)
    assert engine.stats()["cached_tokens"] >= len(prompt_ids) - 1
    assert other == decode(open_engine(checkpoints[family], "33%"), prompt_ids + TURN, 8)


def test_mtp_goes_on_with_a_conversation():
    engine = open_engine("builtin:tiny", "33%", window=4, draft="mtp", adapt=False)
    ids = list(range(300, 340))
    first = answer(engine, ids, 12)
    longer = ids + first + TURN
    for again in range(2):
        second = answer(engine, longer, 12)
        assert engine.stats()["cached_tokens"] == (len(longer) if again else len(ids) + 11)
        fresh = open_engine("builtin:tiny", "33%", window=4, draft="mtp", adapt=False)
        assert second == decode(fresh, longer, 12)
        drafts = engine.stats()["drafts"]
        assert drafts["accepted"] == fresh.stats()["drafts"]["accepted"] and drafts["rejected"] > 0


def test_keys_and_values_alone_are_cut_anywhere(checkpoints, prompt_ids):
    """Without recurrent states any common prefix is a point to go on from; with them only where a copy was kept."""
    turned = [*prompt_ids[:9], *TURN]
    for family, known in (("mixtral", 9), ("qwen3_next", 0)):
        engine = open_engine(checkpoints[family], "33%")
        answer(engine, prompt_ids)
        seen = answer(engine, turned)
        assert engine.stats()["cached_tokens"] == known
        assert seen == decode(open_engine(checkpoints[family], "33%"), turned, 8)


def test_copies_stay_within_their_budget(checkpoints, prompt_ids):
    """Room for two copies and a half: the oldest go, and a prompt that needs them is read anew."""
    size = open_engine(checkpoints["qwen3_next"], "33%")
    answer(size, prompt_ids)
    budget = round(2.5 * size.conversation.nbytes / len(size.conversation._points))
    engine = open_engine(checkpoints["qwen3_next"], "33%", snapshot_bytes=budget)
    ids = list(prompt_ids)
    for _ in range(4):
        ids += answer(engine, ids) + TURN
        assert 0 < engine.conversation.nbytes <= budget
    answer(engine, prompt_ids)
    assert engine.stats()["cached_tokens"] == 0


def test_no_budget_reads_every_prompt(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_next"], "33%", snapshot_bytes=0)
    first = answer(engine, prompt_ids)
    assert answer(engine, prompt_ids) == first
    assert engine.stats()["cached_tokens"] == 0 and engine.conversation.nbytes == 0


def test_an_answer_that_failed_is_not_continued(checkpoints, prompt_ids, monkeypatch):
    engine = open_engine(checkpoints["qwen3_next"], "33%")
    expected = answer(engine, prompt_ids)
    run = engine.runner.run

    def failing(layer, x_TH, *rest):
        if layer == 1 and len(x_TH) == 1:
            raise WarmsetError("a cable came loose")
        return run(layer, x_TH, *rest)

    monkeypatch.setattr(engine.runner, "run", failing)
    with pytest.raises(WarmsetError, match="cable"):
        answer(engine, prompt_ids)
    monkeypatch.undo()
    assert answer(engine, prompt_ids) == expected
    assert engine.stats()["cached_tokens"] == 0


def test_an_answer_that_was_left_early_can_be_continued(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"], "33%", window=4)
    stream = engine.decode(prompt_ids, SamplingConfig(max_new_tokens=30))
    begun = [next(stream) for _ in range(5)]
    stream.close()
    longer = prompt_ids + begun[:4] + TURN
    assert answer(engine, longer) == decode(open_engine(checkpoints["qwen4_exp"], "33%"), longer, 8)

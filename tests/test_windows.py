"""Windows of several rows: the greedy text is transformers' own at every size, and counters count what was kept."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from helpers import open_engine
from windows import ScriptedDraft, decode, parts_at_a_near_tie, use_draft

from warmset.config import SamplingConfig
from warmset.errors import RowError, WarmsetError
from warmset.routing import MarginSwap

TOKENS = 40
WINDOWS = (1, 2, 4, 8)
SPARSE_PROMPT = [257, 901, 44, 1203, 77, 3000, 12, 8000, 5, 450, 451, 452, 1000, 2000, 257, 901, 44]


def plain_greedy(folder, ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' own greedy tokens, one at a time, and the logits [tokens, V] that chose them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    cache, out, seen, step = DynamicCache(config=model.config), [], [], list(ids)
    with torch.inference_mode():
        for _ in range(tokens):
            logits_V = model.eval()(torch.tensor([step]), cache=cache, use_cache=True).logits[0, -1]
            seen.append(logits_V)
            out.append(int(logits_V.argmax()))
            step = out[-1:]
    return out, torch.stack(seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_c28_greedy_text_is_transformers_own_at_every_window(checkpoints, family):
    """C28: windows of 1, 2, 4 and 8 rows, with drafts that are wrong at every depth, and past a QSA budget of 8."""
    folder, ids = checkpoints[family], SPARSE_PROMPT
    expected, logits = plain_greedy(folder, ids, TOKENS)
    engine, near_ties = open_engine(folder, "33%"), 0
    for rows in WINDOWS:
        use_draft(engine, ScriptedDraft(ids + expected, wrong=0.35, seed=rows), rows)
        near_ties += parts_at_a_near_tie(expected, decode(engine, ids, TOKENS), logits)
        drafts = engine.stats()["drafts"]
        if rows > 1:
            assert drafts["rejected"] > 0 and drafts["accepted"] > 0
            assert [entry["depth"] for entry in drafts["by_depth"]] == list(range(1, rows))
        engine.slots.check_integrity()
    print(f"{family}: {near_ties} near-ties")


@pytest.mark.parametrize("slots", ["0", "25%", "all"])
def test_text_does_not_depend_on_slots_at_windows_of_four(checkpoints, prompt_ids, slots):
    folder = checkpoints["qwen4_exp"]
    expected = decode(open_engine(folder, "50%"), prompt_ids, TOKENS)
    engine = open_engine(folder, slots)
    use_draft(engine, ScriptedDraft(prompt_ids + expected, wrong=0.4), 4)
    assert decode(engine, prompt_ids, TOKENS) == expected
    assert engine.stats()["drafts"]["rejected"] > 0


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_c31_margin_swap_with_frozen_residency_writes_the_same_text(checkpoints, prompt_ids, rows):
    """All rows of a window see the residency at its start, which is frozen here: swaps do not depend on windows."""
    policy = MarginSwap(margin=4.0, ranks=(1, 3))
    engine = open_engine(checkpoints["qwen4_exp"], "25%", policy, admission="off")
    expected = decode(engine, prompt_ids, TOKENS)
    alone = engine.stats()["routing"]
    picks = engine.windows.counts.picks
    use_draft(engine, ScriptedDraft(prompt_ids + expected, wrong=0.4, seed=rows), rows)
    assert decode(engine, prompt_ids, TOKENS) == expected
    seen = engine.stats()["routing"]
    assert engine.stats()["drafts"]["rejected"] > 0 and alone["swaps"] > 0
    verified = seen.pop("verified")
    alone.pop("verified")
    assert seen == alone, "rejected rows must not count among the committed ones"
    assert engine.windows.counts.picks == picks
    assert verified["tail_cold"] > seen["tail_cold"], "all rows that ran are counted as work done"


def test_c13_rows_that_share_experts_read_each_once(checkpoints, prompt_ids):
    """C13: the same token in every row of a window picks much the same experts; each cold one is read once."""
    engine = open_engine(checkpoints["qwen3_moe"], "0")
    windows = engine.windows
    for rows in WINDOWS:
        sequence = windows.start()
        windows.read_prompt(sequence, prompt_ids)
        windows.reset_counts()
        windows.score(sequence, [77] * rows)
        distinct = [len(set(routed.ids_TK.flatten().tolist())) for routed in windows._routing.made]
        assert engine.runner.counts.cold_experts == sum(distinct)
        assert windows.counts.rows == windows.counts.verified_rows == rows
        assert windows.counts.picks == rows * 2 * 4


def test_scoring_given_rows_gives_the_logits_of_one_row_at_a_time(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    text, windows = [77, 3000, 12, 8000, 5, 450, 451, 452], engine.windows
    alone, together = windows.start(), windows.start()
    for sequence in (alone, together):
        windows.read_prompt(sequence, prompt_ids)
    one_by_one = torch.stack([windows.step(alone, token) for token in text])
    at_once = torch.cat([windows.score(together, text[:4]), windows.score(together, text[4:])])
    assert torch.allclose(one_by_one, at_once, rtol=0, atol=1e-5 * float(one_by_one.abs().max()))
    assert alone.ids == together.ids == prompt_ids + text


def test_states_belong_to_their_sequence(checkpoints, prompt_ids):
    """Two sequences that take turns, window by window, write what each writes alone."""
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    windows, other_ids = engine.windows, prompt_ids[::-1]

    def run(turns: list[list[int]]) -> list[torch.Tensor]:
        sequences = [windows.start() for _ in turns]
        last = [windows.read_prompt(sequence, ids) for sequence, ids in zip(sequences, turns, strict=True)]
        for _ in range(6):
            for number, sequence in enumerate(sequences):
                token = int(last[number].argmax())
                windows.verify(sequence, [token, 5, 6])
                windows.commit(sequence, 1)
                last[number] = windows.step(sequence, token)
        return last

    both = run([prompt_ids, other_ids])
    assert torch.equal(both[0], run([prompt_ids])[0]) and torch.equal(both[1], run([other_ids])[0])


def test_a_window_has_one_to_eight_rows(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["mixtral"], "33%")
    sequence = engine.windows.start()
    engine.windows.read_prompt(sequence, prompt_ids)
    with pytest.raises(WarmsetError, match=r"1 to 8 rows\. Got 9"):
        engine.windows.verify(sequence, [1] * 9)


def test_a_drafted_row_that_cannot_be_routed_ends_no_answer(checkpoints, prompt_ids):
    """A draft that was never drawn may be nonsense: the window is run again without it, and the text is the same."""
    engine = open_engine(checkpoints["qwen3_next"], "33%")
    expected = decode(engine, prompt_ids, 12)
    embedding = engine.windows._trunk.get_input_embeddings().weight
    poison = next(token for token in range(100, 200) if token not in prompt_ids + expected)
    embedding[poison] = float("nan")

    class Poisoned(ScriptedDraft):
        def propose(self, sequence, token, count, guess):
            return [*super().propose(sequence, token, count, guess)[:1], poison, poison][:count]

    use_draft(engine, Poisoned(prompt_ids + expected, wrong=0.0), 4)
    assert decode(engine, prompt_ids, 12) == expected
    sequence = engine.windows.start()
    engine.windows.read_prompt(sequence, prompt_ids)
    with pytest.raises(RowError, match="row 0"):
        engine.windows.verify(sequence, [poison, 5])


@pytest.mark.parametrize("rows", [1, 4])
def test_an_error_between_a_window_and_its_commit_takes_the_window_back(checkpoints, prompt_ids, rows):
    """A watcher that fails: its error comes through, and the engine goes on to answer as if it had not been."""
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    text = decode(engine, prompt_ids, 12)
    use_draft(engine, ScriptedDraft(prompt_ids + text, wrong=0.0), rows)
    drawn = []

    def watch(token: int) -> bool:
        drawn.append(token)
        if len(drawn) == 7:
            raise RuntimeError("no more")
        return False

    with pytest.raises(RuntimeError, match="no more"):
        list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=12), watch=watch))
    sequence = engine.conversation._sequence
    assert sequence is None or sequence.length == sequence.state.length
    turn = [*prompt_ids, *text[:6], 77]
    again = list(engine.decode(turn, SamplingConfig(max_new_tokens=6)))
    assert engine.stats()["cached_tokens"] >= len(prompt_ids)
    assert again == decode(engine, turn, 6)

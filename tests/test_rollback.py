"""C23: a window is taken back to any of its rows, and every state is that of a run that never drafted."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import FAMILIES
from helpers import open_engine
from windows import NOISE

import warmset
from warmset.recurrent import delta_rule_by_rows
from warmset.states import RecurrentLayer

LENGTH = 72
NUM_WINDOWS = 200


def all_states(sequence) -> list[torch.Tensor]:
    """Every tensor that a sequence's cache holds: keys, values, index keys, positions, convolutions, recurrent."""
    found = []
    for layer in sequence.state.cache.layers:
        if isinstance(layer, RecurrentLayer):
            found += layer.tensors()
        else:
            extras = (getattr(layer, "indexer_keys", None), getattr(layer, "indexer_position_ids", None))
            found += [layer.keys, layer.values, *(extra for extra in extras if extra is not None)]
    return found


def run_alone(windows, prompt_ids: list[int], text: list[int]):
    """Logits after each token of `text`, one row a window, and the states in the end."""
    sequence = windows.start()
    windows.read_prompt(sequence, prompt_ids)
    return torch.stack([windows.step(sequence, token) for token in text]), all_states(sequence)


@pytest.mark.parametrize("family", FAMILIES)
def test_c23_every_accepted_length_over_200_windows(checkpoints, prompt_ids, family):
    """Windows of 2, 4 and 8 rows, each cut after every one of its rows; random tokens are what is rejected."""
    engine = open_engine(checkpoints[family], "33%")
    windows, draw = engine.windows, random.Random(5)
    text = [draw.randrange(8192) for _ in range(LENGTH)]
    expected, final = run_alone(windows, prompt_ids, text)
    bound = NOISE * float(expected.abs().max())
    worst, ran, cuts = [], 0, set()
    while ran < NUM_WINDOWS:
        sequence, done = windows.start(), 0
        windows.read_prompt(sequence, prompt_ids)
        while done < LENGTH:
            rows = (2, 4, 8)[ran % 3]
            kept = min(LENGTH - done, 1 + (ran // 3) % rows)
            junk = [draw.randrange(8192) for _ in range(rows - kept)]
            logits_TV = windows.verify(sequence, text[done : done + kept] + junk)
            windows.commit(sequence, kept)
            worst.append(float((logits_TV[:kept] - expected[done : done + kept]).abs().max()))
            cuts.add((rows, kept))
            done, ran = done + kept, ran + 1
            assert int(sequence.state.cache.get_seq_length()) == len(sequence.ids), (
                "where transformers goes on"
            )
        assert sequence.ids == prompt_ids + text
        for state, never_drafted in zip(all_states(sequence), final, strict=True):
            assert state.shape == never_drafted.shape, "a rejected row left a trace"
            if state.dtype.is_floating_point:
                assert torch.allclose(
                    state, never_drafted, rtol=1e-4, atol=1e-5 * float(never_drafted.abs().max())
                )
            else:
                assert torch.equal(state, never_drafted)
    assert max(worst) <= bound, (max(worst), bound)
    assert cuts >= {(rows, kept) for rows in (2, 4, 8) for kept in range(1, rows + 1)}


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next"])
def test_not_taking_back_would_be_seen(checkpoints, prompt_ids, family):
    """The check above can fail: with the states of all rows kept, logits are off by far more than the bound."""
    engine = open_engine(checkpoints[family], "33%")
    windows, text = engine.windows, [77, 3000, 12]
    expected, _ = run_alone(windows, prompt_ids, text)
    sequence = windows.start()
    windows.read_prompt(sequence, prompt_ids)
    windows.verify(sequence, [text[0], 4001, 4002])
    for layer in sequence.state.recurrent:
        settle = layer.settle
        layer.settle = lambda num_rows, settle=settle: settle(3)
    windows.commit(sequence, 1)
    logits_V = windows.step(sequence, text[1])
    assert float((logits_V - expected[1]).abs().max()) > 1e3 * NOISE * float(expected.abs().max())


def test_a_row_of_the_rule_has_the_bits_of_transformers_own_one_token_rule():
    """Row by row our rule repeats transformers' operations, so T rows are T times one row, bit for bit."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    torch.manual_seed(3)
    heads, width, rows = 2, 8, 6
    query, key = (torch.randn(1, rows, heads, width) for _ in range(2))
    value, beta = torch.randn(1, rows, 2 * heads, width), torch.rand(1, rows, 2 * heads)
    g, state = -torch.rand(1, rows, 2 * heads), torch.randn(1, 2 * heads, width, width)
    out, states = delta_rule_by_rows(query, key, value, g, beta, state)
    for row in range(rows):
        part = slice(row, row + 1)
        one, state = torch_recurrent_gated_delta_rule(
            query[:, part], key[:, part], value[:, part], g=g[:, part], beta=beta[:, part],
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert torch.equal(one, out[:, part]) and torch.equal(state, states[row])


def test_an_error_in_a_window_leaves_the_states_as_they_were(checkpoints, prompt_ids, monkeypatch):
    """A window of several rows writes nothing until it is committed, so one that fails half-way is undone."""
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    windows = engine.windows
    expected, _ = run_alone(windows, prompt_ids, [77, 3000])
    sequence = windows.start()
    windows.read_prompt(sequence, prompt_ids)
    run, calls = engine.runner.run, []

    def failing(layer, *rest):
        calls.append(layer)
        if layer == 1:
            raise RuntimeError("a cable came loose")
        return run(layer, *rest)

    monkeypatch.setattr(engine.runner, "run", failing)
    with pytest.raises(RuntimeError):
        windows.verify(sequence, [77, 3000, 5])
    monkeypatch.undo()
    assert calls == [0, 1] and not sequence.broken
    assert torch.equal(windows.step(sequence, 77), expected[0])


def test_commit_costs_at_most_a_tenth_of_a_window():
    """A ratio within one run, since machines vary by the minute."""
    engine = warmset.Engine.load("builtin:tiny", slots="33%", window=4, draft="mtp", adapt=False)
    list(engine.stream("When a query is executed, the server", max_new_tokens=60))
    stages = engine.stats()["stages"]
    assert engine.stats()["drafts"]["rejected"] > 0
    assert stages["commit"] <= 0.1 * stages["total"], stages

"""Windows of several kept rows that the device leads: right and wrong drafts, ends inside a window, next turns."""

from __future__ import annotations

import pytest
from helpers import open_engine
from windows import BY_NOISE, decode, foreseen

from warmset.config import SamplingConfig

FAMILIES = ("qwen4_exp", "qwen3_next", "mixtral")
TOKENS = 30


def open_pair(folder, rows: int, **settings):
    """The same engine led by the host and by the device, and how many rows each tells its residency of."""
    pair = []
    for graphs in ("off", "on"):
        engine = open_engine(
            folder, "33%", window=rows, draft="lookup", adapt=False, graphs=graphs, **settings
        )
        told: list[int] = []
        engine.residency.listeners.append(lambda own_LTK, told=told: told.append(own_LTK.shape[1]))
        pair.append((engine, told))
    return pair


def counted(engine) -> dict:
    """What must be the same whoever leads."""
    stats = engine.stats()
    names = (
        "windows",
        "new_tokens",
        "finish_reason",
        "hit_rate",
        "bytes_slow",
        "cold_experts_per_layer_window",
    )
    drafts = {key: value for key, value in stats["drafts"].items() if key != "rows_why"}
    return {name: stats[name] for name in names} | {"routing": stats["routing"], "drafts": drafts}


def answer(engine, prompt, tokens=TOKENS, **ends) -> list[int]:
    engine.conversation.forget()
    return list(engine.decode(prompt, SamplingConfig(max_new_tokens=tokens, **BY_NOISE), **ends))


@pytest.mark.parametrize("wrong_every", [0, 5])
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_kept_and_taken_back_as_by_the_host(checkpoints, family, rows, wrong_every):
    (host, heard), (device, told) = open_pair(checkpoints[family], rows)
    prompt, text = foreseen(host, TOKENS, wrong_every=wrong_every)
    heard.clear()
    assert answer(host, prompt) == answer(device, prompt) == text
    assert told == heard and max(told) > 1
    assert counted(device) == counted(host)
    drafts = device.stats()["drafts"]
    assert drafts["accepted"] > TOKENS // 3 and (drafts["rejected"] > 0) == (wrong_every > 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_among_the_rows_of_a_window_keeps_the_rows_before_it(checkpoints, family):
    """A stop token, a watcher (as a stop text has one) and a cap, at every row of a window; then the next turn."""
    (host, heard), (device, told) = open_pair(checkpoints[family], 5)
    prompt, text = foreseen(host, TOKENS)
    for place in range(6, 12):
        token = text[place]
        ways = ({"stop_ids": frozenset([token])}, {"watch": lambda drawn, token=token: drawn == token}, {})
        for ends in ways:
            cap = TOKENS if ends else place + 1
            found = []
            for engine, rows in ((host, heard), (device, told)):
                rows.clear()
                first = answer(engine, prompt, cap, **ends)
                figures, length = counted(engine), len(engine.conversation._sequence.ids)
                told_rows = list(rows)
                again = list(engine.decode([*prompt, *first, 77, 78], SamplingConfig(max_new_tokens=3)))
                found.append((first, figures, length, told_rows, again, engine.stats()["cached_tokens"]))
            assert found[0] == found[1], (place, ends)
            assert found[1][0] == text[: place if "stop_ids" in ends else place + 1]
            assert sum(found[1][3]) == place and found[1][2] == len(prompt) + place


def test_a_reader_that_leaves_inside_a_window_leaves_a_whole_sequence(checkpoints):
    (host, _), (device, _) = open_pair(checkpoints["qwen3_next"], 8)
    prompt, text = foreseen(host, TOKENS)
    for engine in (host, device):
        engine.conversation.forget()
        stream = engine.decode(prompt, SamplingConfig(max_new_tokens=TOKENS, **BY_NOISE))
        assert [next(stream) for _ in range(4)] == text[:4]
        stream.close()
        sequence = engine.conversation._sequence
        assert sequence.length == sequence.state.length > len(prompt) + 3
        assert sequence.ids == [*prompt, *text][: sequence.length]


def test_a_watcher_that_fails_leaves_nothing_half_done(checkpoints):
    """Its error comes through; the next answer is whole, whether it may go on from the sequence or not."""
    device = open_pair(checkpoints["qwen4_exp"], 5)[1][0]
    prompt, text = foreseen(device, TOKENS)

    def watch(token: int) -> bool:
        if token == text[8]:
            raise RuntimeError("no more")
        return False

    with pytest.raises(RuntimeError, match="no more"):
        answer(device, prompt, watch=watch)
    sequence = device.conversation._sequence
    assert sequence is None or sequence.length == sequence.state.length
    turn = [*prompt, *text[:9], 77]
    ours = list(device.decode(turn, SamplingConfig(max_new_tokens=6)))
    assert ours == decode(device, turn, 6)


def test_the_number_of_rows_follows_what_is_right(checkpoints):
    """With drafts that are right every size is measured, and each depth is known to pay."""
    engine = open_engine(checkpoints["olmoe"], "all", window=4, draft="lookup", graphs="on")
    prompt, text = foreseen(open_engine(checkpoints["olmoe"], "all"), 60)
    # ended by a watcher: before a cap windows have fewer drafts than rows, which count as wrong
    place = next(place for place in range(44, 60) if text.index(text[place]) == place)
    assert answer(engine, prompt, 60, watch=lambda token: token == text[place]) == text[: place + 1]
    assert all(engine.depth.right[depth].value == 1.0 for depth in (1, 2, 3))
    assert all(engine.depth.ms[rows].count for rows in (1, 2, 3, 4))

"""Runs of windows without the host: the same text as windows that the host leads, states that can be given back."""

from __future__ import annotations

import random
import traceback

import numpy as np
import pytest
import torch
from conftest import FAMILIES
from helpers import open_engine
from torch.utils._python_dispatch import TorchDispatchMode
from windows import NOISE, decode, parts_at_a_near_tie, use_draft

from warmset.config import SamplingConfig
from warmset.draft import LookupDraft
from warmset.errors import RowError
from warmset.graph.cache import StaticCache, pages_for
from warmset.graph.draws import Draws
from warmset.graph.forms import StaticForms
from warmset.graph.runs import WindowRuns
from warmset.noise import gumbel_numpy
from warmset.routing import MarginSwap
from warmset.sample import _filtered, sample_token
from warmset.stages import StageClock

TOKENS = 40
CPU = torch.device("cpu")


def open_runs(engine, source="none", clock=None) -> WindowRuns:
    windows = engine.windows
    clock = clock or StageClock(CPU, enabled=False)
    return WindowRuns(windows.trunk, engine.runner, windows.routing, clock, source=source)


def start(engine, runs, prompt_ids, *, tokens=TOKENS, stop_ids=frozenset(), **sampling):
    """A sequence that has read the prompt, taken over; returns it, the logits after the prompt and the first token."""
    config = SamplingConfig(max_new_tokens=tokens, **sampling)
    sequence = engine.windows.start()
    logits_V = engine.windows.read_prompt(sequence, prompt_ids)
    token = sample_token(logits_V, config, len(prompt_ids))
    runs.begin(sequence.state, prompt_ids, token, sampling=config, most_tokens=tokens - 1, stop_ids=stop_ids)
    return sequence, logits_V, token


def finish(runs, rows: int, windows: int = 7) -> list[int]:
    tokens: list[int] = []
    while True:
        runs.run(windows, rows)
        new, done = runs.take()
        tokens += new
        if done:
            return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_accepted_length_gives_the_logits_of_one_row_windows(checkpoints, prompt_ids, family):
    """Static forms against windows of one row through transformers' modules; the states go back afterwards."""
    engine, draw = open_engine(checkpoints[family], "33%"), random.Random(5)
    windows, text = engine.windows, [draw.randrange(8192) for _ in range(48)]
    alone = windows.start()
    windows.read_prompt(alone, prompt_ids)
    expected = torch.stack([windows.step(alone, token) for token in text])
    sequence = windows.start()
    windows.read_prompt(sequence, prompt_ids)
    forms, worst, done, number = StaticForms.of(windows.trunk), [], 0, 0
    with torch.inference_mode():
        cache = StaticCache(sequence.state, pages_for(100), CPU)
        forms.prepare(cache)
        with forms.using(cache):
            while done < len(text):
                rows = (2, 4, 8, 1)[number % 4]
                kept = min(len(text) - done, 1 + (number // 3) % rows)
                junk = [draw.randrange(8192) for _ in range(rows - kept)]
                windows.routing.begin(list(range(len(prompt_ids) + done, len(prompt_ids) + done + rows)))
                tokens = torch.tensor(text[done : done + kept] + junk)
                logits_TV = forms.forward(tokens, cache.place.open(rows))
                worst.append(float((logits_TV[:kept] - expected[done : done + kept]).abs().max()))
                begin_2 = cache.place.begin_2
                begin_2.copy_(torch.stack([begin_2[1], begin_2[1] + kept]))
                done, number = done + kept, number + 1
        assert max(worst) <= NOISE * float(expected.abs().max())
        cache.store(sequence.state)
    sequence.ids += text
    after, reference = windows.step(sequence, 77), windows.step(alone, 77)
    assert torch.allclose(after, reference, rtol=0, atol=NOISE * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_text_is_the_hosts(checkpoints, prompt_ids, family, rows):
    engine = open_engine(checkpoints[family], "33%", MarginSwap(margin=0.5))
    prompt = prompt_ids * 3  # so that lookup has something to find
    seen = []
    step = engine.windows.step
    engine.windows.step = lambda sequence, token: seen.append(step(sequence, token)) or seen[-1]
    reference = decode(engine, prompt, TOKENS)
    engine.windows.step = step
    runs = open_runs(engine, "lookup" if rows > 1 else "none")
    sequence, logits_V, first = start(engine, runs, prompt)
    text = [first, *finish(runs, rows)]
    assert not parts_at_a_near_tie(reference, text, torch.stack([logits_V, *seen]))
    kept = runs.end(sequence.state)
    counts = runs.counts()
    assert counts.rows == kept == TOKENS - 1 and counts.windows <= kept
    # one row a window ends the last token's own window; with drafts several rows share one
    assert counts.verified_rows >= counts.rows
    assert int(counts.routing_5[1]) > 0, "no swap, so the policy was not seen to act"
    if rows == 1:
        assert counts.picks == engine.windows.counts.picks
        assert torch.equal(counts.routing_5, engine.windows.counts.routing_5)


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11},
    {"temperature": 0.7, "top_p": 0.5, "seed": 2**63 - 1},
    {"temperature": 1e-3, "min_p": 0.2},
    {},
])  # fmt: skip
def test_draws_are_those_of_the_host(sampling):
    """Token for token over 200 rows, from the noise that both sides make."""
    config = SamplingConfig(**sampling)
    logits_TV = 3 * torch.randn(200, 501, generator=torch.Generator().manual_seed(1))
    position_T = torch.arange(1000, 1200)
    drawer = Draws(CPU)
    drawn = drawer.draw(drawer.use(config), logits_TV, position_T)
    expected = []
    for logits_V, position in zip(logits_TV.numpy().astype(np.float64), position_T.tolist(), strict=True):
        if config.temperature == 0.0:
            expected.append(int(logits_V.argmax()))
            continue
        scores_V = _filtered((logits_V - logits_V.max()) / config.temperature, config)
        expected.append(int((scores_V + gumbel_numpy(config.seed, position, 501)).argmax()))
    assert drawn.tolist() == expected
    assert len(set(expected)) > 20


def test_lookup_drafts_are_accepted_and_rejected(checkpoints, prompt_ids):
    """With a prompt that repeats: as many windows as the host needs, rows of both kinds."""
    engine = open_engine(checkpoints["mixtral"], "all")
    use_draft(engine, LookupDraft(), 4)
    prompt = prompt_ids * 3
    reference = decode(engine, prompt, TOKENS)
    runs = open_runs(engine, "lookup")
    _, _, first = start(engine, runs, prompt)
    assert [first, *finish(runs, 4)] == reference
    counts, host = runs.counts(), engine.windows.counts
    assert (counts.windows, counts.rows, counts.picks) == (host.windows, host.rows, host.picks)
    assert counts.verified_rows == host.verified_rows


def test_nothing_after_a_stop_token_is_kept(checkpoints, prompt_ids):
    """C25, C26: inside a window, and windows that were queued behind it change nothing."""
    engine = open_engine(checkpoints["qwen4_exp"], "all")
    text = decode(engine, prompt_ids, TOKENS)
    stop = next(token for token in text[9:] if token not in text[:9])
    length = text.index(stop)
    runs = open_runs(engine, "lookup")
    sequence, _, first = start(engine, runs, prompt_ids, stop_ids=frozenset([stop, 8191]))
    tokens = [first, *finish(runs, 8, windows=40)]
    assert tokens == text[: length + 1]
    runs.run(3, 8)
    assert runs.take() == ([], True)
    runs.end(sequence.state)
    assert sequence.state.length == len(prompt_ids) + length
    sequence.ids += tokens[:-1]
    alone = engine.windows.start()
    engine.windows.read_prompt(alone, sequence.ids)
    ours, theirs = engine.windows.step(sequence, stop), engine.windows.step(alone, stop)
    assert torch.allclose(ours, theirs, rtol=0, atol=NOISE * float(theirs.abs().max()))


def test_a_cap_is_kept_to_the_token(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["olmoe"], "all")
    text = decode(engine, prompt_ids, 20)
    for tokens in (2, 3, 5, 11):
        runs = open_runs(engine, "lookup")
        _, _, first = start(engine, runs, prompt_ids, tokens=tokens)
        assert [first, *finish(runs, 8)] == text[:tokens]


def test_a_row_that_cannot_be_routed_ends_the_run_with_its_layer(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "all")
    runs = open_runs(engine)
    start(engine, runs, prompt_ids)
    router = next(
        module for module in engine.windows.trunk.modules() if getattr(module, "layer", None) is not None
        and module.layer.index == 1 and hasattr(module, "original")
    )  # fmt: skip
    with torch.inference_mode():
        router.original.weight.fill_(float("nan"))
    runs.run(2, 1)
    with pytest.raises(RowError, match="Layer 1, row 0"):
        runs.take()


def test_a_second_answer_uses_the_same_memory(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_next"], "all")
    runs = open_runs(engine, "lookup")
    texts = []
    for prompt in (prompt_ids, prompt_ids[:5], prompt_ids):
        _, _, first = start(engine, runs, prompt)
        texts.append([first, *finish(runs, 4)])
        assert texts[-1] == decode(engine, prompt, TOKENS)
    assert texts[0] == texts[2] and runs.cache.places == 256


SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")
HOST_CODE = ("window_reference.py", "experts.py", "stamps.py", "dispatch.py", "policies.py", "route_rows.py")
"""What runs in these files on a CPU are kernels on a GPU, or the host's clock."""


class HostSyncs(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU, and where it was called."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in SYNCS or by_mask:
            stack = traceback.extract_stack()
            if not any(frame.filename.endswith(HOST_CODE) for frame in stack):
                place = next(
                    f for f in reversed(stack) if "torch/" not in f.filename and __file__ != f.filename
                )
                self.found.append((name, place.filename, place.lineno, place.line))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_window_waits_for_the_host(checkpoints, prompt_ids, family):
    engine = open_engine(checkpoints[family], "33%", MarginSwap(margin=0.5))
    for rows, source in ((1, "none"), (4, "lookup")):
        runs = open_runs(engine, source)
        start(engine, runs, prompt_ids, temperature=0.8, top_p=0.9)
        with torch.inference_mode(), runs.forms.using(runs.cache), HostSyncs() as syncs:
            runs._body(rows)
        assert not syncs.found, syncs.found


def test_the_check_for_host_syncs_can_fail():
    with HostSyncs() as syncs:
        torch.arange(4)[torch.tensor(2)].item()
        _ = torch.arange(4)[torch.arange(4) > 1]
    assert {name for name, *_ in syncs.found} >= {"_local_scalar_dense", "index"}

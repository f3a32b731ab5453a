"""On a GPU: a run of windows is one captured graph a window size, with the text of windows that the host leads."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from mtp_checkpoints import add_mtp
from windows import BY_NOISE, decode, foreseen, parts_at_a_near_tie

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.graph.runs import WindowRuns
from warmset.graph.stamps import StampClock, follow_kinds, stage_table
from warmset.routing import MarginSwap
from warmset.sample import sample_token
from warmset.stages import StageClock

pytestmark = pytest.mark.gpu

TOKENS = 40
TINY = "builtin:tiny"
CUDA = torch.device("cuda:0")


def open_engine(folder, slots="33%", policy=None, dtype="float32", **settings) -> TokenEngine:
    """Led by the host, its slots left alone, unless `settings` say otherwise."""
    settings = {"admission": "off", "graphs": "off", **settings}
    config = EngineConfig(
        model=str(folder), slots=SlotsRequest(text=slots), device="cuda", dtype=dtype, **settings
    )
    return TokenEngine(config, policy)


def open_runs(engine, source="none", clock=None) -> WindowRuns:
    clock = clock or StageClock(CUDA, enabled=False)
    return WindowRuns(engine.windows.trunk, engine.runner, engine.windows.routing, clock, source=source)


def start(engine, runs, prompt, tokens=TOKENS, **sampling):
    config = SamplingConfig(max_new_tokens=tokens, **sampling)
    sequence = engine.windows.start()
    logits_V = engine.windows.read_prompt(sequence, prompt)
    assert runs.why_not(sequence.state, config) is None
    token = sample_token(logits_V, config, len(prompt))
    runs.begin(sequence.state, prompt, token, sampling=config, most_tokens=tokens - 1)
    return sequence, logits_V, token


def finish(runs, rows) -> list[int]:
    tokens: list[int] = []
    while True:
        runs.run(8, rows)
        new, done = runs.take()
        tokens += new
        if done:
            return tokens


def by_the_host(engine, prompt, tokens=TOKENS):
    """The text of windows of one row that the host leads, and the logits that chose it."""
    sequence = engine.windows.start()
    logits = [engine.windows.read_prompt(sequence, prompt).clone()]
    text = [int(logits[0].argmax())]
    while len(text) < tokens:
        logits.append(engine.windows.step(sequence, text[-1]).clone())
        text.append(int(logits[-1].argmax()))
    return text, torch.stack(logits).float().cpu()


@pytest.mark.parametrize("policy", [None, MarginSwap(margin=0.5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_windows_write_the_hosts_text(checkpoints, prompt_ids, family, policy):
    engine, prompt = open_engine(checkpoints[family], policy=policy), prompt_ids * 3
    text, logits_NV = by_the_host(engine, prompt)
    for rows, source in ((1, "none"), (4, "lookup"), (8, "lookup")):
        runs = open_runs(engine, source)
        sequence, _, first = start(engine, runs, prompt)
        got = [first, *finish(runs, rows)]
        parts_at_a_near_tie(text, got, logits_NV)
        assert runs.captures == 1
        before = runs.counts()
        assert before.rows == TOKENS - 1 and before.windows <= TOKENS - 1
        runs.end(sequence.state)
        assert sequence.state.length == len(prompt) + TOKENS - 1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp_sparse"])
def test_bf16_captured_windows_are_those_of_the_same_code_run_as_python(checkpoints, prompt_ids, family):
    """The graph against its own body, bit for bit: nothing that is captured depends on the host."""
    engine = open_engine(checkpoints[family], dtype="bfloat16")
    texts = []
    for eager in (True, False):
        runs = open_runs(engine, "lookup")
        _, _, first = start(engine, runs, prompt_ids * 2)
        if eager:
            with torch.inference_mode(), runs.forms.using(runs.cache):
                for _ in range(TOKENS):
                    runs._body(4)
            texts.append([first, *runs.take()[0]])
        else:
            texts.append([first, *finish(runs, 4)])
    assert texts[0] == texts[1]


def test_c50_slots_and_tables_change_under_a_graph(checkpoints, prompt_ids):
    """Other residents, other bytes in a slot, a resize: each replay follows; only a resize to all is captured anew."""
    engine = open_engine(checkpoints["qwen3_next"])
    runs = open_runs(engine)
    text, logits_NV = by_the_host(engine, prompt_ids)

    def answer() -> list[int]:
        _, _, first = start(engine, runs, prompt_ids)
        return [first, *finish(runs, 1)]

    reference = answer()
    parts_at_a_near_tie(text, reference, logits_NV)
    total = engine.prepared.experts.num_layers * engine.prepared.experts.num_experts
    others = [(layer, expert) for layer in range(2) for expert in range(15, 10, -1)]
    engine.slots.fill(others, engine.store)
    assert answer() == reference and runs.captures == 1
    engine.slots.resize(3, engine.store)
    assert answer() == reference and runs.captures == 1
    engine.slots.resize(total, engine.store)
    engine.slots.fill([divmod(number, 16) for number in range(total)], engine.store)
    assert answer() == reference and runs.captures == 2
    with torch.inference_mode():
        for slot in range(total):
            engine.slots.slot_B(slot).zero_()
    changed, logits_NV = by_the_host(engine, prompt_ids)
    ours = answer()
    parts_at_a_near_tie(changed, ours, logits_NV)
    assert ours != reference and runs.captures == 2


def test_a_policys_numbers_change_under_a_graph(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], policy=MarginSwap(margin=0.0))
    runs = open_runs(engine)
    swaps = []
    for margin in (-9.0, 9.0, -9.0):
        engine.windows.routing.table.set_value(margin)
        start(engine, runs, prompt_ids)
        finish(runs, 1)
        swaps.append(int(runs.counts().routing_5[1]))
    assert runs.captures == 1 and swaps[0] == swaps[2] == 0 < swaps[1]


def test_drawn_tokens_are_the_hosts(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["mixtral"], slots="all")
    for sampling in (
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 6},
    ):
        runs = open_runs(engine)
        _, _, first = start(engine, runs, prompt_ids, **sampling)
        ours = [first, *finish(runs, 1)]
        theirs = list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=TOKENS, **sampling)))
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), TOKENS)
        assert same >= TOKENS // 2, (same, ours, theirs)


@pytest.mark.alone
def test_stages_add_up_to_the_window(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"])
    clock = StampClock(CUDA)
    from warmset.model import _install_clock

    _install_clock(engine.windows.trunk, clock)
    follow_kinds(engine.windows.trunk, clock)
    runs = open_runs(engine, clock=clock)
    start(engine, runs, prompt_ids)
    runs.run(1, 1)
    torch.cuda.synchronize()
    clock.reset()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    runs.run(20, 1)
    last.record()
    torch.cuda.synchronize()
    windows = clock.read(runs.marks(1))
    table = stage_table(windows)
    assert len(windows) == 20
    assert table["sum_ms"] == pytest.approx(table["total_ms"], rel=0.05)
    assert sum(sum(window.values()) for window in windows) == pytest.approx(
        first.elapsed_time(last), rel=0.05
    )
    assert set(table["kinds"]) == {"linear_attention", "indexed_attention"}


@pytest.mark.parametrize("settings", [
    {"admission": "lfu"},
    {"admission": "off", "policy": MarginSwap(margin=0.5)},
    {"admission": "lfu", "window": 4, "draft": "lookup", "adapt": False},
])  # fmt: skip
@pytest.mark.parametrize("family", ["qwen4_exp_sparse", "qwen3_next"])
def test_an_engines_answers_are_captured_by_default(checkpoints, prompt_ids, family, settings):
    """Text, counters, and what the slots hold afterwards are those of windows that the host leads."""
    host = open_engine(checkpoints[family], **settings)
    device = open_engine(checkpoints[family], **{**settings, "graphs": "auto"})
    _, logits_NV = by_the_host(open_engine(checkpoints[family], policy=settings.get("policy")), prompt_ids)
    for sampling in (SamplingConfig(max_new_tokens=TOKENS), SamplingConfig(max_new_tokens=11)):
        texts = []
        for engine in (host, device):
            engine.conversation.forget()
            texts.append(list(engine.decode(prompt_ids, sampling)))
        stats = device.stats()
        assert stats["graphs"] == {"used": True, "why_not": None, "captures": 1}
        if not parts_at_a_near_tie(*texts, logits_NV):
            theirs = host.stats()
            for name in (
                "windows",
                "cold_experts_per_layer_window",
                "hit_rate",
                "bytes_slow",
                "routing",
                "admission",
            ):
                assert stats[name] == theirs[name], name
    more = list(device.decode([*prompt_ids, *texts[1], 9], SamplingConfig(max_new_tokens=5)))
    assert len(more) == 5 and device.stats()["cached_tokens"] >= len(prompt_ids)


def test_windows_that_ran_ahead_of_a_stop_token_are_not_counted(checkpoints, prompt_ids):
    host, device = open_engine(checkpoints["mixtral"]), open_engine(checkpoints["mixtral"], graphs="auto")
    config = SamplingConfig(max_new_tokens=TOKENS)
    text = list(host.decode(prompt_ids, config))
    stop = next(token for token in text[10:] if token not in text[:10])
    answers = []
    for engine in (host, device):
        engine.conversation.forget()
        answers.append(list(engine.decode(prompt_ids, config, frozenset([stop]))))
    assert answers[0] == answers[1] == text[: text.index(stop)]
    for name in ("windows", "cold_experts_per_layer_window", "bytes_slow", "bytes_fast"):
        assert device.stats()[name] == host.stats()[name], name


@pytest.mark.alone
def test_the_stages_of_an_engines_captured_windows(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_next"], graphs="auto", stages=True)
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=TOKENS)))
    stages = engine.stats()["stages"]
    total = stages.pop("total")
    assert sum(stages.values()) == pytest.approx(total) and stages["token mixer"] > 0 < stages["cold wait"]
    assert (TOKENS - 1) * total <= 1.1 * engine.run.decode_ms


def test_nothing_is_allocated_or_waited_for_while_windows_run(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"])
    runs = open_runs(engine)
    start(engine, runs, prompt_ids, tokens=200)
    runs.run(2, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs.run(50, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(runs.take()[0]) == 52


@pytest.fixture(scope="module")
def with_mtp(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    made = {name: add_mtp(checkpoints[name], root / name) for name in ("qwen3_next", "qwen4_exp_sparse")}
    return {TINY: TINY, **made}


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("family", [TINY, "qwen3_next", "qwen4_exp_sparse"])
def test_the_mtp_layer_drafts_inside_the_graph(with_mtp, prompt_ids, family, rows):
    """Greedy text is that of single rows; drafts by noise alone are all right, so no window is wasted; turns go on."""
    settings = {"window": rows, "draft": "mtp", "adapt": False}
    host, device = (open_engine(with_mtp[family], **settings, graphs=graphs) for graphs in ("off", "auto"))
    text, logits_NV = by_the_host(open_engine(with_mtp[family]), prompt_ids)
    ours = decode(device, prompt_ids, TOKENS)
    assert device.stats()["graphs"] == {"used": True, "why_not": None, "captures": 1}
    if not parts_at_a_near_tie(text, ours, logits_NV) and decode(host, prompt_ids, TOKENS) == text:
        ratio = device.stats()["windows"] / host.stats()["windows"]
        assert 0.9 <= ratio <= 1.1, "a draft may fall to the other side of a near-tie"
    assert decode(device, prompt_ids, TOKENS, **BY_NOISE) == decode(host, prompt_ids, TOKENS, **BY_NOISE)
    assert device.stats()["windows"] == -(-(TOKENS - 1) // rows) and device.stats()["drafts"]["rejected"] == 0
    ended = decode(device, prompt_ids, TOKENS, **BY_NOISE)[:10]
    device.conversation.forget()
    sampling = SamplingConfig(max_new_tokens=TOKENS, **BY_NOISE)
    assert list(device.decode(prompt_ids, sampling, watch=lambda token: token == ended[-1])) == ended
    turn = [*prompt_ids, *ended, 77, 78]
    again = list(device.decode(turn, SamplingConfig(max_new_tokens=12)))
    assert device.stats()["cached_tokens"] == len(prompt_ids) + 9
    expected, logits_NV = by_the_host(host, turn, 12)
    parts_at_a_near_tie(expected, again, logits_NV)


def test_drafting_ahead_allocates_nothing_and_waits_for_nothing(prompt_ids):
    engine = open_engine(TINY, window=4, draft="mtp", graphs="auto", adapt=False)
    decode(engine, prompt_ids, 8)
    runs = engine.captured._runs
    engine.conversation.forget()
    sequence = engine.windows.start()
    token = int(engine.windows.read_prompt(sequence, prompt_ids).argmax())
    given = {"sampling": SamplingConfig(max_new_tokens=300), "most_tokens": 200, "sequence": sequence}
    runs.begin(sequence.state, sequence.ids, token, **given)
    runs.run(2, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs.run(20, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(runs.take()[0]) >= 22


CAPTURING = {"graphs": "auto", "admission": "lfu"}
"""What an engine does on a GPU where nothing is said."""


@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp"])
def test_an_engines_captured_windows_of_several_rows_go_back_and_on(checkpoints, family):
    """Right and wrong drafts; a watcher ends the answer inside a window; a next turn goes on from what was kept."""
    several = {"window": 4, "draft": "lookup", "adapt": False}
    host = open_engine(checkpoints[family], **several)
    device = open_engine(checkpoints[family], **several, **CAPTURING)
    prompt, text = foreseen(host, TOKENS, wrong_every=5)
    for engine in (host, device):
        assert decode(engine, prompt, TOKENS, **BY_NOISE) == text
    theirs, ours = host.stats()["drafts"], device.stats()["drafts"]
    assert device.stats()["graphs"] == {"used": True, "why_not": None, "captures": 1}
    assert device.stats()["windows"] == host.stats()["windows"] < TOKENS - 1
    assert ours["by_depth"] == theirs["by_depth"] and ours["verified_rows"] == theirs["verified_rows"]
    assert min(ours["accepted"], ours["rejected"]) > 0
    sampling = SamplingConfig(max_new_tokens=TOKENS, **BY_NOISE)
    for place in (7, 8, 9):
        device.conversation.forget()
        begun = list(device.decode(prompt, sampling, watch=lambda token, place=place: token == text[place]))
        assert begun == text[: place + 1] and device.windows.counts.rows == place
        turn = [*prompt, *begun, 77, 78]
        again = list(device.decode(turn, SamplingConfig(max_new_tokens=8)))
        assert device.stats()["cached_tokens"] == len(prompt) + place
        expected, logits_NV = by_the_host(host, turn, 8)
        parts_at_a_near_tie(expected, again, logits_NV)


def test_c50_an_engine_resizes_between_answers(checkpoints, prompt_ids):
    """Exact mode: the same text, bit for bit, whatever the slots hold; a new graph only where nothing is cold."""
    device = open_engine(checkpoints["qwen4_exp"], dtype="bfloat16", **CAPTURING)
    total = device.prepared.experts.num_layers * device.prepared.experts.num_experts
    text = decode(device, prompt_ids, TOKENS)
    for slots in (3, 9):
        device.residency.resize(slots)
        assert decode(device, prompt_ids, TOKENS) == text
    assert device.stats()["graphs"]["captures"] == 1
    device.residency.resize(total)
    device.slots.fill([divmod(number, 16) for number in range(total)], device.store)
    assert decode(device, prompt_ids, TOKENS) == text
    assert device.stats()["graphs"]["captures"] == 2

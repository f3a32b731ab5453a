"""The arithmetic of a price: KL and its lower bound, losses, intervals, the text and how it is cut."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from warmset.errors import WarmsetError
from warmset.measure.price.bootstrap import Blocks
from warmset.measure.price.divergence import TOP, compare, losses
from warmset.measure.price.documents import (
    Document,
    ScoredText,
    Segment,
    documents_of,
    read_documents,
    shared_runs,
    split_text,
)
from warmset.measure.price.measurement import Pass
from warmset.measure.price.passes import RoutingFacts
from warmset.measure.price.summary import Summary, pareto
from warmset.models import BUILTIN


def random_logits(rows: int, width: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * scale


# -- divergence -----------------------------------------------------------------------------------------------


def test_kl_is_the_textbook_sum():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    q = torch.tensor([[0.5, 0.25, 0.25]])
    found = compare(p.log(), q.log(), torch.tensor([1]))
    expected = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert float(found.kl_T) == pytest.approx(expected, abs=1e-7)
    assert float(found.loss_T) == pytest.approx(-math.log(0.25), abs=1e-7)
    assert bool(found.same_T)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(2, 300), seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 6.0, 40.0]))
def test_the_lumped_tail_never_exceeds_the_full_kl(width, seed, scale):
    """Merging classes cannot add to a KL; with at most 64 tokens nothing is merged and both are the same."""
    reference, other = random_logits(5, width, seed, scale), random_logits(5, width, seed + 1, scale)
    target = torch.zeros(5, dtype=torch.long)
    found = compare(reference, other, target)
    tolerance = 1e-12 * (1 + found.kl_T)
    assert bool((found.kl_top_T <= found.kl_T + tolerance).all())
    assert bool((found.kl_top_T >= 0).all() and torch.isfinite(found.kl_T).all())
    if width <= TOP:
        assert torch.allclose(found.kl_top_T, found.kl_T, rtol=1e-9, atol=1e-12)
    full = F.kl_div(
        F.log_softmax(other.double(), 1),
        F.log_softmax(reference.double(), 1),
        log_target=True,
        reduction="none",
    )
    assert torch.allclose(found.kl_T, full.sum(dim=1).clamp(min=0), rtol=1e-9, atol=1e-12)


def test_the_lump_loses_something_where_the_tail_differs():
    reference, other = random_logits(3, 4000, 1, 0.5), random_logits(3, 4000, 2, 0.5)
    found = compare(reference, other, torch.zeros(3, dtype=torch.long))
    assert bool((found.kl_top_T < 0.9 * found.kl_T).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_exactly_zero(dtype):
    logits = random_logits(7, 5000, 3).to(dtype)
    found = compare(logits, logits.clone(), torch.arange(7))
    assert found.kl_T.eq(0).all() and found.kl_top_T.eq(0).all() and found.same_T.all()


def test_many_rows_are_cut_into_pieces_and_stay_in_order():
    reference, other = random_logits(600, 9000, 4), random_logits(600, 9000, 5)
    target = torch.randint(0, 9000, (600,), generator=torch.Generator().manual_seed(6))
    found = compare(reference, other, target)
    for row in (0, 465, 466, 599):
        alone = compare(reference[row : row + 1], other[row : row + 1], target[row : row + 1])
        assert torch.equal(alone.kl_T, found.kl_T[row : row + 1])
    expected = F.cross_entropy(reference.double(), target, reduction="none")
    assert torch.allclose(losses(reference, target), expected)


# -- C42 ------------------------------------------------------------------------------------------------------


def facts(num_positions: int, rows: int, num_layers: int = 1, changed: bool = True) -> RoutingFacts:
    window_N = np.arange(num_positions) // rows
    moved_NLK = np.zeros((num_positions, num_layers, 2), dtype=bool)
    moved_NLK[:, :, 1] = changed
    zeros_N = np.zeros(num_positions, dtype=np.int32)
    return RoutingFacts(
        own_NLK=np.zeros((num_positions, num_layers, 2), dtype=np.int16),
        moved_NLK=moved_NLK,
        swaps_N=zeros_N + changed,
        dropped_N=zeros_N,
        tail_cold_N=zeros_N,
        cold_WL=np.ones((window_N[-1] + 1, num_layers), dtype=np.int32),
        window_N=window_N.astype(np.int32),
    )


def made_pass(loss_N: np.ndarray, kl_N: np.ndarray, rows: int = 4, changed: bool = True) -> Pass:
    same_N = np.ones(len(loss_N), dtype=bool)
    return Pass("made", kl_N, kl_N, same_N, loss_N, facts(len(loss_N), rows, changed=changed), "00" * 32, 1.0)


def test_c42_perplexity_is_over_tokens_and_not_over_windows():
    """Windows of 4, 4 and 2 tokens with mean losses 1, 1 and 3: loss 1.4, perplexity 4.055; never 1.667."""
    text = ScoredText((Segment(0, "text", tuple(range(12)), 0),))
    loss_N = np.array([1.0] * 8 + [3.0] * 2)
    found = Summary(text, 100).off(made_pass(loss_N, np.zeros(10)))
    assert found["loss"] == pytest.approx(1.4)
    assert found["perplexity"] == pytest.approx(4.055, abs=1e-3)
    assert found["positions"] == 10
    assert found["cold_experts_per_layer_window"] == 1 and found["bytes_per_token"] == pytest.approx(30)


def test_c43_no_verdict_where_nothing_was_changed():
    text = ScoredText((Segment(0, "text", tuple(range(12)), 0),))
    off, zero = made_pass(np.ones(10), np.zeros(10)), np.zeros(10)
    idle = Summary(text, 1).arm("idle", off, made_pass(np.ones(10), zero, changed=False))
    assert idle["verdict"] == "no verdict" and "no pick" in idle["why"]
    busy = Summary(text, 1).arm("busy", off, made_pass(np.ones(10), zero + 0.1))
    assert busy["verdict"] == "measured"


# -- intervals ------------------------------------------------------------------------------------------------


def correlated(num: int, seed: int, memory: float) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=num)
    values = np.zeros(num)
    for place in range(1, num):
        values[place] = memory * values[place - 1] + noise[place]
    return values


def test_intervals_cover_the_true_mean_where_neighbours_are_alike():
    """Over 200 texts with a true mean of 0: 95% intervals cover it in 88 to 99%, single draws in far fewer."""
    documents = np.repeat(np.arange(10), 400)
    blocks = Blocks(documents, replicates=400)
    single = Blocks(documents, block=1, replicates=400)
    covered = naive = 0
    for seed in range(200):
        values = correlated(4000, seed, 0.9)
        one, other = blocks.mean(values), single.mean(values)
        covered += one.low < 0 < one.high
        naive += other.low < 0 < other.high
    assert 0.88 <= covered / 200 <= 0.99
    assert naive / 200 < 0.6


def test_blocks_stay_within_their_document():
    documents = np.repeat([4, 7, 2], [100, 1, 65])
    blocks = Blocks(documents, block=64)
    assert blocks.num_blocks == 5
    for number in range(blocks.num_blocks):
        assert len(set(documents[blocks.block_N == number])) == 1


def test_the_same_seed_gives_the_same_interval_and_another_one_another():
    documents, values = np.repeat(np.arange(20), 64), correlated(1280, 1, 0.5)
    one = Blocks(documents, seed=3).mean(values)
    assert one == Blocks(documents, seed=3).mean(values) != Blocks(documents, seed=4).mean(values)
    assert one.low < one.value < one.high and one.value == pytest.approx(values.mean())


def test_a_part_of_the_positions_has_its_own_mean_and_too_few_blocks_no_interval():
    documents, values = np.repeat(np.arange(20), 64), correlated(1280, 2, 0.5)
    blocks, among = Blocks(documents), np.arange(1280) < 640
    part = blocks.mean(values, among)
    assert part.value == pytest.approx(values[:640].mean()) and part.low < part.value < part.high
    assert blocks.mean(values, np.arange(1280) < 100).as_list() is None
    assert math.isnan(blocks.mean(values, np.zeros(1280, dtype=bool)).value)


def test_quantile():
    documents, values = np.repeat(np.arange(20), 64), np.random.default_rng(5).permutation(1280).astype(float)
    found = Blocks(documents).quantile(values, 0.99)
    assert found.value == np.quantile(values, 0.99, method="inverted_cdf")
    assert found.low <= found.value <= found.high


def test_pareto_front():
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0), (2.5, 2.0), (2.0, 3.0), (4.0, 1.5)]
    assert [points[index] for index in pareto(points)] == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]


# -- text -----------------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_each_position_is_scored_once():
    documents = [Document("prose", "abcdefghij"), Document("code", "xy"), Document("code", "klmno")]
    text = split_text(documents, letters, context=4)
    assert [segment.ids for segment in text.segments] == [
        tuple(map(ord, part)) for part in ("abcd", "efgh", "klmn")
    ]
    assert [segment.first for segment in text.segments] == [0, 2, 4]
    of = text.of_positions()
    assert [chr(token) for token in of["token"]] == list("bcfglm")
    assert [chr(token) for token in of["target"]] == list("cdghmn")
    assert of["kind"].tolist() == [0, 0, 0, 0, 1, 1] and of["document"].tolist() == [0, 0, 0, 0, 2, 2]
    assert text.num_positions == 6 and text.kinds == ["prose", "code"]


def test_a_shorter_text_keeps_its_windows_whole():
    text = split_text([Document("a", "x" * 30), Document("b", "y" * 30)], letters, context=100)
    assert text.first_positions(5).num_positions == 5
    assert text.first_positions(5, rows=4).num_positions == 8
    assert text.first_positions(29, rows=4).num_positions == 32
    assert text.first_positions(1000).token_hash == text.token_hash
    part = text.openings(16, rows=4)
    assert [segment.num_scored for segment in part.segments] == [8, 8] and part.segments[1].first == 8


def test_the_hash_is_of_the_tokens():
    one, same, other = (split_text([Document("k", t)], letters, 100) for t in ("abcdef", "abcdef", "abcdeg"))
    assert one.token_hash == same.token_hash != other.token_hash


def test_runs_in_common():
    whole = "".join(chr(300 + number) for number in range(120))
    one = split_text([Document("k", whole)], letters, 1000)
    other = split_text([Document("k", "zz" + whole[30:85] + "zz")], letters, 1000)
    assert shared_runs(one, other) == 55 - 50 + 1
    assert shared_runs(one, split_text([Document("k", "zz" + whole[30:79])], letters, 1000)) == 0


def test_shipped_texts_share_no_run():
    tokenizer = Tokenizer.from_file(str(BUILTIN["builtin:tiny"] / "tokenizer.json"))
    price, calibration = (
        split_text(read_documents(name), lambda text: tokenizer.encode(text).ids, 10**6)
        for name in ("builtin:price", "builtin:calibration")
    )
    assert shared_runs(price, calibration) == 0
    assert price.num_positions >= 7600 and set(price.kinds) == {"prose", "code", "chinese"}


def test_texts_from_files(tmp_path: Path):
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one text")
    lines.write_text('{"kind": "code", "text": "x = 1"}\n\n{"text": "words"}\n')
    assert read_documents(plain) == [Document("text", "one text")]
    assert read_documents(lines) == [Document("code", "x = 1"), Document("text", "words")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"kind": "code"}', "line 1: a line must be a JSON object with a `text`"),
        ("no json", "line 1"),
        ('{"text": "x"}\n[1]', "line 2"),
        ('{"text": "x", "kind": 3}', "`kind` must be a text. Got 3."),
        ("", "at least one document"),
    ],
)
def test_bad_text_files_are_one_sentence(tmp_path: Path, content, sentence):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(WarmsetError, match=sentence):
        read_documents(file)


def test_bad_texts_are_one_sentence(tmp_path: Path):
    with pytest.raises(WarmsetError, match="cannot be read"):
        read_documents(tmp_path / "missing.txt")
    with pytest.raises(WarmsetError, match="one of builtin:price"):
        read_documents("builtin:nothing")
    with pytest.raises(WarmsetError, match="Got 7"):
        documents_of([7])
    with pytest.raises(WarmsetError, match="at least 3 tokens"):
        split_text([Document("k", "ab")], letters, 100)

"""The text side of the embedded model: tokenizer, shipped texts, near-duplicates, and the search for leaks."""

import hashlib
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from training import dedup, heldout
from training.corpus import (
    DATA,
    KINDS,
    MIX,
    MODEL,
    CorpusConfig,
    Document,
    LeakGuard,
    clean,
    distinct,
    pack,
    split,
)
from training.packed import unpack_text
from training.sources import Source, load_sources
from training.tokenizer import SPECIAL, VOCABULARY

PERMISSIVE = {"PSF-2.0", "BSD-3-Clause", "PostgreSQL", "MIT", "Apache-2.0", "blessing"}

ODD_TEXTS = [
    "",
    " leading and trailing \t ",
    "emoji 😀 and a family 👩‍👩‍👧, combining e\u0301",
    "CRLF\r\nand a lone CR\r and\n\n\n\nblank lines",
    "中文，测试。全角　空格",
    "control \x00\x01\x7f and \ufeff\u200b\u2028 separators",
    "def f(x):\n\treturn  x + 1\n",
    "1234567890.5e-9",
    "x" * 3000 + " " * 200 + "中" * 500,
    "it's I'LL don’t <|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def evaluation() -> list[dict]:
    with lzma.open(DATA / "evaluation.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def corpus() -> dict:
    return json.loads((DATA / "corpus.json").read_text(encoding="utf-8"))


def read_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def tokens_by_kind(rows: list[dict], tokenizer: Tokenizer) -> dict[str, int]:
    return {k: sum(len(tokenizer.encode(r["text"]).ids) for r in rows if r["kind"] == k) for k in KINDS}


# --------------------------------------------------------------------------------------------- tokenizer
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_every_text_comes_back_as_it_went_in(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer):
    text = "".join(map(chr, range(1, 0x800))) + "\U00010348\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary_and_special_ids(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == VOCABULARY == 8192
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]


def test_digits_stand_alone(tokenizer: Tokenizer):
    assert tokenizer.encode("x1234").tokens[-4:] == ["1", "2", "3", "4"]


def test_auto_tokenizer_loads_the_folder(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    for path in MODEL.glob("tokenizer*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen4_exp_text"}))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (VOCABULARY, 0, 0)
    assert all(loaded.decode(loaded.encode(text)) == text for text in ODD_TEXTS)
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# ----------------------------------------------------------------------------------------- shipped texts
def test_evaluation_is_long_enough_and_mixed(evaluation: list[dict], tokenizer: Tokenizer):
    tokens = tokens_by_kind(evaluation, tokenizer)
    total = sum(tokens.values())
    assert total >= 120_000
    assert all(abs(tokens[kind] / total - MIX[kind]) < 0.02 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_two_documents_of_each_kind_fill_the_context(evaluation: list[dict], tokenizer: Tokenizer, kind: str):
    lengths = [len(tokenizer.encode(row["text"]).ids) for row in evaluation if row["kind"] == kind]
    assert sum(length >= 8192 for length in lengths) >= 2


@pytest.mark.parametrize("name, least", [("price.jsonl", 8_200), ("calibration.jsonl", 7_000)])
def test_price_and_calibration_are_long_enough_and_mixed(name: str, least: int, tokenizer: Tokenizer):
    tokens = tokens_by_kind(read_rows(name), tokenizer)
    total = sum(tokens.values())
    assert total >= least
    assert all(abs(tokens[kind] / total - MIX[kind]) < 0.05 for kind in KINDS)


def test_price_is_disjoint_from_evaluation(evaluation: list[dict]):
    seen = {(row["source"], row["title"]) for row in evaluation}
    assert not seen & {(row["source"], row["title"]) for row in read_rows("price.jsonl")}


def test_what_ships_is_permissive_and_named_in_the_licences(evaluation: list[dict]):
    licences = (DATA / "LICENSES.md").read_text(encoding="utf-8")
    for row in [*evaluation, *read_rows("price.jsonl"), *read_rows("calibration.jsonl")]:
        assert row["licence"] in PERMISSIVE
        assert f"`{row['source']}`" in licences and f"## {row['licence']} " in licences
    for source in load_sources():
        assert not source.held_out or source.licence in PERMISSIVE
        assert not source.held_out or source.name in licences


def test_prompts(tokenizer: Tokenizer):
    prompts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    assert {kind: len(texts) for kind, texts in prompts.items()} == dict.fromkeys(KINDS, 20)
    lengths = [len(tokenizer.encode(text).ids) for texts in prompts.values() for text in texts]
    assert min(lengths) >= 20 and max(lengths) <= 60
    assert all(len(set(texts)) == 20 for texts in prompts.values())


def test_corpus_json_describes_these_files(corpus: dict, evaluation: list[dict], tokenizer: Tokenizer):
    digest = hashlib.sha256((MODEL / "tokenizer.json").read_bytes()).hexdigest()
    assert corpus["tokenizer"]["sha256"] == digest
    assert corpus["tokens_by_kind"]["evaluation"] == tokens_by_kind(evaluation, tokenizer)
    assert corpus["tokens_by_kind"]["price"] == tokens_by_kind(read_rows("price.jsonl"), tokenizer)
    assert corpus["training_file"]["bytes"] <= 8_000_000
    assert [corpus["leak_check"][name]["shared_runs"] for name in ("shipped", "held_out")] == [0, 0]


def test_the_readme_has_the_table_of_sources(corpus: dict):
    readme = (Path(heldout.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert heldout.table(corpus) in readme


# ---------------------------------------------------------------------------------------- near-duplicates
def words(seed: int, count: int) -> list[str]:
    return [f"word{i}" for i in np.random.default_rng(seed).integers(0, 5000, count)]


def test_near_duplicates_are_found_and_others_kept():
    first, other = words(0, 400), words(1, 400)
    edited = [*first[:200], "changed", *first[201:]]
    texts = [" ".join(first), " ".join(other), " ".join(edited), " ".join(words(2, 3))]
    assert dedup.near_duplicates(texts) == [None, None, 0, None]


def test_near_duplicates_look_through_layout_and_case():
    text = words(3, 300)
    assert dedup.near_duplicates([" ".join(text), "\n".join(text).upper()]) == [None, 0]


def test_repeated_passages_fall_but_short_ones_stay():
    long, short = "A notice that stands on every page. " * 5, "See also"
    first, second = dedup.drop_repeated_passages([f"{long}\n\n{short}\n\none", f"{long}\n\n{short}\n\ntwo"])
    assert long.strip() in first and second == f"{short}\n\ntwo"


def test_distinct_keeps_one_of_two_and_never_cuts_code():
    passage = "    # the same comment of more than a hundred characters, " * 3
    programs = [
        " ".join(words(seed, 300)) + f"\n\n{passage}\n\n" + " ".join(words(seed + 9, 50)) for seed in (1, 2)
    ]
    documents = [make("code", "a", "1", programs[0]), make("code", "a", "2", programs[1])]
    kept, dropped = distinct([*documents, make("code", "b", "3", programs[0] + " more")])
    assert [d.text for d in kept] == programs and dropped["near_duplicates"] == 1


# -------------------------------------------------------------------------------------------------- leaks
def make(kind: str, source: str, title: str, text: str) -> Document:
    return Document(kind=kind, source=source, title=title, text=text)


def test_run_hashes_know_order_and_length():
    ids = np.array([5, 6, 7, 5, 6, 7])
    hashes = dedup.run_hashes(ids, 3)
    assert hashes[0] == hashes[3] and len(set(hashes[:3].tolist())) == 3
    assert len(dedup.run_hashes(ids, 7)) == 0
    assert np.array_equal(dedup.run_hashes(ids + 0, 6), dedup.run_hashes(ids, 6))


@pytest.fixture
def guard(tokenizer: Tokenizer) -> LeakGuard:
    return LeakGuard(tokenizer=tokenizer, held=("Some text.\n\n" + " ".join(words(7, 200)), "short"))


def test_a_planted_leak_is_seen_and_cut(guard: LeakGuard):
    leak = " ".join(words(7, 200)[60:120])
    texts = ["An innocent line.\n" + leak + "\nAnother innocent line.", "Nothing here."]
    assert guard.check(texts)["shared_runs"] > 0
    assert guard.cut(texts) == ["An innocent line.\nAnother innocent line.", "Nothing here."]
    assert guard.check(guard.cut(texts))["shared_runs"] == 0


def test_the_check_counts_from_exactly_the_run_length(guard: LeakGuard, tokenizer: Tokenizer):
    ids = tokenizer.encode(guard.held[0]).ids
    for length, shared in ((49, 0), (50, 1), (52, 3)):
        run = np.array(ids[100 : 100 + length])
        runs = dedup.Runs.of([np.array(ids)], 50)
        assert len(runs.starts(run)) == shared


def test_a_leak_behind_other_line_breaks_is_cut(guard: LeakGuard):
    leak = "\n".join(words(7, 200)[:40]).upper()
    assert guard.cut([f"Before.\n{leak}\nAfter."]) == ["Before.\nAfter."]


def test_cut_lines_takes_whole_lines_only():
    assert dedup.cut_lines("aa\nbb\ncc\ndd", [(4, 7)]) == "aa\ndd"
    assert dedup.cut_lines("aa\nbb", []) == "aa\nbb"


# ------------------------------------------------------------------------------------- splitting, packing
def source(name: str, kind: str, *, held_out: bool) -> Source:
    return Source(
        name=name,
        kind=kind,
        registry="pypi",
        packages=("x",),
        format="python",
        licence="MIT",
        copyright="",
        include=(".",),
        held_out=held_out,
    )


def test_split_is_by_document_seeded_and_only_from_what_may_ship():
    documents = [
        make("prose", name, str(i), "x" * 20_000) for name in ("free", "copyleft") for i in range(60)
    ]
    sources = [source("free", "prose", held_out=True), source("copyleft", "prose", held_out=False)]
    train, held = split(documents, sources, seed=1)
    assert held and {d.source for d in held} == {"free"}
    assert not {d.key for d in train} & {d.key for d in held} and len(train) + len(held) == len(documents)
    assert split(documents[::-1], sources, seed=1)[1][::-1] == held
    assert split(documents, sources, seed=2)[1] != held


def test_pack_keeps_the_mix_and_the_limit():
    rng = np.random.default_rng(0)
    documents = [
        make(kind, kind, str(i), " ".join(f"{n:x}" for n in rng.integers(0, 2**30, 60)))
        for kind in KINDS
        for i in range(100)
    ]
    chosen, data = pack(documents, lambda text: len(text.split()), limit_bytes=30_000)
    assert len(data) <= 30_000
    rows = [json.loads(line) for line in unpack_text(data).splitlines()]
    assert [row["text"] for row in rows] == [d.text for d in chosen]
    share = sum(row["kind"] == "prose" for row in rows) / len(rows)
    assert abs(share - MIX["prose"]) < 0.05


def test_clean_keeps_words_and_drops_addresses():
    text = clean("A\u00a0line  \r\nby Ann <ann@example.org>\x07\n\n\n\nend", code=False)
    assert text == "A line\nby Ann\n\nend"


def test_cut_after_ends_at_a_paragraph_and_closes_code(tokenizer: Tokenizer):
    def count(text: str) -> int:
        return len(text.split())

    assert heldout.cut_after("a b c\n\nd e f\n\ng", 4, count) == "a b c\n\nd e f"
    assert heldout.cut_after("a\n\n```\nx y\n\nz\n```\n\nq r s t", 3, count) == "a\n\n```\nx y\n```"
    assert heldout.cut_after("a b", 9, count) == "a b"


def test_config_states_the_run_of_the_bar():
    assert CorpusConfig().run_tokens == 50 and CorpusConfig().margin_tokens < 50

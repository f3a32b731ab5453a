"""Cuts the text that ships with the package: `python -m training.heldout --work DIR`.

Out of the documents set aside by `training.corpus`: the evaluation text, the price text and the prompts; out of
the training text: the calibration text. Then it checks the finished files against the finished training file, and
writes corpus.json, which says where everything came from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from training.corpus import (
    DATA,
    KINDS,
    MIX,
    MODEL,
    WORK,
    CorpusConfig,
    Document,
    LeakGuard,
    cjk_share,
    load_documents,
    log,
    order,
    round_robin,
    write_documents,
)
from training.packed import read_text
from training.sources import Source, load_sources

Count = Callable[[str], int]
SPLITS = ("training", "evaluation", "price", "calibration", "prompts")


@dataclass(frozen=True, kw_only=True)
class ShipConfig:
    """How much text ships, in tokens."""

    context: int = 8192
    evaluation_tokens: int = 136_000
    num_long: tuple[tuple[str, int], ...] = (("prose", 4), ("code", 2), ("chinese", 2))
    price_tokens: int = 9_600
    calibration_tokens: int = 8_000
    passage_tokens: int = 900  # of the price and calibration texts, which want variety
    # The first one's text is enciphered; the others came with a notice of their own beside Python's licence.
    skip: tuple[str, ...] = ("/this.py", "/asynchat.py", "/re/__init__.py", "/logging/__init__.py")
    lists: tuple[str, ...] = ("tdesign-changelog", "element-changelog")  # too terse to measure a price on
    prompts: int = 20
    prompt_tokens: tuple[int, int] = (20, 60)


# ------------------------------------------------------------------------------------------------ cutting
def cut_after(text: str, tokens: int, count: Count) -> str:
    """The shortest opening, up to the end of a paragraph, of at least `tokens` tokens; all of it if shorter."""
    ends = [match.start() for match in re.finditer(r"\n\n", text)]
    low, high = 0, len(ends)
    while low < high:  # token counts of openings grow with their length
        middle = (low + high) // 2
        if count(text[: ends[middle]]) < tokens:
            low = middle + 1
        else:
            high = middle
    return text if low == len(ends) else close_fence(text[: ends[low]])


def close_fence(text: str) -> str:
    """The text with its last code block closed, where the cut fell into one."""
    return text + "\n```" if len(re.findall(r"^ *```", text, re.M)) % 2 else text


def take(pool: Iterable[Document], tokens: float, longest: int, count: Count) -> list[Document]:
    """Documents in turn, each cut after `longest` tokens, until there are `tokens` of them."""
    taken: list[Document] = []
    total = 0
    for document in pool:
        if total >= tokens:
            break
        wanted = min(longest, max(200, int(tokens - total)))
        document = replace(document, text=cut_after(document.text, wanted, count))
        taken.append(document)
        total += count(document.text)
    return taken


def evaluation(held: Sequence[Document], config: ShipConfig, seed: int, count: Count) -> list[Document]:
    """Whole-context documents of each kind first, then shorter ones, at the mix by tokens."""
    chosen: list[Document] = []
    for kind, num_long in config.num_long:
        pool = round_robin(order((d for d in held if d.kind == kind), seed, "evaluation"))
        long = [d for d in pool if count(d.text) >= config.context + 64][:num_long]
        cut = [replace(d, text=cut_after(d.text, config.context + 16, count)) for d in long]
        rest = MIX[kind] * config.evaluation_tokens - sum(count(d.text) for d in cut)
        keys = {d.key for d in pool if count(d.text) >= config.context}
        shorter = take((d for d in pool if d.key not in keys), rest, config.context, count)
        chosen += [*cut, *shorter]
    return chosen


def passages(pool: Sequence[Document], tokens: int, config: ShipConfig, seed: int, count: Count, salt: str):
    """Openings of documents at the mix by tokens."""
    chosen: list[Document] = []
    for kind in KINDS:
        mine = round_robin(order((d for d in pool if d.kind == kind), seed, salt))
        mine = [d for d in mine if count(d.text) >= 300]
        chosen += take(mine, MIX[kind] * tokens, config.passage_tokens, count)
    return chosen


# ------------------------------------------------------------------------------------------------ prompts
_STARTS = {
    "prose": re.compile(r"^(?=#{1,4} )", re.M),
    "code": re.compile(r"^(?=(?:@|def |class |    def |async def ))", re.M),
    "chinese": re.compile(r"(?<=\n\n)(?=#{1,4} |[\u4e00-\u9fff])"),
}
_ENDS = {
    "prose": re.compile(r"(?<=[a-z)`][.:])(?=\s)"),
    "code": re.compile(r"(?<=[:)\]\"'.])(?=\n)"),
    "chinese": re.compile(r"(?<=[。！？])|(?<=[\u4e00-\u9fff`])(?=\n)"),
}


_CATALOGUE = re.compile(r"## (?:属性|插槽|事件|方法)")


def prompt_of(text: str, kind: str, limits: tuple[int, int], count: Count) -> str | None:
    """The longest opening of a passage that ends at a natural place and has a prompt's length."""
    low, high = limits
    fitting = [text[: end.start()].rstrip() for end in _ENDS[kind].finditer(text[:400])]
    fitting = [opening for opening in fitting if low <= count(opening) <= high and _is_prompt(opening, kind)]
    return fitting[-1] if fitting else None


def _is_prompt(opening: str, kind: str) -> bool:
    if "```" in opening:
        return False
    if kind == "code":
        return "\n" in opening and not opening.startswith(("import ", "from "))
    if kind == "chinese" and (_CATALOGUE.match(opening) or cjk_share(opening) < 0.4):
        return False
    words = [line for line in opening.split("\n") if line and not line.startswith(("#", "- ", "1. "))]
    return bool(words) and len(" ".join(words)) > 0.4 * len(opening)


def prompts(
    pool: Sequence[Document], config: ShipConfig, seed: int, count: Count
) -> dict[str, list[Document]]:
    """Openings of held-out passages; one from each document before a second from any."""
    chosen: dict[str, list[Document]] = {}
    for kind in KINDS:
        per_document = []
        for document in order((d for d in pool if d.kind == kind), seed, "prompts"):
            parts = [part for part in _STARTS[kind].split(document.text) if part.strip()]
            found = [prompt_of(part, kind, config.prompt_tokens, count) for part in parts]
            per_document.append([replace(document, text=text) for text in found if text])
        turns = range(max(map(len, per_document), default=0))
        flat = [found[turn] for turn in turns for found in per_document if turn < len(found)]
        flat.sort(key=lambda document: document.source in config.lists)
        distinct = {document.text: document for document in flat}
        chosen[kind] = list(distinct.values())[: config.prompts]
    return chosen


# -------------------------------------------------------------------------------------------------- files
def short_title(title: str) -> str:
    """The part of a document's path that says what it is."""
    title = re.sub(r"^.*?/(?:html|python3\.11|doc/sqlite3|docs|helper|package)/", "", title)
    return re.sub(r"web-types[^#]*#|[ `]+\d{4}-\d\d-\d\d.*$", "", title)


def row(document: Document, sources: dict[str, Source]) -> dict[str, str]:
    return {
        "kind": document.kind,
        "source": document.source,
        "licence": sources[document.source].licence,
        "title": short_title(document.title),
        "text": document.text,
    }


def json_lines(documents: Iterable[Document], sources: dict[str, Source]) -> str:
    return "".join(json.dumps(row(d, sources), ensure_ascii=False) + "\n" for d in documents)


def load_training(path: Path) -> list[dict[str, str]]:
    """The rows of the training file."""
    return [json.loads(line) for line in read_text(path).split("\n") if line]


def tally(documents: Iterable[Document], count: Count) -> dict[str, dict[str, int]]:
    """Documents, characters and tokens by source."""
    counts: dict[str, Counter] = {}
    for document in documents:
        one = counts.setdefault(document.source, Counter())
        one.update(documents=1, characters=len(document.text), tokens=count(document.text))
    return {name: dict(counter) for name, counter in counts.items()}


def describe(
    splits: dict[str, list[Document]], sources: Sequence[Source], packages: dict, count: Count
) -> dict:
    """The part of corpus.json about sources and counts."""
    tallies = {name: tally(documents, count) for name, documents in splits.items()}
    described = []
    for source in sources:
        mine = {split: counts[source.name] for split, counts in tallies.items() if source.name in counts}
        if mine:
            described.append(
                {
                    "name": source.name,
                    "kind": source.kind,
                    "licence": source.licence,
                    "copyright": source.copyright,
                    "packages": {name.split("==")[0]: packages[name] for name in source.packages},
                    "splits": mine,
                }
            )
    by_kind = {
        split: {k: sum(count(d.text) for d in documents if d.kind == k) for k in KINDS}
        for split, documents in splits.items()
    }
    return {"sources": described, "tokens_by_kind": by_kind}


def table(corpus: dict) -> str:
    """The sources as a Markdown table, for the README."""
    lines = [
        "| source | kind | licence | split | documents | characters | tokens |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for source in corpus["sources"]:
        for split, n in source["splits"].items():
            head = f"| {source['name']} | {source['kind']} | {source['licence']} | {split} "
            lines.append(head + f"| {n['documents']:,} | {n['characters']:,} | {n['tokens']:,} |")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------- main
def build(work: Path, data: Path, model: Path, config: ShipConfig, corpus_config: CorpusConfig) -> dict:
    """Writes every file of the data folder but LICENSES.md; raises when a held-out run is in the training text."""
    seed = corpus_config.seed
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sources = load_sources()
    by_name = {source.name: source for source in sources}
    memory: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in memory:
            memory[text] = len(tokenizer.encode(text).ids)
        return memory[text]

    held = load_documents(work / "documents.held.jsonl")
    usable = [d for d in held if not d.title.endswith(config.skip)]
    chosen = evaluation(usable, config, seed, count)
    rest = _without(usable, chosen)
    prose_like = [d for d in rest if d.source not in config.lists]
    price = passages(prose_like, config.price_tokens, config, seed, count, "price")
    rest = _without(rest, price)
    train = load_documents(work / "train.chosen.jsonl")
    may_ship = [d for d in train if by_name[d.source].held_out and not d.title.endswith(config.skip)]
    calibration = passages(may_ship, config.calibration_tokens, config, seed, count, "calibration")
    asked = prompts([*rest, *tails(usable, chosen)], config, seed, count)

    data.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(json_lines(chosen, by_name).encode(), preset=9 | lzma.PRESET_EXTREME)
    (data / "evaluation.jsonl.xz").write_bytes(packed)
    (data / "price.jsonl").write_text(json_lines(price, by_name), encoding="utf-8")
    (data / "calibration.jsonl").write_text(json_lines(calibration, by_name), encoding="utf-8")
    texts = {kind: [d.text for d in documents] for kind, documents in asked.items()}
    _write_json(data / "prompts.json", texts)
    write_documents(work / "valid.jsonl", rest)

    flat = [d for documents in asked.values() for d in documents]
    splits = dict(zip(SPLITS, (train, chosen, price, calibration, flat), strict=True))
    gathered = json.loads((work / "gathered.json").read_text())
    rows = load_training(work / "train.jsonl.ppmd")
    corpus = {
        "seed": seed,
        "training_file": _digest(work / "train.jsonl.ppmd"),
        "tokenizer": {"vocabulary": tokenizer.get_vocab_size(), **_digest(model / "tokenizer.json")},
        "dropped": gathered["dropped"],
        "leak_check": leak_check(rows, held, [*chosen, *price, *flat], tokenizer, corpus_config, work),
        **describe(splits, sources, gathered["packages"], count),
    }
    _write_json(data / "corpus.json", corpus)
    return corpus


def leak_check(rows, held, shipped, tokenizer: Tokenizer, config: CorpusConfig, work: Path) -> dict:
    """The finished training file against the shipped texts, and against all that was set aside."""
    texts = [row["text"] for row in rows]
    against = {"shipped": shipped, "held_out": held}
    reports = {
        name: LeakGuard(tokenizer=tokenizer, held=tuple(d.text for d in documents), config=config).check(
            texts
        )
        for name, documents in against.items()
    }
    cut = json.loads((work / "leaks.json").read_text())["characters_cut"]
    if any(report["shared_runs"] for report in reports.values()):
        raise SystemExit(f"held-out runs occur in the training text: {reports}")
    return {**reports, "characters_cut": cut, "cut_at_runs_of_words": config.run_words}


def tails(held: Sequence[Document], cut: Sequence[Document]) -> list[Document]:
    """What the evaluation text leaves of the documents that it cuts, from the next heading on."""
    kept = {document.key: len(document.text) for document in cut}
    ends = [(d, d.text.find("\n#", kept[d.key])) for d in held if kept.get(d.key, len(d.text)) < len(d.text)]
    return [replace(document, text=document.text[end + 1 :]) for document, end in ends if end >= 0]


def _without(documents: Sequence[Document], taken: Sequence[Document]) -> list[Document]:
    keys = {document.key for document in taken}
    return [document for document in documents if document.key not in keys]


def _digest(path: Path) -> dict[str, int | str]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--table", action="store_true", help="print the table of sources of corpus.json and stop"
    )
    args = parser.parse_args()
    if args.table:
        print(table(json.loads((args.data / "corpus.json").read_text(encoding="utf-8"))))
        return
    corpus = build(args.work, args.data, MODEL, ShipConfig(), CorpusConfig())
    log(json.dumps({key: corpus[key] for key in ("tokens_by_kind", "leak_check")}, indent=1))


if __name__ == "__main__":
    main()

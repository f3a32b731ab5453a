"""Builds the text of the embedded model: `python -m training.corpus --work DIR`.

Stages, each a pure function of the one before and of the seed:
documents (fetch, extract, clean) -> distinct (near-duplicates out) -> split by document -> train.jsonl.ppmd
under the size limit, at the mix by tokens, and free of every run of the held-out text. The tokenizer is trained
between the split and the packing, unless it is there already.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training import dedup
from training.packed import pack_text
from training.sources import Source, fetch, files, load_sources

WORK = Path(__file__).with_name("work")
MODEL = Path(__file__).parents[1] / "warmset" / "models" / "tiny"
DATA = Path(__file__).parents[1] / "warmset" / "models" / "data"
KINDS = ("prose", "code", "chinese")
MIX = {"prose": 0.60, "code": 0.25, "chinese": 0.15}


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """What the text is cut to."""

    seed: int = 20261130
    limit_bytes: int = 7_990_000  # of train.jsonl.ppmd; it travels beside a size limit of 8 MB
    run_tokens: int = 50  # no run of this many held-out tokens may occur in the training text
    run_words: int = 24  # the same by words, whatever the line breaks, punctuation and case
    margin_tokens: int = 40  # passages are cut at shorter runs than the check looks for
    shortlist_chars: int = 64_000_000  # more than the limit ever takes
    shortest_chars: int = 500
    longest_chars: int = 150_000


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text with where it came from."""

    kind: str
    source: str
    title: str
    text: str = field(repr=False)

    @property
    def key(self) -> str:
        return f"{self.source}:{self.title}"


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- documents
def read_documents(source: Source, work: Path) -> list[Document]:
    """Every usable document of one source, cleaned."""
    found = []
    for path, data in files(source, work):
        for title, text in _texts(source, path, data):
            text = clean(text, code=source.kind == "code")
            if is_usable(text, source):
                found.append(Document(kind=source.kind, source=source.name, title=title, text=text))
    return found


def _texts(source: Source, path: str, data: bytes) -> Iterable[tuple[str, str]]:
    from training import extract  # needs lxml, which only this stage has to have

    if source.format == "html":
        return [(path, extract.html_text(data, source.root, source.drop))]
    if source.format == "changelog":
        return [(f"{path}#{name}", text) for name, text in extract.changelog_texts(data)]
    if source.format == "webtypes":
        return [(f"{path}#{name}", text) for name, text in extract.webtypes_texts(data)]
    one: dict[str, Callable[[bytes], str]] = {
        "roff": extract.roff_text,
        "python": extract.python_text,
        "markdown": extract.markdown_text,
    }
    return [(path, one[source.format](data))]


def clean(text: str, *, code: bool) -> str:
    """Uniform white space, no control characters; the words stay as they are."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\u200b", "").replace("\ufeff", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    if not code:
        text = re.sub(r"\s*<[\w.+-]+@[\w.-]+>", "", text)  # people's addresses are nobody's business here
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{4,}" if code else r"\n{3,}", "\n\n\n" if code else "\n\n", text).strip()


def is_usable(text: str, source: Source, config: CorpusConfig | None = None) -> bool:
    """Whether a text reads like its kind: long enough, no index, no table of figures."""
    config = config or CorpusConfig()
    if not config.shortest_chars <= len(text) <= config.longest_chars:
        return False
    if source.min_cjk and cjk_share(text) < source.min_cjk:
        return False
    solid = [c for c in text if not c.isspace()]
    letters = sum(c.isalpha() for c in solid) / len(solid)
    if source.kind == "code":
        return letters > 0.5
    blocks = [block for block in text.split("\n\n") if block.strip()]
    # An index or a list of symbols is many short blocks; prose has long ones.
    return letters > 0.6 and len(text) / len(blocks) > (25 if source.kind == "chinese" else 45)


def cjk_share(text: str) -> float:
    """Share of the characters that are Chinese ideographs."""
    return sum("\u3400" <= c <= "\u9fff" for c in text) / max(1, len(text))


def distinct(documents: Sequence[Document]) -> tuple[list[Document], dict[str, int]]:
    """The documents without near-duplicates and repeated passages, and how many of each fell."""
    kept: list[Document] = []
    dropped = Counter()
    for kind in KINDS:
        mine = [document for document in documents if document.kind == kind]
        twins = dedup.near_duplicates(document.text for document in mine)
        dropped["near_duplicates"] += sum(twin is not None for twin in twins)
        mine = [document for document, twin in zip(mine, twins, strict=True) if twin is None]
        if kind != "code":  # a passage cut out of a program leaves a broken program
            texts = dedup.drop_repeated_passages([document.text for document in mine])
            dropped["repeated_chars"] += sum(len(d.text) - len(t) for d, t in zip(mine, texts, strict=True))
            mine = [replace(d, text=t) for d, t in zip(mine, texts, strict=True)]
        kept.extend(document for document in mine if len(document.text) >= 400)
    return kept, dict(dropped)


# -------------------------------------------------------------------------------------------------- split
def order(documents: Iterable[Document], seed: int, salt: str) -> list[Document]:
    """The documents in a seeded order that depends on each one's key alone."""

    def rank(document: Document) -> bytes:
        return hashlib.blake2b(f"{seed}:{salt}:{document.key}".encode(), digest_size=8).digest()

    return sorted(documents, key=rank)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How much of a kind is set aside, in characters: whole-context documents first, then shorter ones."""

    long_from: int
    long_to: int
    num_long: int
    rest_chars: int
    rest_to: int


HELD_OUT = {
    "prose": HeldOut(long_from=37_000, long_to=75_000, num_long=6, rest_chars=560_000, rest_to=26_000),
    "code": HeldOut(long_from=34_000, long_to=70_000, num_long=4, rest_chars=300_000, rest_to=22_000),
    "chinese": HeldOut(long_from=13_500, long_to=40_000, num_long=4, rest_chars=70_000, rest_to=9_000),
}


def split(documents: Sequence[Document], sources: Sequence[Source], seed: int) -> tuple[list, list]:
    """(training documents, held-out documents), by document; only sources that may ship are held out."""
    allowed = {source.name for source in sources if source.held_out}
    held: set[str] = set()
    for kind, rule in HELD_OUT.items():
        pool = order([d for d in documents if d.kind == kind and d.source in allowed], seed, "held-out")
        long = [d for d in pool if rule.long_from <= len(d.text) <= rule.long_to]
        held.update(d.key for d in round_robin(long)[: rule.num_long])
        total = 0
        for document in round_robin([d for d in pool if len(d.text) <= rule.rest_to]):
            if total >= rule.rest_chars:
                break
            held.add(document.key)
            total += len(document.text)
    return [d for d in documents if d.key not in held], [d for d in documents if d.key in held]


def round_robin(pool: Sequence[Document]) -> list[Document]:
    """The same documents, one of each source in turn, so that no source fills the held-out text alone."""
    queues: dict[str, list[Document]] = {}
    for document in pool:
        queues.setdefault(document.source, []).append(document)
    longest = max(map(len, queues.values()), default=0)
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


# -------------------------------------------------------------------------------------------------- leaks
@dataclass(frozen=True, kw_only=True)
class LeakGuard:
    """Cuts held-out runs out of training texts, and checks that none is left."""

    tokenizer: Tokenizer
    held: tuple[str, ...] = field(repr=False)
    config: CorpusConfig = field(default_factory=CorpusConfig)

    def cut(self, texts: Sequence[str]) -> list[str]:
        """The texts without the lines that share a run with a held-out text."""
        vocabulary = dedup.Vocabulary()
        by_words = dedup.Runs.of((vocabulary.encode(text)[0] for text in self.held), self.config.run_words)
        by_tokens = dedup.Runs.of(map(self._ids, self.held), self.config.margin_tokens)
        return [self._cut_tokens(self._cut_words(text, by_words, vocabulary), by_tokens) for text in texts]

    def _cut_words(self, text: str, runs: dedup.Runs, vocabulary: dedup.Vocabulary) -> str:
        ids, spans = vocabulary.encode(text)
        starts = runs.starts(ids)
        return dedup.cut_lines(text, dedup.touched_spans(starts, runs.length, spans)) if len(starts) else text

    def _cut_tokens(self, text: str, runs: dedup.Runs) -> str:
        encoding = self.tokenizer.encode(text)
        starts = runs.starts(np.array(encoding.ids, dtype=np.int64))
        if not len(starts):
            return text
        spans = np.array(encoding.offsets, dtype=np.int64)
        return dedup.cut_lines(text, dedup.touched_spans(starts, runs.length, spans))

    def check(self, texts: Iterable[str]) -> dict[str, int]:
        """Counts of what was looked at, and of held-out runs that occur in the texts: 0 or it is a leak."""
        runs = dedup.Runs.of(map(self._ids, self.held), self.config.run_tokens)
        shared = tokens = 0
        for text in texts:
            ids = self._ids(text)
            shared += len(runs.starts(ids))
            tokens += len(ids)
        return {
            "run_tokens": self.config.run_tokens,
            "held_out_documents": len(self.held),
            "held_out_runs": len(runs.hashes),
            "training_tokens": tokens,
            "shared_runs": shared,
        }

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64)


# ------------------------------------------------------------------------------------------------ packing
def pack(
    documents: Sequence[Document], count: Callable[[str], int], limit_bytes: int, seed: int = 0
) -> tuple[list[Document], bytes]:
    """(documents, packed bytes): the mix by tokens, as much as fits the limit, first sources first."""
    tokens = {document.key: count(document.text) for document in documents}
    available = {kind: sum(tokens[d.key] for d in documents if d.kind == kind) for kind in KINDS}
    total = min(available[kind] / MIX[kind] for kind in KINDS)
    log(f"tokens at hand {available}; the mix allows {total:,.0f}")
    while True:
        chosen = [d for kind in KINDS for d in _fill(documents, kind, tokens, MIX[kind] * total, seed)]
        data = compress(chosen)
        log(f"{total:,.0f} tokens -> {len(data):,} bytes")
        if len(data) <= limit_bytes:
            return chosen, data
        total *= 0.997 * limit_bytes / len(data)


def shortlist(documents: Sequence[Document], config: CorpusConfig) -> list[Document]:
    """The documents that packing could take at all, by a generous count of characters."""
    sizes = {document.key: len(document.text) for document in documents}
    return [
        document
        for kind in KINDS
        for document in _fill(documents, kind, sizes, MIX[kind] * config.shortlist_chars, config.seed)
    ]


def _fill(
    documents: Sequence[Document], kind: str, tokens: dict[str, int], goal: float, seed: int
) -> list[Document]:
    """Sources in their order, each one's documents in a seeded order, until the goal; then as they stood."""
    chosen: set[str] = set()
    total = 0
    for source in dict.fromkeys(d.source for d in documents if d.kind == kind):
        for document in order((d for d in documents if d.source == source), seed, "pack"):
            if total + tokens[document.key] <= goal:
                chosen.add(document.key)
                total += tokens[document.key]
    return [d for d in documents if d.key in chosen]


def compress(documents: Iterable[Document]) -> bytes:
    """One JSON object a line, packed; neighbours stay together, which compresses best."""
    rows = ({"kind": d.kind, "source": d.source, "text": d.text} for d in documents)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return pack_text(lines)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def load_documents(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


# --------------------------------------------------------------------------------------------------- main
def gather(work: Path, sources: Sequence[Source], config: CorpusConfig) -> dict:
    """Writes documents.train.jsonl and documents.held.jsonl; returns what was fetched and dropped."""
    documents: list[Document] = []
    versions: dict[str, str] = {}
    for source in sources:
        versions |= fetch(source, work)
        found = read_documents(source, work)
        goal = source.share * sum(len(d.text) for d in found)
        taken, total = [], 0
        for document in order(found, config.seed, "share"):
            if total < goal:
                taken.append(document)
                total += len(document.text)
        taken.sort(key=lambda d: d.title)
        documents.extend(taken)
        log(f"{source.name}: {len(taken)} documents, {total:,} characters")
    kept, dropped = distinct(documents)
    train, held = split(kept, sources, config.seed)
    write_documents(work / "documents.train.jsonl", train)
    write_documents(work / "documents.held.jsonl", held)
    for kind in KINDS:
        sizes = [sum(len(d.text) for d in part if d.kind == kind) for part in (train, held)]
        log(f"{kind}: {sizes[0]:,} characters to train on, {sizes[1]:,} held out")
    facts = {"packages": versions, "dropped": dropped}
    (work / "gathered.json").write_text(json.dumps(facts, indent=1))
    return facts


def build_training_file(work: Path, tokenizer: Tokenizer, config: CorpusConfig) -> dict:
    """Writes train.jsonl.ppmd and leaks.json; raises when a held-out run is left in the training text."""
    train = load_documents(work / "documents.train.jsonl")
    held = load_documents(work / "documents.held.jsonl")
    train = shortlist(train, config)
    guard = LeakGuard(tokenizer=tokenizer, held=tuple(d.text for d in held), config=config)
    texts = guard.cut([d.text for d in train])
    cut = sum(len(d.text) - len(text) for d, text in zip(train, texts, strict=True))
    log(f"cut {cut:,} characters that held-out text shares")
    train = [replace(d, text=text.strip()) for d, text in zip(train, texts, strict=True)]
    train = [d for d in train if len(d.text) >= 300]
    chosen, data = pack(train, lambda text: len(tokenizer.encode(text).ids), config.limit_bytes, config.seed)
    report = guard.check(d.text for d in chosen) | {"characters_cut": cut}
    (work / "leaks.json").write_text(json.dumps(report, indent=1))
    if report["shared_runs"]:
        raise SystemExit(f"{report['shared_runs']} held-out runs occur in the training text")
    (work / "train.jsonl.ppmd").write_bytes(data)
    write_documents(work / "train.chosen.jsonl", chosen)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--stage", choices=("gather", "pack", "all"), default="all")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    config = CorpusConfig()
    if args.stage in ("gather", "all"):
        gather(args.work, load_sources(), config)
    if args.stage in ("pack", "all"):
        path = MODEL / "tokenizer.json"
        if not path.exists():
            from training.tokenizer import build

            build(args.work, MODEL)
        log(json.dumps(build_training_file(args.work, Tokenizer.from_file(str(path)), config)))


if __name__ == "__main__":
    main()

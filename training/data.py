"""Text to token batches: read, tokenise, pack by kind, and plan which window each step reads.

Knows nothing of the model. Documents of one kind lie end to end, an end-of-text token between them; a window may
cross documents. The plan is made ahead of time on the host, so that a step only gathers on the device.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.packed import read_text

KINDS = ("prose", "code", "chinese")
MIX = {"prose": 0.60, "code": 0.25, "chinese": 0.15}
END_OF_TEXT = 0
PIECE = 200_000  # characters given to the tokenizer at once, so that long documents spread over the cores


def read_documents(path: Path) -> Iterator[dict]:
    for line in read_text(path).split("\n"):
        if line:
            yield json.loads(line)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. Long texts are cut after a line, where no token crosses."""
    pieces, owner = [], []
    for index, text in enumerate(texts):
        for piece in cut_at_lines(text):
            pieces.append(piece)
            owner.append(index)
    ids: list[list[int]] = [[] for _ in texts]
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    for index, piece in zip(owner, encoded, strict=True):
        ids[index].extend(piece.ids)
    return ids


def cut_at_lines(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        # before a line that starts with a letter: white space before it stays together
        end = start + PIECE
        while end < len(text) and not (text[end - 1] == "\n" and not text[end].isspace()):
            end += 1
        yield text[start:end]
        start = end
    yield text[start:]


def tokenise(path: Path, tokenizer_path: Path, seed: int, cache: Path | None = None) -> dict[str, Tensor]:
    """int16 tokens of each kind, documents in a seeded order; kept in `cache` for the next run on the machine."""
    if cache is not None and cache.exists() and cache.stat().st_mtime > path.stat().st_mtime:
        return load_file(cache)
    documents: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for document in read_documents(path):
        documents[document["kind"]].append(document["text"])
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokens = {}
    for kind, texts in documents.items():
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        packed = [END_OF_TEXT]
        for ids in encode_documents(tokenizer, [texts[index] for index in order]):
            packed.extend(ids)
            packed.append(END_OF_TEXT)
        tokens[kind] = torch.tensor(packed, dtype=torch.int16)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        save_file(tokens, cache)
    return tokens


@dataclass(frozen=True)
class Corpus:
    """All kinds in one array; `ranges` says where each lies."""

    tokens: Tensor  # int16
    ranges: dict[str, tuple[int, int]]

    @classmethod
    def join(cls, tokens: dict[str, Tensor]) -> "Corpus":
        ranges, start = {}, 0
        ordered = {kind: tokens[kind] for kind in KINDS if kind in tokens}  # a cache file has its own order
        for kind, part in ordered.items():
            ranges[kind] = (start, start + len(part))
            start += len(part)
        return cls(torch.cat(list(ordered.values())), ranges)

    def describe(self) -> str:
        return ", ".join(f"{kind} {end - start:,}" for kind, (start, end) in self.ranges.items())


def epochs(start: int, end: int, span: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` window starts in [start, end - span]: whole shuffled passes, each from another offset."""
    parts, have = [], 0
    while have < count:
        slack = max(end - span - start + 1, 1)
        offset = int(torch.randint(min(span, slack), (), generator=generator))
        starts = torch.arange(start + offset, max(end - span + 1, start + offset + 1), span)
        parts.append(starts[torch.randperm(len(starts), generator=generator)])
        have += len(starts)
    return torch.cat(parts)[:count] if parts else torch.zeros(0, dtype=torch.int64)


def plan(corpus: Corpus, batch: int, span: int, steps: int, seed: int) -> Tensor:
    """Window starts [steps, batch], int32, with kinds drawn by `MIX`; every window is `span` tokens long."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        kind
        for kind in KINDS
        if kind in corpus.ranges and span < corpus.ranges[kind][1] - corpus.ranges[kind][0]
    ]
    if not kinds:
        raise ValueError(f"No kind of text has a window of {span} tokens. Got {corpus.describe()}.")
    shares = torch.tensor([MIX[kind] for kind in kinds])
    drawn = torch.multinomial(shares, steps * batch, replacement=True, generator=generator)
    starts = torch.empty(steps * batch, dtype=torch.int32)
    for index, kind in enumerate(kinds):
        here = drawn == index
        starts[here] = epochs(*corpus.ranges[kind], span, int(here.sum()), generator).int()
    return starts.view(steps, batch)


@dataclass(frozen=True)
class HeldOut:
    """One held-out document: `ids` starts with an end-of-text token, so that its first real token is predicted too."""

    kind: str
    source: str
    ids: Tensor  # int64
    num_bytes: int


def held_out(path: Path, tokenizer_path: Path) -> list[HeldOut]:
    documents = list(read_documents(path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    encoded = encode_documents(tokenizer, [document["text"] for document in documents])
    return [
        HeldOut(
            kind=document["kind"],
            source=document.get("source", ""),
            ids=torch.tensor([END_OF_TEXT, *ids]),
            num_bytes=len(document["text"].encode()),
        )
        for document, ids in zip(documents, encoded, strict=True)
    ]


def pieces(document: HeldOut, context: int, min_tokens: int = 2) -> Iterator[Tensor]:
    """Stretches of context + 1 ids whose predicted tokens cover the document once."""
    for start in range(0, len(document.ids) - 1, context):
        piece = document.ids[start : start + context + 1]
        if len(piece) > min_tokens:
            yield piece

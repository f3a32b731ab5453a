"""The text a price is measured on: documents, cut into segments that fit the context, and their hash.

    documents  --split_text-->  segments of token ids  --windows-->  scored positions, each once

A segment of n tokens gives n - 2 scored positions: its first token is read as a prompt, with the router's own pick, and
its last has nothing after it that could be predicted. Segments are of one document and do not overlap. Knows tokens,
no model.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.models import DATA

BUILTIN_TEXTS = {"builtin:price": DATA / "price.jsonl", "builtin:calibration": DATA / "calibration.jsonl"}
RUN_TOKENS = 50
"""Texts that share no run of so many tokens count as disjoint."""


@dataclass(frozen=True)
class Document:
    """One text and the kind it is of, such as prose or code."""

    kind: str
    text: str


@dataclass(frozen=True)
class Segment:
    """Token ids of one document from some place on; `first` numbers its first scored position."""

    document: int
    kind: str
    ids: tuple[int, ...]
    first: int

    @property
    def num_scored(self) -> int:
        return max(0, len(self.ids) - 2)


@dataclass(frozen=True)
class ScoredText:
    """Segments in order, and for each of the N scored positions what it belongs to."""

    segments: tuple[Segment, ...]
    name: str = "text"

    @property
    def num_positions(self) -> int:
        return sum(segment.num_scored for segment in self.segments)

    @property
    def kinds(self) -> list[str]:
        """Kinds in the order of their first document."""
        return list(dict.fromkeys(segment.kind for segment in self.segments))

    @property
    def token_hash(self) -> str:
        """SHA-256 over the token ids of all segments, each after its length, as int32."""
        digest = hashlib.sha256()
        for segment in self.segments:
            digest.update(np.array([len(segment.ids), *segment.ids], dtype="<i4").tobytes())
        return digest.hexdigest()

    def of_positions(self) -> dict[str, np.ndarray]:
        """Arrays [N]: `document`, `kind` (index into `kinds`), `place` in the segment, `token` there, `target`."""
        kinds = self.kinds
        parts: dict[str, list[np.ndarray]] = {
            key: [] for key in ("document", "kind", "place", "token", "target")
        }
        for segment in self.segments:
            count = segment.num_scored
            ids = np.array(segment.ids, dtype=np.int64)
            parts["document"].append(np.full(count, segment.document, dtype=np.int64))
            parts["kind"].append(np.full(count, kinds.index(segment.kind), dtype=np.int64))
            parts["place"].append(np.arange(1, count + 1, dtype=np.int64))
            parts["token"].append(ids[1 : 1 + count])
            parts["target"].append(ids[2 : 2 + count])
        return {key: np.concatenate(arrays) for key, arrays in parts.items()}

    def first_positions(self, count: int, rows: int = 1) -> ScoredText:
        """The same text up to its first `count` scored positions, or a few more: windows of `rows` stay whole."""
        kept, left = [], count
        for segment in self.segments:
            if left <= 0:
                break
            ids = segment.ids[: -(-left // rows) * rows + 2]
            kept.append(Segment(segment.document, segment.kind, ids, segment.first))
            left -= kept[-1].num_scored
        return ScoredText(tuple(kept), self.name)

    def openings(self, count: int, rows: int = 1) -> ScoredText:
        """About `count` scored positions, from the opening of every segment in proportion to its length."""
        if count >= self.num_positions:
            return self
        kept: list[Segment] = []
        first = 0
        for segment in self.segments:
            share = count * segment.num_scored / self.num_positions
            wanted = max(1, round(share / rows)) * rows
            kept.append(Segment(segment.document, segment.kind, segment.ids[: wanted + 2], first))
            first += kept[-1].num_scored
        return ScoredText(tuple(kept), self.name)


def read_documents(source: str | Path) -> list[Document]:
    """Documents of a file: JSON lines with `text` and perhaps `kind` (.jsonl, .jsonl.xz), or one plain text.

    WarmsetError naming the file and the line where it is neither.
    """
    if isinstance(source, str) and source.startswith("builtin:"):
        if source not in BUILTIN_TEXTS:
            raise WarmsetError(
                f"text must be a file or one of {', '.join(BUILTIN_TEXTS)}. Got {shown(source)}."
            )
        source = BUILTIN_TEXTS[source]
    path = Path(source)
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, ValueError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise WarmsetError(f"text {shown(str(path))} cannot be read: {reason}.") from None
    if ".jsonl" not in path.suffixes:
        return documents_of([text])
    return documents_of(
        [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line]
    )


def _line(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or not isinstance(held.get("text"), str):
        raise WarmsetError(f"{path}, line {number}: a line must be a JSON object with a `text`.")
    kind = held.get("kind", "text")
    if not isinstance(kind, str):
        raise WarmsetError(f"{path}, line {number}: `kind` must be a text. Got {shown(kind)}.")
    return kind, held["text"]


def documents_of(texts: Iterable[Any]) -> list[Document]:
    """Documents from texts or (kind, text) pairs; WarmsetError where there is no text at all."""
    found = []
    for given in texts:
        pair = ("text", given) if isinstance(given, str) else given
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise WarmsetError(f"a text must be a str or a pair (kind, text). Got {shown(given)}.")
        found.append(Document(pair[0], pair[1]))
    if not any(document.text.strip() for document in found):
        raise WarmsetError("text must hold at least one document that is not empty. Got none.")
    return found


def split_text(
    documents: Iterable[Document], encode: Callable[[str], list[int]], context: int, name: str = "text"
) -> ScoredText:
    """Each document in segments of at most `context` tokens; those too short to be scored are left out.

    WarmsetError where nothing is left.
    """
    segments: list[Segment] = []
    first = 0
    for number, document in enumerate(documents):
        ids = encode(document.text) if document.text else []
        for start in range(0, len(ids), context):
            segment = Segment(number, document.kind, tuple(ids[start : start + context]), first)
            if segment.num_scored:
                segments.append(segment)
                first += segment.num_scored
    if not segments:
        raise WarmsetError("text must hold a document of at least 3 tokens. Got none.")
    return ScoredText(tuple(segments), name)


def shared_runs(one: ScoredText, other: ScoredText, length: int = RUN_TOKENS) -> int:
    """How many distinct runs of `length` tokens occur in both texts."""
    return len(_runs(one, length) & _runs(other, length))


def _runs(text: ScoredText, length: int) -> set[tuple[int, ...]]:
    return {
        segment.ids[start : start + length]
        for segment in text.segments
        for start in range(len(segment.ids) - length + 1)
    }

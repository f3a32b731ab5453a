"""Near-duplicate documents, repeated passages, and the search for held-out runs in the training text.

Works on strings and integer arrays; knows no sources and no tokenizer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def words(text: str) -> list[tuple[int, int]]:
    """Spans of the words of a text; each Chinese ideograph is a word."""
    return [match.span() for match in _WORD.finditer(text)]


@dataclass
class Vocabulary:
    """Word -> int64 id, grown as texts come by."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n], spans [n, 2]) of the lower-cased words."""
        spans = words(text)
        ids = [self.ids.setdefault(text[a:b].lower(), len(self.ids)) for a, b in spans]
        return np.array(ids, dtype=np.int64), np.array(spans, dtype=np.int64).reshape(-1, 2)


def run_hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """[n - length + 1] uint64, one hash for each run of `length` ids; empty for shorter inputs."""
    count = len(ids) - length + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    values = _scramble(np.asarray(ids, dtype=np.uint64) + np.uint64(1))
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):  # Horner's rule, all runs at once; uint64 wraps on purpose
        hashes = hashes * _PRIME + values[offset : offset + count]
    return _scramble(hashes)


def _scramble(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return values ^ (values >> np.uint64(27))


# -------------------------------------------------------------------------------- near-duplicate documents
@dataclass(frozen=True, kw_only=True)
class MinHash:
    """Documents are near-duplicates when the estimated Jaccard index of their word 5-grams is high."""

    permutations: int = 64
    bands: int = 16
    shingle: int = 5
    threshold: float = 0.6
    seed: int = 0

    def signature(self, ids: np.ndarray) -> np.ndarray:
        """[permutations] uint64 minima over the document's shingles."""
        shingles = np.unique(run_hashes(ids, min(self.shingle, max(1, len(ids)))))
        if not len(shingles):
            shingles = np.zeros(1, dtype=np.uint64)
        salts = np.random.default_rng(self.seed).integers(1, 2**63, self.permutations, dtype=np.uint64)
        minima = np.full(self.permutations, np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(shingles), 4096):  # bounds the working memory
            part = _scramble(shingles[start : start + 4096, None] ^ salts[None, :])
            minima = np.minimum(minima, part.min(axis=0))
        return minima


def near_duplicates(texts: Iterable[str], rule: MinHash | None = None) -> list[int | None]:
    """For each text the index of an earlier, kept near-duplicate, or None where it is kept itself."""
    rule = rule or MinHash()
    vocabulary = Vocabulary()
    rows = rule.permutations // rule.bands
    buckets: dict[tuple[int, bytes], list[int]] = {}
    signatures: list[np.ndarray] = []
    twins: list[int | None] = []
    for index, text in enumerate(texts):
        signature = rule.signature(vocabulary.encode(text)[0])
        keys = [(b, signature[b * rows : (b + 1) * rows].tobytes()) for b in range(rule.bands)]
        candidates = sorted({other for key in keys for other in buckets.get(key, ())})
        twin = next((o for o in candidates if np.mean(signatures[o] == signature) >= rule.threshold), None)
        signatures.append(signature)
        twins.append(twin)
        if twin is None:
            for key in keys:
                buckets.setdefault(key, []).append(index)
    return twins


def drop_repeated_passages(texts: Sequence[str], shortest: int = 100) -> list[str]:
    """The texts without passages (between blank lines) that stood earlier, in their own text or another."""
    seen: set[bytes] = set()
    kept: list[str] = []
    for text in texts:
        passages = []
        for passage in text.split("\n\n"):
            squeezed = " ".join(passage.split())
            digest = hashlib.blake2b(squeezed.encode(), digest_size=12).digest()
            if len(squeezed) >= shortest and digest in seen:
                continue
            seen.add(digest)
            passages.append(passage)
        kept.append("\n\n".join(passages))
    return kept


# ------------------------------------------------------------------------------------------------- leaks
@dataclass(frozen=True)
class Runs:
    """The set of all runs of `length` ids in some texts."""

    length: int
    hashes: np.ndarray  # sorted, distinct, uint64

    @classmethod
    def of(cls, sequences: Iterable[np.ndarray], length: int) -> Runs:
        """Collects the runs of every sequence; runs do not cross from one to the next."""
        parts = [run_hashes(ids, length) for ids in sequences]
        return cls(length, np.unique(np.concatenate([*parts, np.empty(0, dtype=np.uint64)])))

    def starts(self, ids: np.ndarray) -> np.ndarray:
        """Positions in `ids` at which one of the runs begins."""
        found = run_hashes(ids, self.length)
        if not len(self.hashes) or not len(found):
            return np.empty(0, dtype=np.int64)
        # A search in the sorted set; np.isin would sort all of it again for every document.
        nearest = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        return np.flatnonzero(self.hashes[nearest] == found)


def touched_spans(starts: np.ndarray, length: int, spans: np.ndarray) -> list[tuple[int, int]]:
    """Character spans that the runs cover, merged; spans [n, 2] are the ids' own."""
    merged: list[tuple[int, int]] = []
    for start in starts:
        first, last = int(spans[start, 0]), int(spans[start + length - 1, 1])
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def cut_lines(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text without every line that one of the character spans touches."""
    bad = iter(sorted(spans))
    current = next(bad, None)
    kept, position = [], 0
    for line in text.splitlines(keepends=True):
        end = position + len(line)
        while current is not None and current[1] <= position:
            current = next(bad, None)
        if current is None or current[0] >= end:
            kept.append(line)
        position = end
    return "".join(kept)

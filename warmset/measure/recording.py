"""What routers scored while windows decoded, as far down as a policy needs it: a compact file that numpy alone reads.

A recording is one safetensors file. For each row and layer it holds a beginning of the ranking, best first, the smaller
index first among equals; the first K are the router's own picks:

    experts    uint16  [P]      experts of row 0 layer 0, of row 0 layer 1, ..., in the order of their rank
    scores     float32 [P]      their selection scores
    counts     uint16  [N, L]   how many of them belong to each row and layer
    window     uint32  [N]      the window that verified the row, 0, 1, ...
    committed  uint8   [N]      1 where the row was kept, 0 where it was taken back
    position   uint32  [N]      in its sequence
    kind       uint8   [N]      index into `kinds`
    metadata   format, version 2, model, fingerprint, experts, top_k, renormalize, expert_bytes, kinds (JSON list),
               margin: every expert at most so much below the last pick is there, or `all`

`load_recording` takes the older full-score files of `measure.trace` too. Docs: docs/traces.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from warmset.config import shown
from warmset.errors import WarmsetError
from warmset.measure.trace import FORMAT, Trace, load_trace

if TYPE_CHECKING:
    from warmset.engine import TokenEngine

VERSION = "2"
MOST_EXPERTS = 1 << 16
_SLACK = 1e-5
"""Of margins and scores, kept beyond the margin: a float32 difference may round to the margin itself."""
_DTYPES = {
    "experts": np.uint16,
    "scores": np.float32,
    "counts": np.uint16,
    "window": np.uint32,
    "committed": np.uint8,
    "position": np.uint32,
    "kind": np.uint8,
}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Windows as they ran, with exact routing; arrays as in the file. margin None: every score is there.

    expert_bytes None: the file does not say.
    """

    expert_P: np.ndarray
    score_P: np.ndarray
    count_NL: np.ndarray
    window_N: np.ndarray
    committed_N: np.ndarray
    position_N: np.ndarray
    kind_N: np.ndarray
    kinds: tuple[str, ...]
    num_experts: int
    top_k: int
    renormalize: bool
    margin: float | None
    expert_bytes: int | None
    model: str
    fingerprint: str

    @property
    def num_rows(self) -> int:
        return self.count_NL.shape[0]

    @property
    def num_layers(self) -> int:
        return self.count_NL.shape[1]

    @cached_property
    def _begin_NL(self) -> np.ndarray:
        ends = np.cumsum(self.count_NL.ravel(), dtype=np.int64)
        return (ends - self.count_NL.ravel()).reshape(self.count_NL.shape)

    @cached_property
    def own_NLK(self) -> np.ndarray:
        """int32 [N, L, K], the router's own picks, best first."""
        return self.expert_P[self._begin_NL[:, :, None] + np.arange(self.top_k)].astype(np.int32)

    @cached_property
    def windows(self) -> list[tuple[int, int, int]]:
        """(first row, end, committed rows) of each window; the committed rows of a window are its first."""
        change = np.flatnonzero(np.diff(self.window_N)) + 1
        edges = [0, *change.tolist(), self.num_rows] if self.num_rows else []
        return [(start, end, int(self.committed_N[start:end].sum())) for start, end in pairwise(edges)]

    def scores_TE(self, first: int, end: int, layer: int) -> np.ndarray:
        """float32 [T, E] of rows first .. end - 1 in a layer; -inf where a score was not recorded."""
        dense_TE = np.full((end - first, self.num_experts), -np.inf, dtype=np.float32)
        for row in range(first, end):
            begin = self._begin_NL[row, layer]
            part = slice(begin, begin + self.count_NL[row, layer])
            dense_TE[row - first, self.expert_P[part]] = self.score_P[part]
        return dense_TE

    def rows(self, first: int, end: int) -> Recording:
        """The recording of rows first .. end - 1 alone; they must be whole windows."""
        begin = int(self._begin_NL[first, 0]) if first < self.num_rows else len(self.expert_P)
        stop = int(self._begin_NL[end, 0]) if end < self.num_rows else len(self.expert_P)
        return replace(
            self,
            expert_P=self.expert_P[begin:stop],
            score_P=self.score_P[begin:stop],
            count_NL=self.count_NL[first:end],
            window_N=self.window_N[first:end],
            committed_N=self.committed_N[first:end],
            position_N=self.position_N[first:end],
            kind_N=self.kind_N[first:end],
        )

    def row_by_row(self) -> Recording:
        """The committed rows alone, each as a window of its own: the text as it is decoded without drafts."""
        kept_N = self.committed_N.astype(bool)
        kept_P = np.repeat(kept_N, self.count_NL.sum(axis=1, dtype=np.int64))
        num_kept = int(kept_N.sum())
        return replace(
            self,
            expert_P=self.expert_P[kept_P],
            score_P=self.score_P[kept_P],
            count_NL=self.count_NL[kept_N],
            window_N=np.arange(num_kept, dtype=np.uint32),
            committed_N=np.ones(num_kept, dtype=np.uint8),
            position_N=self.position_N[kept_N],
            kind_N=self.kind_N[kept_N],
        )

    def counts_LE(self) -> np.ndarray:
        """float64 [L, E]: how often committed rows picked each expert."""
        counts_LE = np.zeros((self.num_layers, self.num_experts))
        own_NLK = self.own_NLK[self.committed_N.astype(bool)]
        layer_NLK = np.broadcast_to(np.arange(self.num_layers)[None, :, None], own_NLK.shape)
        np.add.at(counts_LE, (layer_NLK, own_NLK), 1.0)
        return counts_LE


def ranked(scores_NLE: np.ndarray, top_k: int, margin: float | None) -> tuple[np.ndarray, ...]:
    """(expert_P, score_P, count_NL) of selection scores float32 [N, L, E], down to `margin` below the last pick."""
    order_NLE = np.argsort(-scores_NLE, axis=-1, kind="stable")
    sorted_NLE = np.take_along_axis(scores_NLE, order_NLE, axis=-1)
    possible_NLE = sorted_NLE > -np.inf
    if margin is None:
        kept_NLE = possible_NLE
    else:
        last_NL1 = sorted_NLE[:, :, top_k - 1 : top_k].astype(np.float64)
        slack_NL1 = _SLACK * (1 + np.abs(last_NL1) + abs(margin))
        gap_NLE = last_NL1 - np.where(possible_NLE, sorted_NLE, 0.0)
        kept_NLE = possible_NLE & (gap_NLE <= margin + slack_NL1)
        kept_NLE[:, :, :top_k] = True
    return (
        order_NLE[kept_NLE].astype(np.uint16),
        sorted_NLE[kept_NLE].astype(np.float32),
        kept_NLE.sum(axis=-1).astype(np.uint16),
    )


def of_kind(recorded: Recording, kind: str) -> Recording:
    """The rows of one kind, which must follow one another; WarmsetError where there are none."""
    if kind not in recorded.kinds:
        raise WarmsetError(f"kind must be one of {', '.join(recorded.kinds)}. Got {shown(kind)}.")
    rows = np.flatnonzero(recorded.kind_N == recorded.kinds.index(kind))
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise WarmsetError(f"The rows of kind {shown(kind)} do not follow one another in this trace.")
    return recorded.rows(int(rows[0]), int(rows[-1]) + 1)


class Recorder:
    """Listens to an engine's windows; `kind` names what is read at the moment. Made by `recording`."""

    def __init__(self, engine: TokenEngine, margin: float | None, logits: list) -> None:
        self.kind = ""
        self._engine = engine
        self._margin = margin
        self._logits = logits
        self._kinds: list[str] = []
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._marks: list[tuple[int, int, int, int]] = []
        self._windows = 0

    def note(self, own_LTK: np.ndarray) -> None:
        """A window was committed; the last logits of each layer are its own."""
        import torch

        from warmset.routing import selection_scores

        engine, num_layers = self._engine, len(own_LTK)
        logits = self._logits[-num_layers:]  # a window that was run again with fewer rows left some before
        scores_LTE = torch.stack([selection_scores(logits_TE, engine.rule) for logits_TE in logits])
        self._logits.clear()
        scores_TLE = scores_LTE.transpose(0, 1).cpu().numpy()
        self._parts.append(ranked(scores_TLE, engine.rule.top_k, self._margin))
        if self.kind not in self._kinds:
            self._kinds.append(self.kind)
        kind, num_kept = self._kinds.index(self.kind), own_LTK.shape[1]
        positions = engine.windows.routing.position_T[: len(scores_TLE)].tolist()
        for row, position in enumerate(positions):
            self._marks.append((self._windows, int(row < num_kept), position, kind))
        self._windows += 1

    def recording(self) -> Recording:
        """What was recorded until now; WarmsetError where no window ran."""
        if not self._parts:
            raise WarmsetError("Nothing was recorded: no window ran.")
        engine = self._engine
        marks = np.array(self._marks)
        return Recording(
            expert_P=np.concatenate([part[0] for part in self._parts]),
            score_P=np.concatenate([part[1] for part in self._parts]),
            count_NL=np.concatenate([part[2] for part in self._parts]),
            window_N=marks[:, 0].astype(np.uint32),
            committed_N=marks[:, 1].astype(np.uint8),
            position_N=marks[:, 2].astype(np.uint32),
            kind_N=marks[:, 3].astype(np.uint8),
            kinds=tuple(self._kinds),
            num_experts=engine.prepared.experts.num_experts,
            top_k=engine.rule.top_k,
            renormalize=engine.rule.renormalize,
            margin=self._margin,
            expert_bytes=engine.store.layout.payload_bytes,
            model=engine.config.model,
            fingerprint=engine.prepared.checkpoint.fingerprint(),
        )


@contextmanager
def recording(engine: TokenEngine, margin: float | None) -> Iterator[Recorder]:
    """Record every window that the engine commits inside; margin None keeps every score.

    WarmsetError when the engine has a policy: what it changes in a layer changes the scores of those after it.
    """
    if engine.policy is not None:
        raise WarmsetError("A trace is recorded with routing off. Got an engine with a policy.")
    if engine.rule.scoring != "softmax":
        raise WarmsetError("A trace is recorded of softmax routers only, whose scores are their logits.")
    if engine.prepared.experts.num_experts >= MOST_EXPERTS:
        raise WarmsetError(f"A trace holds fewer than {MOST_EXPERTS} experts a layer.")
    with engine.windows.keeping_logits() as logits:
        recorder = Recorder(engine, margin, logits)
        engine.residency.listeners.append(recorder.note)
        try:
            yield recorder
        finally:
            engine.residency.listeners.remove(recorder.note)


def read_texts(engine: TokenEngine, ids: list[int], rows: int) -> None:
    """Run a text through windows of `rows` rows, all committed, in sequences that the model's context holds."""
    most = engine.prepared.max_model_len
    for start in range(0, len(ids), most):
        sequence = engine.windows.start()
        part = ids[start : start + most]
        for first in range(0, len(part), rows):
            with engine.clock.window():
                engine.windows.score(sequence, part[first : first + rows])


def read_with_drafts(engine: TokenEngine, ids: list[int], sizes: Sequence[int]) -> None:
    """Decode a given text: windows with drafts of the engine's source, of which those that the text bears out are kept.

    sizes: rows of the windows, by turns. The text must fit into the model's context.
    """
    sequence, turn = engine.windows.start(), 0
    while sequence.length < len(ids):
        place = sequence.length
        rows = min(sizes[turn % len(sizes)], len(ids) - place)
        drafts = engine.draft.propose(
            sequence, ids[place], rows - 1, lambda logits_V, _: int(logits_V.argmax())
        )
        with engine.clock.window():
            verified = len(engine.windows.verify(sequence, [ids[place], *drafts]))
            right = 0
            while right + 1 < verified and drafts[right] == ids[place + 1 + right]:
                right += 1
            engine.windows.commit(sequence, 1 + right)
        turn += 1


def save_recording(recorded: Recording, path: Path) -> None:
    """Write the recording to a temporary name beside `path`, then rename."""
    from safetensors.numpy import save_file

    arrays = {
        "experts": recorded.expert_P,
        "scores": recorded.score_P,
        "counts": recorded.count_NL,
        "window": recorded.window_N,
        "committed": recorded.committed_N,
        "position": recorded.position_N,
        "kind": recorded.kind_N,
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": recorded.model,
        "fingerprint": recorded.fingerprint,
        "experts": str(recorded.num_experts),
        "top_k": str(recorded.top_k),
        "renormalize": str(recorded.renormalize).lower(),
        "expert_bytes": "" if recorded.expert_bytes is None else str(recorded.expert_bytes),
        "kinds": json.dumps(recorded.kinds),
        "margin": "all" if recorded.margin is None else repr(recorded.margin),
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_recording(path: Path) -> Recording:
    """Read and check a recording, or a full-score trace; WarmsetError naming the file when it is neither."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") == FORMAT and metadata.get("version") == "1":
                return of_trace(load_trace(path))
            if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
                raise WarmsetError(f"{path} is no {FORMAT} of version 1 or {VERSION}.")
            arrays = {name: file.get_tensor(name) for name in _DTYPES}
            recorded = Recording(
                expert_P=arrays["experts"],
                score_P=arrays["scores"],
                count_NL=arrays["counts"],
                window_N=arrays["window"],
                committed_N=arrays["committed"],
                position_N=arrays["position"],
                kind_N=arrays["kind"],
                kinds=tuple(json.loads(metadata["kinds"])),
                num_experts=int(metadata["experts"]),
                top_k=int(metadata["top_k"]),
                renormalize=metadata["renormalize"] == "true",
                margin=None if metadata["margin"] == "all" else float(metadata["margin"]),
                expert_bytes=int(metadata["expert_bytes"]) if metadata["expert_bytes"] else None,
                model=metadata["model"],
                fingerprint=metadata["fingerprint"],
            )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WarmsetError):
            raise
        what = f"it does not say {error}" if isinstance(error, KeyError) else error
        raise WarmsetError(f"{path} cannot be read as a trace: {what}.") from None
    damage = _damage(arrays, recorded)
    if damage:
        raise WarmsetError(f"{path} is damaged: {damage}.")
    return recorded


def _damage(arrays: dict[str, np.ndarray], recorded: Recording) -> str | None:
    """What is wrong with arrays that do not belong together, or None."""
    for name, dtype in _DTYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != (2 if name == "counts" else 1):
            return f"{name} has another type or shape"
    num_rows = recorded.num_rows
    if any(len(arrays[name]) != num_rows for name in ("window", "committed", "position", "kind")):
        return "its marks are not one a row"
    total = int(recorded.count_NL.sum(dtype=np.int64))
    if (
        num_rows == 0
        or recorded.num_layers == 0
        or not len(recorded.expert_P) == len(recorded.score_P) == total
    ):
        return "it holds other scores than it counts"
    if recorded.top_k < 1 or int(recorded.count_NL.min()) < recorded.top_k:
        return "a row has fewer experts than picks"
    if int(recorded.expert_P.max()) >= recorded.num_experts:
        return f"an expert is {int(recorded.expert_P.max())}, of {recorded.num_experts}"
    if int(recorded.kind_N.max()) >= len(recorded.kinds) or int(recorded.committed_N.max()) > 1:
        return "its marks have values that mean nothing"
    if (np.diff(recorded.window_N.astype(np.int64)) < 0).any():
        return "its windows are not in order"
    starts = np.flatnonzero(np.diff(recorded.window_N, prepend=-1)) if num_rows else np.zeros(0, np.int64)
    rises = np.flatnonzero(np.diff(recorded.committed_N.astype(np.int8), prepend=0) > 0)
    if not recorded.committed_N[starts].all() or not np.isin(rises, starts).all():
        return "a window keeps a row after one that it took back"
    if not np.isfinite(recorded.score_P).all():
        return "a score is not finite"
    count_R = recorded.count_NL.reshape(-1)
    row_P = np.repeat(np.arange(len(count_R)), count_R)
    if len(np.unique(row_P * recorded.num_experts + recorded.expert_P)) < total:
        return "a row has an expert twice"
    if ((np.diff(recorded.score_P) > 0) & (np.diff(row_P) == 0)).any():
        return "a row's scores rise"
    return None


def of_trace(trace: Trace) -> Recording:
    """A full-score trace, whose windows have one row, as a recording; positions begin anew with each kind."""
    expert_P, score_P, count_NL = ranked(trace.scores_NLE.float().numpy(), trace.top_k, None)
    num_rows = trace.num_rows
    kind_N = trace.kind_N.numpy()
    starts = np.flatnonzero(np.diff(kind_N.astype(np.int16), prepend=-1))
    first_N = starts[np.searchsorted(starts, np.arange(num_rows), side="right") - 1] if num_rows else starts
    return Recording(
        expert_P=expert_P,
        score_P=score_P,
        count_NL=count_NL,
        window_N=np.arange(num_rows, dtype=np.uint32),
        committed_N=np.ones(num_rows, dtype=np.uint8),
        position_N=(np.arange(num_rows) - first_N).astype(np.uint32),
        kind_N=kind_N,
        kinds=trace.kinds,
        num_experts=trace.scores_NLE.shape[2],
        top_k=trace.top_k,
        renormalize=trace.renormalize,
        margin=None,
        expert_bytes=None,
        model=trace.model,
        fingerprint=trace.fingerprint,
    )

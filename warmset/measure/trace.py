"""Routing traces: what every expert scored, row by row, while a model read a text in windows of one row.

A trace is one safetensors file, so any policy can be tried over it without the model:

    scores_NLE    float16 [N, L, E]   selection scores of each row and MoE layer, rounded once from float32
    kind_N        uint8   [N]         index into `kinds`
    metadata      format, version, model, fingerprint, top_k, renormalize, kinds (JSON list), text

Rows are in the order they were read; a change of kind is a change of text. Docs: docs/traces.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from warmset.errors import WarmsetError

if TYPE_CHECKING:
    from warmset.engine import TokenEngine

FORMAT, VERSION = "warmset-trace", "1"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One recorded text; `scores_NLE` float16, `kind_N` uint8 indexes `kinds`."""

    scores_NLE: torch.Tensor
    kind_N: torch.Tensor
    kinds: tuple[str, ...]
    top_k: int
    renormalize: bool
    model: str
    fingerprint: str

    @property
    def num_rows(self) -> int:
        return self.scores_NLE.shape[0]

    def rows_of(self, kind: str) -> torch.Tensor:
        """Scores of one kind's rows, float16 [n, L, E]."""
        return self.scores_NLE[self.kind_N == self.kinds.index(kind)]


def record_trace(engine: TokenEngine, texts: Sequence[tuple[str, list[int]]]) -> Trace:
    """Read each (kind, token ids) text from its start, one row a window, exactly, and keep every score.

    Raises WarmsetError when the engine has a policy: a trace holds the router's own scores.
    """
    from warmset.routing import selection_scores

    if engine.policy is not None:
        raise WarmsetError("A trace is recorded with routing off. Got an engine with a policy.")
    kinds = tuple(dict.fromkeys(kind for kind, _ in texts))
    scores, kind_N = [], []
    for kind, ids in texts:
        sequence = engine.windows.start()
        for token in ids:
            with engine.windows.keeping_logits() as logits:
                engine.windows.step(sequence, token)
            scores.append(
                torch.stack([selection_scores(row_TE, engine.rule)[0] for row_TE in logits]).half().cpu()
            )
            kind_N.append(kinds.index(kind))
    return Trace(
        scores_NLE=torch.stack(scores),
        kind_N=torch.tensor(kind_N, dtype=torch.uint8),
        kinds=kinds,
        top_k=engine.rule.top_k,
        renormalize=engine.rule.renormalize,
        model=engine.config.model,
        fingerprint=engine.prepared.checkpoint.fingerprint(),
    )


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace to a temporary name beside `path`, then rename."""
    from safetensors.torch import save_file

    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": trace.model,
        "fingerprint": trace.fingerprint,
        "top_k": str(trace.top_k),
        "renormalize": str(trace.renormalize).lower(),
        "kinds": json.dumps(trace.kinds),
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        save_file(
            {"scores": trace.scores_NLE.contiguous(), "kind": trace.kind_N}, temporary, metadata=metadata
        )
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_trace(path: Path) -> Trace:
    """Read and check a trace; WarmsetError naming the file when it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
                raise WarmsetError(f"{path} is no {FORMAT} of version {VERSION}.")
            scores_NLE, kind_N = file.get_tensor("scores"), file.get_tensor("kind")
            trace = Trace(
                scores_NLE=scores_NLE,
                kind_N=kind_N,
                kinds=tuple(json.loads(metadata["kinds"])),
                top_k=int(metadata["top_k"]),
                renormalize=metadata["renormalize"] == "true",
                model=metadata["model"],
                fingerprint=metadata["fingerprint"],
            )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, WarmsetError):
            raise
        raise WarmsetError(f"{path} cannot be read as a trace: {error}.") from None
    whole = (
        scores_NLE.ndim == 3 and scores_NLE.dtype == torch.float16 and kind_N.shape == scores_NLE.shape[:1]
    )
    if not whole or (trace.num_rows and int(kind_N.max()) >= len(trace.kinds)):
        raise WarmsetError(f"{path} is damaged: its scores and kinds do not belong together.")
    return trace

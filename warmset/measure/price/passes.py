"""One pass over a text: every segment through decode windows, every position scored once.

    segments -> windows of up to T rows -> stretches of up to 256 rows -> a `Taker`

A pass starts each segment anew: the first token is read exactly, then windows follow with the policy acting. What the
logits of a stretch are good for is the taker's business: the first pass keeps them as the reference, the others are
compared with it. Shape letters: N positions, W windows, T rows, K picks a row, L layers, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from warmset.measure.price.documents import ScoredText, Segment
from warmset.measure.price.scorers import Scorer, routed_ids
from warmset.routing.counters import is_among

STRETCH_ROWS = 256


@dataclass(frozen=True)
class Stretch:
    """Neighbouring positions of one segment: logits [n, V] after each, and the tokens [n] that came next."""

    first: int
    logits_NV: Tensor
    target_N: Tensor


Taker = Callable[[Stretch], None]


@dataclass
class RoutingFacts:
    """What routing did at each position and in each window of a pass.

    own_NLK int16: the router's own picks. moved_NLK bool: the own picks, by rank, that the policy took away.
    swaps_N, dropped_N, tail_cold_N int32: the policy's counters, over layers. cold_WL int32: distinct experts that a
    layer-window read from the slow tier. window_N int32: the window of each position.
    """

    own_NLK: np.ndarray
    moved_NLK: np.ndarray
    swaps_N: np.ndarray
    dropped_N: np.ndarray
    tail_cold_N: np.ndarray
    cold_WL: np.ndarray
    window_N: np.ndarray

    @property
    def changed_NL(self) -> np.ndarray:
        """bool: the policy changed the picks of this row in this layer."""
        return np.asarray(self.moved_NLK.any(axis=2))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class _Gathered:
    """The lists that become RoutingFacts."""

    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    windows: int = 0

    def add(self, scorer: Scorer, slot_LE: Tensor) -> None:
        """The window that the scorer ran last; slot_LE: residency when it began, on the host."""
        made = scorer.routing.made
        ids_LTK, own_LTK = routed_ids(made)
        counters_T5 = torch.stack([routed.counters_T5 for routed in made]).sum(dim=0).cpu()
        num_layers, num_rows, _ = own_LTK.shape
        flat = (num_layers * num_rows, -1)
        moved = ~is_among(own_LTK.reshape(flat), ids_LTK.reshape(flat)).reshape(own_LTK.shape)
        row = {
            "own_NLK": own_LTK.transpose(0, 1).numpy().astype(np.int16),
            "moved_NLK": moved.transpose(0, 1).numpy(),
            "swaps_N": counters_T5[:, 1].numpy().astype(np.int32),
            "dropped_N": counters_T5[:, 4].numpy().astype(np.int32),
            "tail_cold_N": counters_T5[:, 0].numpy().astype(np.int32),
            "cold_WL": cold_experts(ids_LTK, slot_LE)[None],
            "window_N": np.full(num_rows, self.windows, dtype=np.int32),
        }
        for name, value in row.items():
            self.parts.setdefault(name, []).append(value)
        self.windows += 1

    def facts(self) -> RoutingFacts:
        return RoutingFacts(**{name: np.concatenate(parts) for name, parts in self.parts.items()})


def cold_experts(ids_LTK: Tensor, slot_LE: Tensor) -> np.ndarray:
    """int32 [L]: distinct experts among a window's picks that have no slot; padding (-1) is none."""
    num_layers, num_experts = slot_LE.shape
    layer_L1 = torch.arange(num_layers)[:, None]
    picked_LE = torch.zeros(num_layers, num_experts + 1, dtype=torch.bool)
    ids_LP = ids_LTK.reshape(num_layers, -1).long()
    picked_LE[layer_L1, torch.where(ids_LP < 0, num_experts, ids_LP)] = True
    return (picked_LE[:, :num_experts] & (slot_LE < 0)).sum(dim=1).numpy().astype(np.int32)


def run_pass(
    scorer: Scorer,
    text: ScoredText,
    rows: int,
    take: Taker,
    *,
    before_window: Callable[[int, int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RoutingFacts, str]:
    """Score every position of the text in windows of up to `rows` rows with the policy that the scorer uses.

    before_window: told the first position of a window and its number of rows. progress: positions done, in all.
    Returns what routing did, and the SHA-256 of the token ids that windows were given and asked for.
    """
    gathered, total, digest = _Gathered(), text.num_positions, hashlib.sha256()
    for segment in text.segments:
        sequence = scorer.start()
        scorer.read(sequence, list(segment.ids[:1]))
        for stretch in _stretches(segment, rows):
            logits = []
            for start, tokens in _windows(segment, stretch, rows):
                if before_window is not None:
                    before_window(segment.first + start - 1, len(tokens))
                slot_LE = scorer.routing.slot_LE.to("cpu", copy=True)  # may change with the window's commit
                logits.append(scorer.score(sequence, tokens))
                gathered.add(scorer, slot_LE)
            digest.update(np.array(segment.ids[stretch.start : stretch.stop + 1], dtype="<i4").tobytes())
            targets = torch.tensor(segment.ids[stretch.start + 1 : stretch.stop + 1])
            logits_NV = torch.cat(logits)
            take(Stretch(segment.first + stretch.start - 1, logits_NV, targets.to(logits_NV.device)))
            if progress is not None:
                progress(segment.first + stretch.stop - 1, total)
    return gathered.facts(), digest.hexdigest()


def _stretches(segment: Segment, rows: int) -> Iterator[range]:
    """Places of the segment's scored rows, in stretches that hold whole windows."""
    end, most = 1 + segment.num_scored, STRETCH_ROWS // rows * rows
    for start in range(1, end, most):
        yield range(start, min(start + most, end))


def _windows(segment: Segment, stretch: range, rows: int) -> Iterator[tuple[int, list[int]]]:
    for start in range(stretch.start, stretch.stop, rows):
        yield start, list(segment.ids[start : min(start + rows, stretch.stop)])

"""Continues a conversation where its earlier turns ended, instead of reading them again.

The sequence of the last answer stays, with all its states. Keys and values can be cut to any earlier length, recurrent
states cannot: copies of them are kept at the end of each prompt and of each answer, and the oldest are dropped when
they take more than the budget. A new prompt goes on from the longest point that is a prefix of it. A point that is the
whole prompt must know the logits after it, which the end of a prompt does. Knows token ids and states, no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from warmset.draft import Draft
from warmset.window import Sequence, WindowRunner

if TYPE_CHECKING:
    from warmset.states import Snapshot

MAX_POINTS = 16


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a sequence can be taken back to; `logits_V` are those after its last row, if it is a prompt's end."""

    snapshot: Snapshot
    hidden_H: torch.Tensor | None
    logits_V: torch.Tensor | None

    @property
    def length(self) -> int:
        return self.snapshot.length

    @property
    def nbytes(self) -> int:
        extras = (self.hidden_H, self.logits_V)
        return self.snapshot.nbytes + sum(tensor.nbytes for tensor in extras if tensor is not None)


def _common_length(one: list[int], other: list[int]) -> int:
    for length, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return length
    return min(len(one), len(other))


class Conversation:
    """The last sequence and the points it can go back to, within `budget` bytes; a budget of 0 keeps nothing."""

    def __init__(self, windows: WindowRunner, draft: Draft, budget: int) -> None:
        self._windows = windows
        self._draft = draft
        self._budget = budget
        self._sequence: Sequence | None = None
        self._points: list[Point] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the copies, keys and values not among them."""
        return sum(point.nbytes for point in self._points)

    @torch.inference_mode()
    def read(self, ids: list[int]) -> tuple[Sequence, torch.Tensor, int]:
        """A sequence that has read `ids`, the logits [V] after them, and how many of them needed no reading."""
        sequence, self._sequence = self._sequence, None
        point = None if sequence is None else self._longest(sequence, ids)
        if sequence is None or point is None:
            sequence, known = self._windows.start(), 0
            self._points = []
        else:
            known = self._go_back(sequence, point)
        logits_V = point.logits_V if point is not None and known == len(ids) else None
        if logits_V is None:
            logits_V = self._windows.read_prompt(sequence, ids[known:])
            self._mark(sequence, logits_V)
        return sequence, logits_V, known

    @torch.inference_mode()
    def keep(self, sequence: Sequence) -> None:
        """An answer ended: its sequence may be continued, unless an error broke it."""
        if self._budget == 0 or sequence.broken:
            self._points = []
            return
        if not self._points or self._points[-1].length < sequence.length:
            self._mark(sequence, None)
        self._sequence = sequence

    def forget(self) -> None:
        """Drop everything, for example before a measurement."""
        self._sequence, self._points = None, []

    def _longest(self, sequence: Sequence, ids: list[int]) -> Point | None:
        """The longest point that is a prefix of `ids`; where only keys and values have to be cut, any length is one."""
        from warmset.states import Snapshot

        found = None
        for point in reversed(self._points):
            fits = point.length < len(ids) or (point.length == len(ids) and point.logits_V is not None)
            reachable = point.length == sequence.length or sequence.state.can_go_back()
            if fits and reachable and sequence.ids[: point.length] == ids[: point.length]:
                found = point
                break
        if sequence.state.recurrent or self._draft.wants_hidden or not sequence.state.can_go_back():
            return found
        same = min(_common_length(sequence.ids, ids), len(ids) - 1)
        if same <= (0 if found is None else found.length):
            return found
        return Point(snapshot=Snapshot(length=same, states=()), hidden_H=None, logits_V=None)

    def _go_back(self, sequence: Sequence, point: Point) -> int:
        if point.length < sequence.length:
            sequence.state.go_back(point.snapshot)
            del sequence.ids[point.length :]
            sequence.hidden_H = point.hidden_H
            self._draft.go_back(sequence, point.hidden_H)
        self._points = [other for other in self._points if other.length <= point.length]
        return point.length

    def _mark(self, sequence: Sequence, logits_V: torch.Tensor | None) -> None:
        if self._budget == 0:
            return
        logits_V = None if logits_V is None else logits_V.clone()
        snapshot = sequence.state.snapshot()
        self._points.append(Point(snapshot=snapshot, hidden_H=sequence.hidden_H, logits_V=logits_V))
        while self._points and (self.nbytes > self._budget or len(self._points) > MAX_POINTS):
            self._points.pop(0)

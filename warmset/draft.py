"""Where the drafts of a window come from: `none`, `lookup` in what was written so far, or a small second `model`.

Every source has one signature. `propose` is asked before a window for tokens that may follow the one drawn last; a
source may give fewer than asked for, and none. What it keeps for a sequence lies in `sequence.drafting` and covers
settled tokens only, so what a window takes back it never saw. The fourth source, the model's own MTP layer, is in
`mtp`. Knows token ids and logits, no text, and nothing of how drafts are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Guess = Callable[[torch.Tensor, int], int]
"""(logits [V], position) -> the token that such logits lead to at that position."""


class Sequence(Protocol):
    """What a source may know of a sequence."""

    ids: list[int]
    drafting: Any
    hidden_H: torch.Tensor | None


class Draft(Protocol):
    """A source of drafts; `name` is what the command line calls it, `wants_hidden` whether `see` is to be called."""

    name: str
    wants_hidden: bool

    def propose(self, sequence: Sequence, token: int, count: int, guess: Guess) -> list[int]:
        """At most `count` tokens that may follow `token`, which follows the settled tokens of `sequence`."""
        ...

    def see(self, sequence: Sequence, hidden_nH: torch.Tensor) -> None:
        """The trunk's last hidden states [n, H] of the n rows of `sequence` that were settled last."""
        ...

    def go_back(self, sequence: Sequence, hidden_H: torch.Tensor | None) -> None:
        """`sequence` is shorter than it was; hidden_H: the trunk's state at its last row, for who asked for it."""
        ...


class NoDraft:
    """Windows of one row."""

    name = "none"
    wants_hidden = False

    def propose(self, sequence: Sequence, token: int, count: int, guess: Guess) -> list[int]:
        return []

    def see(self, sequence: Sequence, hidden_nH: torch.Tensor) -> None:
        pass

    def go_back(self, sequence: Sequence, hidden_H: torch.Tensor | None) -> None:
        pass


MIN_MATCH, MAX_MATCH = 2, 4


@dataclass
class _Places:
    """Where each run of MIN_MATCH to MAX_MATCH tokens ended last, among the first `length` settled tokens."""

    length: int = 0
    last: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, ids: list[int]) -> None:
        for end in range(self.length + 1, len(ids) + 1):
            for size in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
                self.last[tuple(ids[end - size : end])] = end
        self.length = len(ids)


class LookupDraft(NoDraft):
    """Prompt lookup: what followed the last time that the latest few tokens were written, the longest match first."""

    name = "lookup"

    def propose(self, sequence: Sequence, token: int, count: int, guess: Guess) -> list[int]:
        if sequence.drafting is None:
            sequence.drafting = _Places()
        places: _Places = sequence.drafting
        places.extend(sequence.ids)
        text = [*sequence.ids[-MAX_MATCH:], token]
        for size in range(min(MAX_MATCH, len(sequence.ids) + 1), MIN_MATCH - 1, -1):
            end = places.last.get(tuple(text[-size:]))
            if end is not None:
                return _copy(sequence.ids, token, end, count)
        return []

    def go_back(self, sequence: Sequence, hidden_H: torch.Tensor | None) -> None:
        sequence.drafting = None


def _copy(ids: list[int], token: int, start: int, count: int) -> list[int]:
    """`count` tokens of ids + [token] from `start` on, going on into the copy itself where the text ends."""
    copied: list[int] = []
    for place in range(start, start + count):
        if place < len(ids):
            copied.append(ids[place])
        else:
            copied.append(token if place == len(ids) else copied[place - len(ids) - 1])
    return copied


CHUNK_ROWS = 2048


class ModelDraft(NoDraft):
    """A small second model with the same tokenizer, run a row at a time; `trunk` is transformers' own model.

    Its states cover settled tokens only: what it drafts is taken back at once, and what was kept of it is read again,
    in one forward, when it is asked next.
    """

    name = "model"

    def __init__(self, trunk: Any, vocab_size: int) -> None:
        """vocab_size: V of the model that is drafted for; the second one's may be padded to another."""
        self.trunk = trunk
        self.device = next(trunk.parameters()).device
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def propose(self, sequence: Sequence, token: int, count: int, guess: Guess) -> list[int]:
        from warmset.states import SequenceState

        if count == 0 or max(token, *sequence.ids) >= self.trunk.config.vocab_size:
            return []
        if sequence.drafting is None:
            sequence.drafting = SequenceState.new(self.trunk.config)
        state: SequenceState = sequence.drafting
        unread = sequence.ids[state.length :]
        for start in range(0, len(unread), CHUNK_ROWS):
            self._read(state, unread[start : start + CHUNK_ROWS])
        snapshot = state.snapshot()
        drafts: list[int] = []
        while len(drafts) < count:
            logits_V = self._read(state, [drafts[-1] if drafts else token])
            drafts.append(guess(logits_V, len(sequence.ids) + 1 + len(drafts)))
        state.go_back(snapshot)
        return drafts

    def _read(self, state: Any, ids: list[int]) -> torch.Tensor:
        from warmset.model import quiet_forward

        state.open(len(ids))
        with quiet_forward():
            output = self.trunk(
                input_ids=torch.tensor([ids], device=self.device),
                cache=state.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        state.settle(len(ids))
        return output.logits[0, -1, : self._vocab_size]

    def go_back(self, sequence: Sequence, hidden_H: torch.Tensor | None) -> None:
        sequence.drafting = None

"""Drafts by the MTP layer inside a run of windows: what `mtp.MtpDraft` does on the host, in device memory.

    propose  before the trunk: the layer's output after the last kept row -> a draft -> the layer again -> the next
    read     after it: the layer runs over the window's rows, each with the token that was drawn after it

Rows that do not hold are overwritten by later rows at their positions, as everywhere in `graph.cache`. The layer's
own picks are the router's, its experts all have slots, and nothing of it is counted. Knows token ids, no text.

    T rows of a window, N drafts, H hidden, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from warmset.config import MAX_WINDOW_ROWS
from warmset.draft import Sequence
from warmset.graph.cache import StaticCache, why_not_static
from warmset.graph.forms import StaticForms
from warmset.mtp import MtpDraft

DrawTokens = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [T, V], positions int64 [T]) -> tokens int64 [T]."""


class StaticAhead:
    """The layer's states and hidden states of one sequence at a time, written in place."""

    def __init__(self, source: MtpDraft) -> None:
        self._source = source
        self._forms = StaticForms.of(source.head)
        self._cache: StaticCache | None = None
        none = torch.zeros(0)
        self._out_1H = self._hidden_1H = self._hidden_XH = none

    def why_not(self, sequence: Sequence) -> str | None:
        """Why the layer cannot go on from this sequence on the device, as the end of a sentence, or None."""
        source, ahead = self._source, sequence.drafting
        gpu = self._forms.device.type == "cuda"
        reasons = (
            self._forms.why_not,
            why_not_static(ahead.state),
            "the MTP layer began anew inside the sequence" if ahead.start > 0 else None,
            "the MTP layer routes in plain torch" if gpu and source.routing.runs_in_torch else None,
            "the MTP layer's experts run in plain torch" if gpu and not source.has_kernels else None,
        )
        return next((reason for reason in reasons if reason is not None), None)

    def begin(self, sequence: Sequence, token: int, places: int) -> bool:
        """Take over what the layer keeps of a sequence that `token` follows; True when memory moved.

        Until `end`, `sequence.drafting` is behind.
        """
        out_H = self._source.catch_up(sequence, token)
        state, hidden_H = sequence.drafting.state, sequence.hidden_H
        assert hidden_H is not None
        moved = self._cache is None or self._cache.places != places
        if self._cache is None or moved:
            self._cache = None  # its memory may be needed for the new one
            self._cache = StaticCache(state, places, self._forms.device)
            self._out_1H, self._hidden_1H = torch.zeros_like(out_H)[None], torch.zeros_like(hidden_H)[None]
            self._hidden_XH = self._hidden_1H.repeat(MAX_WINDOW_ROWS, 1)
        else:
            self._cache.load(state)
        self._forms.prepare(self._cache)
        self._out_1H.copy_(out_H)
        self._hidden_1H.copy_(hidden_H)
        return moved

    def using(self) -> AbstractContextManager[None]:
        """Inside, `propose` and `read` may run."""
        assert self._cache is not None
        return self._forms.using(self._cache)

    def propose(self, count: int, start_1: torch.Tensor, draw: DrawTokens) -> torch.Tensor:
        """Drafts int64 [N] of the tokens at `start_1` + 1, + 2, ...; the token at `start_1` is drawn already."""
        drafts: list[torch.Tensor] = []
        out_1H = self._out_1H
        for number in range(count):
            if drafts:
                out_1H = self._run(drafts[-1], out_1H, start_1 + (number - 1), None)
            drafts.append(draw(self._source.logits(out_1H), start_1 + (number + 1)))
        return torch.cat(drafts)

    def read(
        self, hidden_TH: torch.Tensor, drawn_T: torch.Tensor, start_1: torch.Tensor, count: torch.Tensor
    ) -> None:
        """A window from position `start_1` on has run, of whose rows the first `count` are kept."""
        rows = len(drawn_T)
        real_T = None if rows == 1 else torch.arange(rows, device=drawn_T.device) < count.clamp(min=1)
        out_TH = self._run(drawn_T, hidden_TH, start_1, real_T)
        last_1 = (count - 1).clamp(min=0).view(1)
        for kept_1H, new_TH in ((self._out_1H, out_TH), (self._hidden_1H, hidden_TH)):
            kept_1H.copy_(torch.where(count > 0, new_TH.index_select(0, last_1), kept_1H))
        self._hidden_XH[:rows].copy_(hidden_TH)

    def _run(
        self,
        token_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        start_1: torch.Tensor,
        real_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """The layer's output [T, H] over rows at `start_1` and after, whose next tokens are `token_T`."""
        assert self._cache is not None
        place, source = self._cache.place, self._source
        place.begin_2.copy_(start_1.expand(2))
        position_T = place.open(len(token_T))
        with source.routing.alone(position_T, real_T):
            return source.head(
                source.embed(token_T), hidden_TH, self._cache, **self._forms.inputs(position_T)
            )

    def take_back(self, begin_2: torch.Tensor) -> None:
        """Of the last window, from position `begin_2[0]` on, the rows from `begin_2[1]` on shall not have run."""
        last_1 = (begin_2[1] - 1 - begin_2[0]).view(1)
        self._hidden_1H.copy_(self._hidden_XH.index_select(0, last_1))

    def end(self, sequence: Sequence, length: int) -> None:
        """Give back what the layer keeps of a sequence that now has `length` rows: the last one waits for its token."""
        assert self._cache is not None
        self._cache.place.begin_2.fill_(length - 1)
        self._cache.store(sequence.drafting.state)
        self._source.wait(sequence, self._hidden_1H[0].clone())

"""One decode window: run T rows in one forward, then keep the first of them and take the others back.

A row is (sequence, position, token): the first row of a window holds the token that was drawn last, the others hold
drafts of what follows. `verify` runs them and gives the logits after each; who draws tokens says with `commit` how
many rows hold, and every state of the sequence is then as if the others had never run. Counters of committed rows
and of all rows are kept apart. Knows token ids and logits, no text, and nothing of where drafts come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from warmset.config import MAX_WINDOW_ROWS
from warmset.errors import RowError, WarmsetError
from warmset.experts import ExpertRunner, ReadCounts
from warmset.model import give_states_of_each_row, quiet_forward
from warmset.residency import Residency
from warmset.router import Routing
from warmset.routing import COUNTER_NAMES, as_dict
from warmset.stages import StageClock

PROMPT_CHUNK_ROWS = 2048


@dataclass
class Sequence:
    """One sequence: its settled tokens, its states in the trunk, and what its draft source keeps for it."""

    state: Any
    ids: list[int] = field(default_factory=list)
    drafting: Any = None
    hidden_H: torch.Tensor | None = None
    """The trunk's last hidden state at the last settled row, where a draft source asks for hidden states."""
    broken: bool = False
    """Whether a window ended with an error that left its states in between; it must not be continued."""

    @property
    def length(self) -> int:
        return len(self.ids)


def _no_counts() -> torch.Tensor:
    return torch.zeros(len(COUNTER_NAMES), dtype=torch.int64)


@dataclass
class WindowCounts:
    """Totals over decode windows since the last reset; all but `verified_*` are of committed rows."""

    windows: int = 0
    rows: int = 0
    verified_rows: int = 0
    picks: int = 0
    routing_5: torch.Tensor = field(default_factory=_no_counts)
    verified_routing_5: torch.Tensor = field(default_factory=_no_counts)

    def routing(self) -> dict[str, int]:
        """The policy's counters by name, over committed rows and all layers."""
        return as_dict(self.routing_5)

    def verified_routing(self) -> dict[str, int]:
        """The same over every row that a window ran, those that were taken back too: work done."""
        return as_dict(self.verified_routing_5)


class WindowRunner:
    """Reads prompts and runs windows over one model; the rows of a window are of one sequence."""

    def __init__(self, trunk: Any, runner: ExpertRunner, routing: Routing, clock: StageClock) -> None:
        from warmset.states import why_not_several_rows

        self.counts = WindowCounts()
        self.one_row_because = give_states_of_each_row(trunk) or why_not_several_rows(trunk.config)
        """Why windows of this model have one row only, as the end of a sentence; None where they may have more."""
        self.on_rows: Callable[[Sequence, torch.Tensor], None] | None = None
        """Called with the trunk's last hidden states [n, H] of rows once they are settled, in order."""
        self.residency: Residency | None = None
        """Told of the picks of committed rows, between windows."""
        self._trunk = trunk
        self._runner = runner
        self._routing = routing
        self._clock = clock
        self._open: list[int] = []
        self._cold_before = 0
        self._hidden_TH: torch.Tensor | None = None
        trunk.get_decoder().register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        if self.on_rows is not None:
            self._hidden_TH = output.last_hidden_state[0]

    @property
    def trunk(self) -> Any:
        """transformers' model with Warmset's routers and experts in it."""
        return self._trunk

    @property
    def routing(self) -> Routing:
        """What the routers share; `routing.made` is one Routed a layer of the last window."""
        return self._routing

    def start(self) -> Sequence:
        """An empty sequence."""
        from warmset.states import SequenceState

        return Sequence(state=SequenceState.new(self._trunk.config))

    # -- prompts ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read_prompt(self, sequence: Sequence, ids: list[int]) -> torch.Tensor:
        """Logits [V] after the last of `ids`; always the router's own pick. Nothing is counted."""
        counted, self._runner.counts = self._runner.counts, ReadCounts()
        self._routing.acts = False
        try:
            for start in range(0, len(ids), PROMPT_CHUNK_ROWS):
                chunk = ids[start : start + PROMPT_CHUNK_ROWS]
                sequence.state.open(len(chunk))
                logits_1V = self._forward(sequence, chunk, num_logits=1)
                self._settle(sequence, chunk, len(chunk))
        except BaseException:
            sequence.broken = True
            raise
        finally:
            self._runner.counts = counted
        return logits_1V[-1]

    # -- windows ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        """Run a window of T rows with the policy acting: logits [T, V] after each row; `commit` must follow.

        A drafted row that cannot be routed is left out with those after it, so fewer than T rows may come back: what
        was never drafted must not end an answer. Call inside `clock.window()`.
        """
        assert not self._open, "the last window was not committed"
        most = MAX_WINDOW_ROWS if self.one_row_because is None else 1
        if not 1 <= len(tokens) <= most:
            why = "" if self.one_row_because is None else f": {self.one_row_because}"
            raise WarmsetError(f"A window has 1 to {most} rows{why}. Got {len(tokens)}.")
        while True:
            try:
                return self._run_window(sequence, tokens)
            except RowError as error:
                if error.row == 0:
                    raise
                tokens = tokens[: error.row]

    def _run_window(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        start = sequence.length
        self._routing.begin(list(range(start, start + len(tokens))))
        sequence.state.open_window(len(tokens))
        try:
            logits_TV = self._forward(sequence, tokens, num_logits=len(tokens))
        except BaseException:
            if len(tokens) > 1:
                sequence.state.settle(0)
            else:
                sequence.broken = True
            raise
        self._open = tokens
        return logits_TV

    @torch.inference_mode()
    def commit(self, sequence: Sequence, num_rows: int) -> None:
        """Keep the first `num_rows` rows of the window, at least one; the others leave no trace."""
        tokens, self._open = self._open, []
        assert 1 <= num_rows <= len(tokens)
        with self._clock.stage("commit"):
            self._settle(sequence, tokens, num_rows)
            self._routing.commit(num_rows)
            self._count(num_rows, len(tokens))
            if self.residency is not None:
                self.residency.after_window([routed.own_ids_TK for routed in self._routing.made], num_rows)

    def abandon(self, sequence: Sequence) -> None:
        """An error came between a window and its commit: none of its rows has run, or the sequence is broken."""
        tokens, self._open = self._open, []
        if len(tokens) > 1:
            sequence.state.settle(0)
        elif tokens:
            sequence.broken = True

    def step(self, sequence: Sequence, token: int) -> torch.Tensor:
        """One window of one row: logits [V] after `token`, committed."""
        logits_1V = self.verify(sequence, [token])
        self.commit(sequence, 1)
        return logits_1V[0]

    def score(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        """One window of given rows, all kept: logits [T, V] after each; RowError when a row cannot be routed."""
        logits_TV = self.verify(sequence, tokens)
        num_rows = len(logits_TV)
        self.commit(sequence, num_rows)
        if num_rows < len(tokens):
            raise RowError(f"Row {num_rows} of a window cannot be routed.", num_rows)
        return logits_TV

    def _forward(self, sequence: Sequence, ids: list[int], num_logits: int) -> torch.Tensor:
        device = self._runner.slots.device
        with quiet_forward():
            output = self._trunk(
                input_ids=torch.tensor([ids], device=device),
                cache=sequence.state.cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        return output.logits[0]

    def _settle(self, sequence: Sequence, tokens: list[int], num_rows: int) -> None:
        sequence.state.settle(num_rows)
        sequence.ids += tokens[:num_rows]
        hidden_TH, self._hidden_TH = self._hidden_TH, None
        if self.on_rows is not None:
            assert hidden_TH is not None
            sequence.hidden_H = hidden_TH[num_rows - 1].clone()
            self.on_rows(sequence, hidden_TH[:num_rows])

    def _count(self, num_rows: int, num_verified: int) -> None:
        made, counts = self._routing.made, self.counts
        picks = torch.stack([(routed.ids_TK[:num_rows] >= 0).sum() for routed in made]).sum()
        kept_5 = torch.stack([routed.counters_T5[:num_rows].sum(dim=0) for routed in made]).sum(dim=0)
        all_5 = torch.stack([routed.counters_T5.sum(dim=0) for routed in made]).sum(dim=0)
        # host sync: one a window, not one a layer
        figures = torch.cat([kept_5, all_5, picks.reshape(1)]).cpu()
        width = len(COUNTER_NAMES)
        counts.windows += 1
        counts.rows += num_rows
        counts.verified_rows += num_verified
        counts.routing_5 += figures[:width]
        counts.verified_routing_5 += figures[width:-1]
        counts.picks += int(figures[-1])

    def take_cold(self) -> int:
        """Distinct cold experts that windows read since this was asked last; on a GPU it waits for the device."""
        total = self._runner.counts.cold_experts
        before, self._cold_before = self._cold_before, total
        return total - before

    @contextmanager
    def keeping_logits(self) -> Iterator[list[torch.Tensor]]:
        """Router logits [T, E] of each MoE layer of the windows inside, in the order they ran; for traces."""
        kept: list[torch.Tensor] = []
        self._routing.kept_logits = kept
        try:
            yield kept
        finally:
            self._routing.kept_logits = None

    def reset_counts(self) -> None:
        self.counts = WindowCounts()
        self._runner.counts = ReadCounts()
        self._cold_before = 0
        self._clock.reset()

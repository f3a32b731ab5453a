"""One decode window: feed rows, run one forward, count what the policy did.

A row is (sequence, position, token). In this form a window has one row and nothing is drafted; the state of a
sequence (KV, recurrent, convolution and n-gram states) lives in transformers' own cache. Knows token ids and
logits, no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from warmset.experts import ExpertRunner, ReadCounts
from warmset.model import quiet_transformers
from warmset.router import Routing
from warmset.routing import COUNTER_NAMES, as_dict
from warmset.stages import StageClock

PROMPT_CHUNK_ROWS = 2048


@dataclass
class Sequence:
    """One sequence: the cache with its states, and how many tokens it has seen."""

    cache: Any
    length: int = 0


@dataclass
class WindowCounts:
    """Totals over decode windows since the last reset."""

    windows: int = 0
    rows: int = 0
    picks: int = 0
    routing_5: torch.Tensor = field(
        default_factory=lambda: torch.zeros(len(COUNTER_NAMES), dtype=torch.int64)
    )

    def routing(self) -> dict[str, int]:
        """The policy's counters by name, over all rows and layers."""
        return as_dict(self.routing_5)


class WindowRunner:
    """Reads prompts and runs windows over one model; one sequence at a time in this form."""

    def __init__(self, trunk: Any, runner: ExpertRunner, routing: Routing, clock: StageClock) -> None:
        self.counts = WindowCounts()
        self._trunk = trunk
        self._runner = runner
        self._routing = routing
        self._clock = clock

    def start(self) -> Sequence:
        from transformers import DynamicCache

        return Sequence(cache=DynamicCache(config=self._trunk.config))

    @torch.inference_mode()
    def read_prompt(self, sequence: Sequence, ids: list[int]) -> torch.Tensor:
        """Logits [V] after the last of `ids`; always the router's own pick. Nothing is counted."""
        counted, self._runner.counts = self._runner.counts, ReadCounts()
        self._routing.acts = False
        try:
            for start in range(0, len(ids), PROMPT_CHUNK_ROWS):
                logits_V = self._forward(sequence, ids[start : start + PROMPT_CHUNK_ROWS])
        finally:
            self._runner.counts = counted
        return logits_V

    @torch.inference_mode()
    def step(self, sequence: Sequence, token: int) -> torch.Tensor:
        """One window of one row: logits [V] after `token`, with the policy acting. Call inside `clock.window()`."""
        self._routing.begin([sequence.length])
        logits_V = self._forward(sequence, [token])
        with self._clock.stage("commit"):
            self._commit(num_rows=1)
        return logits_V

    def _forward(self, sequence: Sequence, ids: list[int]) -> torch.Tensor:
        device = self._runner.slots.device
        with quiet_transformers():  # it warns at the first use of each of its slow fallbacks
            output = self._trunk(
                input_ids=torch.tensor([ids], device=device),
                cache=sequence.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        sequence.length += len(ids)
        return output.logits[0, -1]

    @contextmanager
    def keeping_logits(self) -> Iterator[list[torch.Tensor]]:
        """Router logits [T, E] of each MoE layer of the windows inside, in the order they ran; for traces."""
        kept: list[torch.Tensor] = []
        self._routing.kept_logits = kept
        try:
            yield kept
        finally:
            self._routing.kept_logits = None

    def _commit(self, num_rows: int) -> None:
        self._routing.commit(num_rows)
        self.counts.windows += 1
        self.counts.rows += num_rows
        made = self._routing.made
        picks = torch.stack([(routed.ids_TK[:num_rows] >= 0).sum() for routed in made]).sum()
        counters_5 = torch.stack([routed.counters_T5[:num_rows].sum(dim=0) for routed in made]).sum(dim=0)
        figures = torch.cat([counters_5, picks.reshape(1)]).cpu()  # host sync: one a window, not one a layer
        self.counts.routing_5 += figures[:-1]
        self.counts.picks += int(figures[-1])

    def reset_counts(self) -> None:
        self.counts = WindowCounts()
        self._runner.counts = ReadCounts()
        self._clock.reset()

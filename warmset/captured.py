"""Leads the windows of one answer that the device runs by itself (`graph.runs`), beside `window` for those of the host.

    start -> run -> run -> ... -> end

The host launches, reads tokens out, and does between windows what it always does there: the router's own picks go to
`residency`, which moves experts. Where nothing of that is wanted, several windows are launched at once. Counters,
states and token ids end as if the host had led the windows. Knows token ids, no text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from warmset.config import SamplingConfig
from warmset.experts import ExpertRunner
from warmset.graph.runs import MAX_NEW_TOKENS, MAX_STOPS, WindowRuns
from warmset.graph.stamps import StampClock
from warmset.mtp import MtpDraft
from warmset.stages import StageClock
from warmset.window import Sequence, WindowRunner

MANY = 8
"""Windows that are launched at once where the host has nothing to do between them."""


class CapturedWindows:
    """The captured windows of one engine. `source`: where drafts come from; `mtp`: the layer, if from there."""

    def __init__(
        self,
        windows: WindowRunner,
        runner: ExpertRunner,
        clock: StageClock,
        *,
        source: Literal["none", "lookup", "mtp"],
        max_model_len: int,
        mtp: MtpDraft | None = None,
    ) -> None:
        self._windows = windows
        self._runner = runner
        self._clock = clock
        self._max_model_len = max_model_len
        self._runs = WindowRuns(windows.trunk, runner, windows.routing, clock, source=source, mtp=mtp)
        self._gpu = runner.slots.device.type == "cuda"
        self._runs.counts_reads = self._gpu
        self._sequence: Sequence | None = None
        self._written: list[int] = []
        self._left = 0
        self._one_by_one = True
        self._verified = self._cold_before = 0
        self._failed = False

    @property
    def captures(self) -> int:
        """Graphs captured since the engine was opened."""
        return self._runs.captures

    def why_not(
        self, sequence: Sequence, sampling: SamplingConfig, most_tokens: int, stop_ids: frozenset[int]
    ) -> str | None:
        """Why the host must lead the windows of this answer, as the end of a sentence, or None."""
        if len(stop_ids) > MAX_STOPS:
            return f"there are more than {MAX_STOPS} stop tokens"
        if most_tokens > MAX_NEW_TOKENS:
            return f"the answer may have more than {MAX_NEW_TOKENS:,} tokens"
        return self._runs.why_not(sequence.state, sampling, sequence)

    def forget(self) -> None:
        """Let go of the graphs, for example because the policy is another."""
        self._runs.forget()

    def start(
        self,
        sequence: Sequence,
        token: int,
        sampling: SamplingConfig,
        most_tokens: int,
        stop_ids: frozenset[int],
        *,
        watched: bool,
    ) -> None:
        """Take over the sequence; `token` was drawn after it and runs first, `most_tokens` may follow.

        watched: somebody looks at each token and may end the answer, so that no window may run ahead.
        """
        residency = self._windows.residency
        self._runs.keeps_picks = residency is not None and residency.watches
        self._one_by_one = watched or self._runs.keeps_picks or not self._runs.captures_windows
        self._runs.begin(
            sequence.state, sequence.ids, token,
            sampling=sampling, most_tokens=most_tokens, stop_ids=stop_ids, max_length=self._max_model_len,
            sequence=sequence,
        )  # fmt: skip
        self._sequence, self._written, self._left = sequence, [token], most_tokens
        self._verified, self._cold_before, self._failed = 0, 0, False

    def prepare(self, rows: int) -> None:
        """Capture windows of `rows` rows where that was not done yet."""
        self._runs.prepare(rows)

    def run(self, rows: int, ends: Callable[[int], bool]) -> tuple[list[int], int]:
        """One window of up to `rows` rows, or several of one: the tokens drawn, and the drafts verified.

        ends: told of each token as it is read; True ends the answer with it, and what came after it did not run.
        """
        many = 1 if self._one_by_one or rows > 1 else min(MANY, self._left)
        drawn: list[int] = []
        try:
            self._runs.run(many, rows)
            tokens, _ = self._runs.take()
            for token in tokens:
                drawn.append(token)
                if ends(token):
                    break
            self._written += drawn
        except BaseException:  # states and ids would not go together
            self._failed = True
            raise
        if self._clock.enabled and isinstance(self._clock, StampClock):
            self._clock.collect(self._runs.marks(rows))
        drafts = 0
        if rows > 1:
            before, self._verified = self._verified, self._runs.counts().verified_rows
            drafts = self._verified - before - 1
        else:
            self._verified += len(tokens)
        if len(drawn) < len(tokens):
            self._cut(len(drawn), len(tokens))
        self._left -= len(drawn)
        picks_LTK = self._runs.last_rows().own_LTK
        if self._windows.residency is not None and picks_LTK is not None:
            self._windows.residency.after_window(list(picks_LTK.unbind(0)), len(drawn))
        return drawn, drafts

    def take_cold(self) -> int:
        """Distinct cold experts that windows read since this was asked last."""
        if not self._gpu:
            return self._windows.take_cold()
        total = self._runs.counts().cold_experts
        before, self._cold_before = self._cold_before, total
        return total - before

    def _cut(self, kept: int, ran: int) -> None:
        """The answer ended inside the last window: its rows from `kept` on leave no trace."""
        assert self._one_by_one, "windows ran ahead of somebody who may end the answer"
        rows = self._runs.last_rows()
        self._runs.take_back(ran - kept)
        counts = self._windows.counts
        counts.rows -= ran - kept
        counts.picks -= int(rows.picked_T[kept:ran].sum())
        counts.routing_5 -= rows.counters_T5[kept:ran].sum(dim=0).cpu()

    def end(self) -> None:
        """Give the sequence back with every row that was kept, and count; after a failed window it is broken."""
        sequence, self._sequence = self._sequence, None
        if sequence is None:
            return
        if self._failed:
            sequence.broken = True
            return
        kept = self._runs.end(sequence.state, sequence)
        sequence.ids += self._written[:kept]
        ran, counts = self._runs.counts(), self._windows.counts
        counts.windows += ran.windows
        counts.rows += ran.rows
        counts.verified_rows += ran.verified_rows
        counts.picks += ran.picks
        counts.routing_5 += ran.routing_5
        counts.verified_routing_5 += ran.verified_routing_5
        if self._gpu:
            layers = (
                self._runner.store.num_layers if self._runs.captures_windows else 0
            )  # else the runner counted
            self._runner.count_captured(ran.windows * layers, ran.distinct_experts, ran.cold_experts)

"""Runs of decode windows that need the host only to read tokens out: one captured graph for each number of rows.

    tokens, drafts -> trunk -> draw -> judge -> commit -> tokens

Everything that changes from window to window lies in device memory and is written in place: tokens, positions, states,
what was drawn, how much is left, and whether the answer has ended; a window after the end keeps nothing. On a GPU the
body runs once to compile, once to be captured, and from then on as one launch; on a CPU, and where the host has to
bring cold experts to the GPU, the same body runs as Python.
A graph belongs to a number of rows, a kind of draw, and what is baked into it (policy, whether anything is cold,
memory of the states); slots and tables change in place and need no new capture. Knows token ids, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from warmset.config import MAX_WINDOW_ROWS, SamplingConfig
from warmset.draft import Sequence
from warmset.errors import RowError, WarmsetError
from warmset.experts import ExpertRunner
from warmset.graph import draws
from warmset.graph.ahead import StaticAhead
from warmset.graph.cache import StaticCache, pages_for, why_not_static
from warmset.graph.forms import StaticForms
from warmset.graph.lookup import look_up
from warmset.graph.stamps import Mark, StampClock
from warmset.model import quiet_transformers
from warmset.mtp import MtpDraft
from warmset.router import Routing
from warmset.routing import COUNTER_NAMES
from warmset.stages import StageClock
from warmset.states import SequenceState

Source = Literal["none", "lookup", "mtp", "fixed"]
"""Where a window's drafts come from; `fixed`: the tokens that lie there, for measurements."""

MAX_STOPS = 16
MAX_NEW_TOKENS = 1 << 16


@dataclass
class RunCounts:
    """Totals since `begin`, as `window.WindowCounts` has them."""

    windows: int
    rows: int
    verified_rows: int
    picks: int
    routing_5: torch.Tensor
    verified_routing_5: torch.Tensor
    distinct_experts: int = 0
    """Read by these windows, and the cold ones among them; 0 where the runner counts them itself."""
    cold_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """What the last window did, row by row; every row of it, kept or not.

    counters_T5 and picked_T (picks that are no padding) are sums over the layers; own_LTK the router's own picks, where
    `keeps_picks` asked for them.
    """

    counters_T5: torch.Tensor
    picked_T: torch.Tensor
    own_LTK: torch.Tensor | None


@dataclass
class _Captured:
    """`kept`: what the graph reads by address, and what its key names by identity."""

    graph: Any
    marks: tuple[Mark, ...]
    rows: WindowRows
    kept: Any = field(default=None, repr=False)


class WindowRuns:
    """The runs of one trunk. `begin` takes over a sequence that has read its prompt, `end` gives it back."""

    def __init__(
        self,
        trunk: Any,
        runner: ExpertRunner,
        routing: Routing,
        clock: StageClock,
        *,
        source: Source = "none",
        mtp: MtpDraft | None = None,
    ) -> None:
        """mtp: the MTP layer, for drafts from there."""
        assert (source == "mtp") == (mtp is not None)
        self._ahead = None if mtp is None else StaticAhead(mtp)
        self.forms = StaticForms.of(trunk)
        self.clock = clock
        self.captures = 0
        self.cache: StaticCache | None = None
        self.on_logits: Callable[[torch.Tensor], None] | None = None
        """Called with the logits [T, V] of each window that runs as Python; for tests."""
        self.keeps_picks = False
        """Whether `last_rows` has the router's own picks."""
        self.counts_reads = False
        """Whether `counts` has the experts that windows before the answer's end read; the runner then has none."""
        self._runner = runner
        self._routing = routing
        self._source = source
        self._device = device = routing.slot_LE.device
        self._draws = draws.Draws(device)
        self._kind: draws.Kind = "greedy"
        self._graphs: dict[tuple, _Captured] = {}
        self._pool: Any = None
        make: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.token_X = torch.zeros(MAX_WINDOW_ROWS, **make)
        self._num_drafts = torch.zeros((), **make)
        self._left = torch.zeros((), **make)
        self._stop_N = torch.full((MAX_STOPS,), -1, **make)
        self._done = torch.zeros((), dtype=torch.bool, device=device)
        self._failed = torch.zeros(2, **make)
        self._out_N = torch.zeros(MAX_NEW_TOKENS + MAX_WINDOW_ROWS, **make)
        self._out_at = torch.zeros((), **make)
        self._history_S = torch.zeros(0, **make)
        self._figures = torch.zeros(6 + 2 * len(COUNTER_NAMES), **make)
        self._read = 0
        self._rows: WindowRows | None = None
        self._no_reads = torch.zeros(2, **make)

    @property
    def captures_windows(self) -> bool:
        """Whether windows are graphs. On a CPU, and where the host must bring cold experts to the GPU, the same code
        runs as Python, so that the bits are the same in every tier."""
        if self._device.type != "cuda":
            return False
        kernels = self._runner.device_experts
        return kernels is None or kernels.table.all_readable or self._runner.slots.all_resident

    # -- a sequence -------------------------------------------------------------------------------------------

    def why_not(
        self, state: SequenceState, sampling: SamplingConfig, sequence: Sequence | None = None
    ) -> str | None:
        """Why a run cannot go on from this sequence, as the end of a sentence, or None."""
        gpu = self._device.type == "cuda"
        kernels = self._runner.device_experts
        reasons = (
            self.forms.why_not,
            why_not_static(state),
            draws.why_not(sampling),
            "the policy learns between windows" if self._routing.means is not None else None,
            "the policy runs in plain torch" if gpu and self._routing.runs_in_torch else None,
            "experts run in plain torch" if gpu and kernels is None else None,
            "routing is being recorded" if self._routing.kept_logits is not None else None,
            self._ahead.why_not(sequence) if self._ahead is not None and sequence is not None else None,
        )
        return next((reason for reason in reasons if reason is not None), None)

    @torch.inference_mode()
    def begin(
        self,
        state: SequenceState,
        ids: list[int],
        token: int,
        *,
        sampling: SamplingConfig,
        most_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        max_length: int = 0,
        sequence: Sequence | None = None,
    ) -> None:
        """Take over the sequence of `ids`, whose states are `state`; `token` was drawn after it and runs first.

        most_tokens: how many further tokens may be drawn. max_length: of any sequence to come, where it is known.
        sequence: what the MTP layer keeps of it, where drafts come from there.
        """
        assert len(ids) == state.length and 0 < most_tokens <= MAX_NEW_TOKENS and len(stop_ids) <= MAX_STOPS
        places = pages_for(state.length + most_tokens)
        if self.cache is None or self.cache.places < places:
            most = max(places, min(2 * places, pages_for(max_length)))  # room to grow: graphs stay longer
            self.cache = None  # its memory may be needed for the new one
            self.forget()
            self.cache = StaticCache(state, most, self._device)
        else:
            self.cache.load(state)
        self.forms.prepare(self.cache)
        if len(self._history_S) != self.cache.places:
            self._history_S = torch.zeros(self.cache.places, dtype=torch.int64, device=self._device)
            self.forget()
        self._history_S[: len(ids) + 1] = torch.tensor([*ids, token], device=self._device)
        self._kind = self._draws.use(sampling)
        self.token_X.fill_(token)
        self._stop_N.fill_(-1)
        if stop_ids:
            self._stop_N[: len(stop_ids)] = torch.tensor(sorted(stop_ids), device=self._device)
        self._left.fill_(most_tokens)
        for tensor in (self._done, self._failed, self._out_at, self._figures, self._num_drafts):
            tensor.zero_()
        self._read = 0
        if self._ahead is not None:
            assert sequence is not None
            if self._ahead.begin(sequence, token, self.cache.places):
                self.forget()
        self._look_up()

    @torch.inference_mode()
    def run(self, num_windows: int, rows: int) -> None:
        """Run windows of `rows` rows, without waiting for them; after the answer's end they keep nothing."""
        assert self.cache is not None and 1 <= rows <= MAX_WINDOW_ROWS
        if not self.captures_windows:
            with self._static_forms():
                for _ in range(num_windows):
                    self._body(rows)
            return
        captured = self._captured(rows)
        self._rows = captured.rows
        for _ in range(num_windows):
            captured.graph.replay()

    @torch.inference_mode()
    def take(self) -> tuple[list[int], bool]:
        """Tokens drawn since the last call, and whether the answer has ended. Waits for the device.

        Raises RowError when a row could not be routed, WarmsetError when the model's output is not a number.
        """
        # host sync: the one thing that the host is needed for
        figures = torch.stack([self._out_at, self._done.long(), *self._failed]).tolist()
        written, done, failed, where = figures
        if failed == 1:
            layer, row = divmod(where, MAX_WINDOW_ROWS)
            raise RowError(f"Layer {layer}, row {row}: too few experts have a score above -inf.", row)
        if failed == 2:
            raise WarmsetError("The model's output is not a number: no token can be drawn.")
        tokens = self._out_N[self._read : written].tolist()
        self._read = written
        return tokens, bool(done)

    def last_rows(self) -> WindowRows:
        """What the last window did; overwritten by the next."""
        assert self._rows is not None
        return self._rows

    @torch.inference_mode()
    def take_back(self, num_rows: int) -> None:
        """The last `num_rows` kept rows of the last window shall not have run. Only before `end`: the run is over."""
        assert self.cache is not None
        begin_2 = self.cache.place.begin_2
        begin_2[1:].sub_(num_rows)
        if self._ahead is not None:
            self._ahead.take_back(begin_2)
        self._done.fill_(True)

    @torch.inference_mode()
    def end(self, state: SequenceState, sequence: Sequence | None = None) -> int:
        """Give the sequence back: `state` is as if it had run the kept rows itself. Returns how many there were."""
        assert self.cache is not None
        before = state.length
        self.cache.store(state)
        if self._ahead is not None:
            assert sequence is not None
            self._ahead.end(sequence, state.length)
        return state.length - before

    def counts(self) -> RunCounts:
        """Figures since `begin`; waits for the device."""
        figures = self._figures.cpu()
        width = len(COUNTER_NAMES)
        windows, rows, verified, picks, distinct, cold = figures[:6].tolist()
        routing_5, verified_5 = figures[6:].split(width)
        return RunCounts(windows, rows, verified, picks, routing_5, verified_5, distinct, cold)

    def marks(self, rows: int) -> tuple[Mark, ...]:
        """The stage marks of a window of `rows` rows, for `StampClock.read`."""
        if not self.captures_windows:
            return getattr(self.clock, "marks", ())
        return self._captured(rows).marks

    # -- capture ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let go of every graph; each is captured again when it is needed."""
        self._graphs.clear()
        self._pool = None

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Capture now what a run of such windows needs, if it is not there yet."""
        if self.captures_windows:
            self._captured(rows)

    def _key(self, rows: int) -> tuple:
        routing, slots = self._routing, self._runner.slots
        return (
            rows,
            self._kind,
            slots.all_resident,
            id(routing.policy),
            id(routing.table),
            self._source,
            self.clock.enabled,
            self.keeps_picks,
            self.counts_reads,
        )

    def _captured(self, rows: int) -> _Captured:
        key = self._key(rows)
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows)
        return self._graphs[key]

    def _capture(self, rows: int) -> _Captured:
        """Run the body once with nothing to keep, so that it compiles and makes its buffers; then capture it."""
        assert self.cache is not None
        counts = replace(self._runner.counts)  # the object itself counts what runs as Python here
        done, figures = self._done.clone(), self._figures.clone()
        self._done.fill_(True)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with self._static_forms():
            with torch.cuda.stream(side):
                self._body(rows)
            torch.cuda.current_stream(self._device).wait_stream(side)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # thread_local: copies that other threads have started may go on
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                kept = self._body(rows)
        self._pool = self._pool or graph.pool()
        if isinstance(self.clock, StampClock):
            self.clock.drop()
        self._done.copy_(done)
        self._figures.copy_(figures)
        assert self._runner.device_experts is not None
        self._runner.device_experts.take_counts()
        self._runner.counts = counts
        self.captures += 1
        kept = (kept, self._routing.policy, self._routing.table)
        return _Captured(graph, getattr(self.clock, "marks", ()), self.last_rows(), kept)

    # -- one window -------------------------------------------------------------------------------------------

    @contextmanager
    def _static_forms(self) -> Iterator[None]:
        assert self.cache is not None
        ahead = nullcontext() if self._ahead is None else self._ahead.using()
        with self.forms.using(self.cache), ahead, quiet_transformers():
            yield

    def _body(self, rows: int) -> Any:
        """One window; no host sync and no number that the host knows, so that it can be captured."""
        assert self.cache is not None
        place, routing, clock = self.cache.place, self._routing, self.clock
        row_T = torch.arange(rows, device=self._device)
        with clock.captured() if isinstance(clock, StampClock) else clock.window():
            token_T, position_T = self.token_X[:rows], place.open(rows)
            if self._ahead is not None and rows > 1:
                with clock.stage("draft"):
                    self._draft_ahead(position_T[:1], rows - 1)
            num_drafts = self._num_drafts.clamp(max=rows - 1)
            real_T = row_T <= num_drafts if self._source in ("lookup", "mtp") and rows > 1 else None
            routing.begin_static(position_T, real_T)
            logits_TV = self.forms.forward(token_T, position_T)
            with clock.stage("sample"):
                drawn_T = self._draws.draw(self._kind, logits_TV, position_T + 1)
            with clock.stage("commit"):
                count = self._commit(token_T, drawn_T, logits_TV, row_T, position_T, num_drafts)
            with clock.stage("draft"):
                self._look_up()
                if self._ahead is not None:
                    assert self.forms.hidden_TH is not None
                    self._ahead.read(self.forms.hidden_TH, drawn_T, position_T[:1], count)
        routing.end_static()
        if self.on_logits is not None:
            self.on_logits(logits_TV)
        return logits_TV, drawn_T

    def _commit(
        self,
        token_T: torch.Tensor,
        drawn_T: torch.Tensor,
        logits_TV: torch.Tensor,
        row_T: torch.Tensor,
        position_T: torch.Tensor,
        num_drafts: torch.Tensor,
    ) -> torch.Tensor:
        """Keep as many rows as hold: those up to the first wrong draft, the first error, the end of the answer.

        Returns how many those are.
        """
        assert self.cache is not None
        rows, made = len(row_T), self._routing.made
        bad_LT = torch.stack([routed.error_T for routed in made]) != 0
        bad_T = bad_LT.any(dim=0)
        nan_T = logits_TV.isnan().any(dim=-1)
        first_bad = _first(bad_T | nan_T, row_T, rows)
        right = (drawn_T[:-1] == token_T[1:]) & (row_T[1:] <= num_drafts)
        count = 1 + right.long().cumprod(0).sum()
        end = _first((drawn_T[:, None] == self._stop_N).any(dim=1), row_T, rows) + 1
        count = torch.minimum(torch.minimum(count, first_bad), torch.minimum(end, self._left))
        running = (~self._done).long()
        count = count * running

        failed = (first_bad == 0) & ~self._done
        layer = bad_LT[:, 0].long().argmax()
        self._failed.add_(
            torch.stack([failed * torch.where(bad_T[0], 1, 2), failed * layer * MAX_WINDOW_ROWS])
        )

        self._out_N.index_copy_(0, self._out_at + row_T, drawn_T)
        after_T = (position_T + 1).clamp(max=len(self._history_S) - 1)
        self._history_S.index_copy_(0, after_T, drawn_T)
        last_1 = drawn_T.index_select(
            0, (count - 1).clamp(min=0).view(1)
        )  # an index of no dimension would sync
        self.token_X[:1].copy_(torch.where(count > 0, last_1, token_T[:1]))
        self._count(made, row_T, count, num_drafts, running)
        place = self.cache.place
        start = place.begin_2[1]
        place.begin_2.copy_(torch.stack([start, start + count]))
        self._out_at.add_(count)
        self._left.sub_(count)
        self._done.logical_or_(failed | (self._left <= 0) | ((end <= count) & (count > 0)))
        return count

    def _count(
        self,
        made: list,
        row_T: torch.Tensor,
        count: torch.Tensor,
        num_drafts: torch.Tensor,
        running: torch.Tensor,
    ) -> None:
        counters_LT5 = torch.stack([routed.counters_T5 for routed in made])
        counters_T5 = counters_LT5.sum(dim=0)
        picked_T = torch.stack([routed.ids_TK for routed in made]).ge(0).sum(dim=(0, 2))
        kept_T = (row_T < count).long()
        verified_T = (row_T <= num_drafts).long() * running
        own_LTK = torch.stack([routed.own_ids_TK for routed in made]) if self.keeps_picks else None
        self._rows = WindowRows(counters_T5=counters_T5, picked_T=picked_T, own_LTK=own_LTK)
        reads_2 = self._no_reads
        if self.counts_reads and self._runner.device_experts is not None:
            reads_2 = self._runner.device_experts.move_counts(*made[0].ids_TK.shape) * running
        figures = [
            torch.stack([running, count, verified_T.sum(), (picked_T * kept_T).sum()]),
            reads_2,
            (counters_T5 * kept_T[:, None]).sum(dim=0),
            (counters_T5 * verified_T[:, None]).sum(dim=0),
        ]
        self._figures.add_(torch.cat(figures))

    def _draft_ahead(self, start_1: torch.Tensor, count: int) -> None:
        """The MTP layer's drafts for the window at `start_1` into `token_X`."""
        assert self._ahead is not None
        drafts_N = self._ahead.propose(count, start_1, partial(self._draws.draw, self._kind))
        self.token_X[1 : 1 + count].copy_(drafts_N)
        self._num_drafts.copy_((self._left - 1).clamp(min=0, max=count))

    def _look_up(self) -> None:
        """The drafts of the next window into `token_X[1:]`, where the text so far gives them."""
        assert self.cache is not None
        if self._source == "fixed":
            self._num_drafts.fill_(MAX_WINDOW_ROWS - 1)
        if self._source != "lookup":
            return
        count = MAX_WINDOW_ROWS - 1
        drafts, found = look_up(self._history_S, self.cache.place.begin_2[1], count)
        self.token_X[1:].copy_(drafts)
        self._num_drafts.copy_(torch.where(found, (self._left - 1).clamp(min=0, max=count), 0))


def _first(hit_T: torch.Tensor, row_T: torch.Tensor, rows: int) -> torch.Tensor:
    """The first row that is hit, or `rows`."""
    return torch.where(hit_T, row_T, rows).amin()

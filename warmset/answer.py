"""One answer: the tokens that windows give, one after the other, until something ends it.

    propose drafts -> verify a window -> draw and judge -> commit the rows that hold

The end of the answer is looked for at each token as it is drawn, so nothing after it is delivered, counted, or kept in
the sequence. Knows token ids, no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from warmset.captured import CapturedWindows
from warmset.config import MAX_WINDOW_ROWS
from warmset.depth import Depth
from warmset.draft import Draft
from warmset.errors import WarmsetError
from warmset.sample import Sampler, TokenLogprobs
from warmset.stages import StageClock
from warmset.window import Sequence, WindowRunner


@dataclass(kw_only=True)
class Run:
    """The figures of one answer, filled while it is made; times in ms. `drafted[d]` and `right[d]` count drafts at
    depth d + 1 that windows verified and kept."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    finish_reason: str | None = None
    led_by_host: str | None = None
    """Why the host leads the windows, as the end of a sentence; None where the device does."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafted: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW_ROWS - 1))
    right: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW_ROWS - 1))

    def drafts(self) -> dict[str, Any]:
        """Drafts verified and accepted, in all and by depth."""
        by_depth = [
            {"depth": depth, "drafted": drafted, "accepted": right}
            for depth, (drafted, right) in enumerate(zip(self.drafted, self.right, strict=True), start=1)
            if drafted
        ]
        accepted, drafted = sum(self.right), sum(self.drafted)
        return {
            "drafted": drafted,
            "accepted": accepted,
            "rejected": drafted - accepted,
            "by_depth": by_depth,
        }


Watch = Callable[[int], bool]
"""Told of each token as it is drawn; True ends the answer with this token."""


class Answer:
    """Draws the tokens of one answer from a sequence that has read the prompt."""

    def __init__(
        self,
        windows: WindowRunner,
        draft: Draft,
        depth: Depth,
        sampler: Sampler,
        clock: StageClock,
        run: Run,
        *,
        stop_ids: frozenset[int],
        max_model_len: int,
        watch: Watch | None,
        captured: CapturedWindows | None = None,
    ) -> None:
        """captured: what leads the windows where the device can; None = the host leads them."""
        self._windows = windows
        self._draft = draft
        self._depth = depth
        self._sampler = sampler
        self._clock = clock
        self._run = run
        self._stop_ids = stop_ids
        self._watch = watch
        self._captured = captured
        self._most_tokens = min(sampler.config.max_new_tokens, max_model_len - run.prompt_tokens)
        run.logprobs = sampler.logprobs

    def first(self, sequence: Sequence, logits_V: torch.Tensor) -> list[int]:
        """The token after the prompt, as a list of one."""
        return self._sampler.accept(logits_V[None], [], sequence.length, self._ends)

    def why_host(self, sequence: Sequence) -> str | None:
        """Why the host leads the windows of this answer, as the end of a sentence; None where the device does."""
        if self._captured is None:
            return "windows are not captured"
        left = self._most_tokens - self._run.new_tokens
        return self._captured.why_not(sequence, self._sampler.config, left, self._stop_ids)

    def tokens(self, sequence: Sequence, drawn: list[int], is_closed: Callable[[], bool]) -> Iterator[int]:
        """Yield `drawn` and what windows give after it; a token that ends the text is not delivered."""
        run = self._run
        captured = self._captured if self.why_host(sequence) is None else None
        if captured is not None and run.finish_reason is None:
            captured.start(
                sequence, drawn[-1], self._sampler.config, self._most_tokens - run.new_tokens, self._stop_ids,
                watched=self._watch is not None or self._depth.most > 1,
            )  # fmt: skip
        try:
            while True:
                yield from (token for token in drawn if token not in self._stop_ids)
                if run.finish_reason is not None:
                    del run.logprobs[run.new_tokens :]
                    return
                if is_closed():
                    raise WarmsetError("This engine was closed while it answered.")
                if captured is not None:
                    drawn = self._captured_window(captured)
                else:
                    drawn = self._led_window(sequence, drawn[-1])
        finally:
            if captured is not None:
                captured.end()

    def _led_window(self, sequence: Sequence, token: int) -> list[int]:
        start = time.perf_counter()
        with self._clock.window():
            drawn, num_drafts = self._window(sequence, token)
        ms = 1e3 * (time.perf_counter() - start)
        self._note(num_drafts, len(drawn) - 1, ms)
        if self._learns_depth:
            cold = self._windows.take_cold()
            self._depth.observe(drafted=num_drafts, accepted=len(drawn) - 1, ms=ms, cold=cold)
        return drawn

    def _captured_window(self, captured: CapturedWindows) -> list[int]:
        """A window of as many rows as it was captured with: where no draft was found, rows are padding."""
        rows = self._depth.next_rows()
        captured.prepare(rows)
        start = time.perf_counter()
        drawn, num_drafts = captured.run(rows, self._ends)
        ms = 1e3 * (time.perf_counter() - start)
        self._note(num_drafts, len(drawn) - 1, ms)
        if self._learns_depth:  # a row of padding costs what a wrong draft does
            cold = captured.take_cold()
            self._depth.observe(drafted=rows - 1, accepted=len(drawn) - 1, ms=ms, cold=cold)
        return drawn

    @property
    def _learns_depth(self) -> bool:
        return self._run.finish_reason is None and self._depth.most > 1

    def _window(self, sequence: Sequence, token: int) -> tuple[list[int], int]:
        """The tokens drawn in one window that begins with `token`, and how many drafts it verified."""
        windows, position = self._windows, sequence.length + 1
        drafts = self._propose(sequence, token)
        if not drafts:
            logits_TV = windows.step(sequence, token)[None]
            with self._clock.stage("sample"):
                return self._sampler.accept(logits_TV, drafts, position, self._ends), 0
        logits_TV = windows.verify(sequence, [token, *drafts])
        try:
            with self._clock.stage("sample"):
                drawn = self._sampler.accept(logits_TV, drafts, position, self._ends)
        except BaseException:
            windows.abandon(sequence)
            raise
        windows.commit(sequence, len(drawn))
        return drawn, len(logits_TV) - 1

    def _propose(self, sequence: Sequence, token: int) -> list[int]:
        count = min(self._depth.next_rows(), self._most_tokens - self._run.new_tokens) - 1
        if count < 1:
            return []
        with self._clock.stage("draft"):
            return self._draft.propose(sequence, token, count, self._sampler.guess)

    def _note(self, num_drafts: int, num_right: int, ms: float) -> None:
        self._run.decode_ms += ms
        for depth in range(num_drafts):
            self._run.drafted[depth] += 1
            self._run.right[depth] += depth < num_right

    def _ends(self, token: int) -> bool:
        run = self._run
        if token in self._stop_ids:
            run.finish_reason = "stop"
            return True
        run.new_tokens += 1
        if self._watch is not None and self._watch(token):
            run.finish_reason = "stop"
        elif run.new_tokens >= self._most_tokens:
            run.finish_reason = "length"
        return run.finish_reason is not None

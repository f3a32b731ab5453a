"""Passes of one measurement in their order: the reference once, then policies and their controls against it.

    reference -> off against off -> each policy -> its rounding null, its random swaps

Every finished pass is kept, so an interrupted measurement goes on where it was. Shape letters: N positions,
L layers, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warmset.errors import WarmsetError
from warmset.measure.price.controls import ReplayedRandomSwap, RoundingNull
from warmset.measure.price.divergence import compare, losses
from warmset.measure.price.documents import ScoredText
from warmset.measure.price.passes import RoutingFacts, Stretch, run_pass
from warmset.measure.price.scorers import Scorer
from warmset.measure.price.work import Work
from warmset.routing import Policy, describe

CHECK_POSITIONS = 1000
NULL_SEEDS = 3
Progress = Callable[[str, int, int], None]


@dataclass
class Pass:
    """One finished pass. kl_N, kl_top_N, loss_N float64 in nats, same_N bool (argmax as off); `seconds` it took."""

    name: str
    kl_N: np.ndarray
    kl_top_N: np.ndarray
    same_N: np.ndarray
    loss_N: np.ndarray
    routing: RoutingFacts
    token_hash: str
    seconds: float


class Measurement:
    """A scorer, a text, and what was found so far. rows: rows of a window."""

    def __init__(
        self,
        scorer: Scorer,
        text: ScoredText,
        work: Work,
        *,
        rows: int,
        seed: int = 0,
        residency: str = "frozen",
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= rows <= scorer.max_rows:
            raise WarmsetError(f"window must be 1 to {scorer.max_rows} rows for this model. Got {rows}.")
        self.scorer, self.text, self.work, self.rows, self.seed = scorer, text, work, rows, seed
        self._progress = progress
        self._residency = residency
        self._reference: Pass | None = None

    # -- passes -----------------------------------------------------------------------------------------------

    def reference(self) -> Pass:
        """The pass with routing off; its logits stay on disk for all others."""
        if self._reference is None:
            self._reference = self._kept("off") or self._run_reference()
        return self._reference

    def check_off(self, positions: int = CHECK_POSITIONS) -> int:
        """Run off a second time over the first positions; how many. WarmsetError where one bit differs."""
        self.reference()
        part = self.text.first_positions(positions, self.rows)

        def take(stretch: Stretch) -> None:
            kept_NV = self.work.logits(stretch.first, stretch.logits_NV.device)[: len(stretch.logits_NV)]
            equal_N = (kept_NV == stretch.logits_NV).all(dim=1)
            if not bool(equal_N.all()):
                place = stretch.first + int((~equal_N).nonzero()[0])
                raise WarmsetError(
                    f"Two passes with routing off differ at position {place}, so nothing can be said of a policy."
                )

        with self._acting(None):
            run_pass(self.scorer, part, self.rows, take, progress=self._reporter("off against off"))
        return part.num_positions

    def policy(self, policy: Policy) -> Pass:
        """The pass in which this policy acts."""
        return self._compared(f"policy {describe(policy)}", policy)

    def nulls(self, of: Pass, dtype: torch.dtype, seeds: int = NULL_SEEDS) -> list[Pass]:
        """The rounding null of a policy's pass, one pass a seed; in float32 every seed gives the same one."""
        changed_NL = of.routing.changed_NL
        seeds = 1 if dtype == torch.float32 else seeds
        return [
            self._null(f"null {seed} of {of.name}", changed_NL, self.seed + seed) for seed in range(seeds)
        ]

    def null_everywhere(self) -> Pass:
        """The rounding null with every row rounded in every layer: at least as large as that of any policy's rows."""
        changed_NL = np.ones_like(self.reference().routing.changed_NL)
        return self._null("null everywhere", changed_NL, self.seed)

    def random_swaps(self, of: Pass) -> Pass:
        """As many swaps in the rows, layers and ranks of a policy's pass, to random residents."""
        policy = ReplayedRandomSwap(of.routing.moved_NLK, self.seed)
        return self._compared(f"random swaps of {of.name}", policy, before_window=policy.at)

    # -- how ----------------------------------------------------------------------------------------------------

    def _null(self, name: str, changed_NL: np.ndarray, seed: int) -> Pass:
        null = RoundingNull(changed_NL, seed)
        found = self._compared(name, None, before_window=null.at, inside=null.installed(self.scorer))
        wanted = int(changed_NL.sum())
        if null.windows and null.rounded_rows != wanted:
            raise WarmsetError(
                f"The rounding null reached {null.rounded_rows:,} of {wanted:,} rows in a layer: the windows of this "
                "engine do not pass through its experts modules, so measure without controls."
            )
        return found

    @contextmanager
    def _acting(self, policy: Policy | None) -> Iterator[None]:
        """A pass with this policy: residency begins as in every other one, and off acts again afterwards."""
        with self.scorer.residency(self._residency):
            self.scorer.use(policy)
            try:
                yield
            finally:
                self.scorer.use(None)

    def _run_reference(self) -> Pass:
        losses_N: list[torch.Tensor] = []

        def take(stretch: Stretch) -> None:
            self.work.keep_logits(stretch.first, stretch.logits_NV)
            losses_N.append(losses(stretch.logits_NV, stretch.target_N).cpu())

        start = time.perf_counter()
        with self._acting(None):
            routing, seen = run_pass(self.scorer, self.text, self.rows, take, progress=self._reporter("off"))
        loss_N = torch.cat(losses_N).numpy()
        zero_N = np.zeros_like(loss_N)
        same_N = np.ones(len(loss_N), dtype=bool)
        seconds = time.perf_counter() - start
        return self._keep(Pass("off", zero_N, zero_N.copy(), same_N, loss_N, routing, seen, seconds))

    def _compared(
        self,
        name: str,
        policy: Any,
        *,
        before_window: Callable[[int, int], None] | None = None,
        inside: Any = None,
    ) -> Pass:
        reference = self.reference()
        if (kept := self._kept(name)) is not None:
            return check_tokens(reference, kept)
        columns: list[tuple[torch.Tensor, ...]] = []

        def take(stretch: Stretch) -> None:
            kept_NV = self.work.logits(stretch.first, stretch.logits_NV.device)
            found = compare(kept_NV, stretch.logits_NV, stretch.target_N)
            columns.append((found.kl_T.cpu(), found.kl_top_T.cpu(), found.same_T.cpu(), found.loss_T.cpu()))

        start = time.perf_counter()
        with self._acting(policy), inside or nullcontext():
            routing, seen = run_pass(
                *(self.scorer, self.text, self.rows, take),
                before_window=before_window,
                progress=self._reporter(name),
            )
        kl_N, kl_top_N, same_N, loss_N = (torch.cat(column).numpy() for column in zip(*columns, strict=True))
        seconds = time.perf_counter() - start
        found = Pass(name, kl_N, kl_top_N, same_N, loss_N, routing, seen, seconds)
        return self._keep(check_tokens(reference, found))

    def _reporter(self, name: str) -> Callable[[int, int], None] | None:
        progress = self._progress
        return None if progress is None else lambda done, total: progress(name, done, total)

    def _keep(self, found: Pass) -> Pass:
        figures = {"kl": found.kl_N, "kl_top": found.kl_top_N, "same": found.same_N, "loss": found.loss_N}
        seen = np.frombuffer(bytes.fromhex(found.token_hash), dtype=np.uint8)
        arrays = {**figures, "tokens": seen.copy(), "seconds": np.array([found.seconds])}
        arrays |= found.routing.arrays()
        self.work.keep(found.name, arrays)
        return found

    def _kept(self, name: str) -> Pass | None:
        arrays = self.work.find(name)
        if arrays is None or len(arrays["loss"]) != self.text.num_positions:
            return None
        kl_N, kl_top_N, same_N, loss_N = (arrays.pop(key) for key in ("kl", "kl_top", "same", "loss"))
        seconds, seen = float(arrays.pop("seconds")[0]), arrays.pop("tokens").tobytes().hex()
        return Pass(name, kl_N, kl_top_N, same_N, loss_N, RoutingFacts(**arrays), seen, seconds)


def check_tokens(reference: Pass, other: Pass) -> Pass:
    """The other pass; WarmsetError where it did not score the tokens of the reference."""
    if other.token_hash != reference.token_hash:
        raise WarmsetError(
            f"{other.name} scored other tokens than off ({other.token_hash[:12]}, not "
            f"{reference.token_hash[:12]}): their figures cannot be compared."
        )
    return other

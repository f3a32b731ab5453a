"""Logits -> token ids, seeded; and how a window's drafts are judged.

The token at a position is the argmax of (scores + Gumbel noise), where the noise is keyed by (seed, position) alone:
the same position draws the same token however the windows fall (Gumbel-max: Maddison et al., arXiv 1411.0030). So a
draft is right if and only if it is the token that the model draws there, and the text is that of one token at a time,
whatever was drafted. Temperature 0 is greedy; among equal scores the smallest id wins.

Order of what acts on logits: bias, repetition penalty (prompt and answer), presence and frequency penalties (answer),
temperature, min-p, top-k, top-p, noise. Log-probabilities are the model's own, before any of these. Runs on the host in
float64, a row at a time; knows no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError
from warmset.noise import gumbel_numpy


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The log-probability of a token, and of the most likely ones at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sample_token(logits_V: torch.Tensor, config: SamplingConfig, position: int) -> int:
    """Draw the token of one position from float logits [V], with nothing written before it."""
    return Sampler(config).draw(logits_V, position)


@dataclass
class Sampler:
    """Draws the tokens of one answer; `seen` are the tokens of its prompt."""

    config: SamplingConfig
    seen: set[int] = field(default_factory=set)
    written: Counter[int] = field(default_factory=Counter)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def draw(self, logits_V: torch.Tensor, position: int) -> int:
        """The token at `position`, from float logits [V] after the token before it."""
        logits = _on_host(logits_V, position)
        token = self._choose(logits, position)
        if self.config.logprobs is not None:
            self.logprobs.append(_logprobs(logits, token, self.config.logprobs))
        return token

    def guess(self, logits_V: torch.Tensor, position: int) -> int:
        """What a draft source's logits [V] lead to at `position`, with the noise that will be used there.

        The same noise makes a draft right more often than a draw of its own would. Takes no note of it.
        """
        return self._choose(_on_host(logits_V, position), position)

    def take(self, token: int) -> None:
        """`token` was written: penalties know it from now on."""
        self.written[token] += 1

    def accept(
        self,
        logits_TV: torch.Tensor,
        drafts: list[int],
        position: int,
        ends: Callable[[int], bool],
    ) -> list[int]:
        """The tokens that a window of 1 + len(drafts) rows gives, at least one: as if drawn one at a time.

        logits_TV: after each row, where rows may be fewer than drafted. position: of the first token drawn. Row n's
        token is drawn if the drafts before it were right; `ends` says of each token drawn whether the answer ends
        with it. The number of tokens is the number of rows to keep.
        """
        drawn: list[int] = []
        for row, logits_V in enumerate(logits_TV):
            token = self.draw(logits_V, position + row)
            drawn.append(token)
            if ends(token):
                break
            self.take(token)
            if row == len(drafts) or token != drafts[row]:
                break
        return drawn

    def _choose(self, logits: np.ndarray, position: int) -> int:
        config = self.config
        scores = self._penalised(logits)
        if config.temperature == 0.0:
            return int(np.argmax(scores))
        scores = scores.astype(np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the greatest to -inf: greedy
            scores = (scores - scores.max()) / config.temperature
        scores = _filtered(scores, config)
        return int(np.argmax(scores + gumbel_numpy(config.seed, position, len(scores))))

    def _penalised(self, logits: np.ndarray) -> np.ndarray:
        config = self.config
        if not config.changes_scores:
            return logits
        scores = logits.astype(np.float64)
        for token, bias in config.logit_bias.items():
            if token < len(scores):
                scores[token] += bias
        if config.repetition_penalty != 1.0:
            ids = np.fromiter(self.seen | self.written.keys(), dtype=np.int64)
            kept = scores[ids]
            factor = config.repetition_penalty
            scores[ids] = np.where(kept > 0, kept / factor, kept * factor)
        if self.written and (config.presence_penalty or config.frequency_penalty):
            ids = np.fromiter(self.written.keys(), dtype=np.int64)
            counts = np.fromiter(self.written.values(), dtype=np.float64)
            scores[ids] -= config.presence_penalty + config.frequency_penalty * counts
        return scores


def _on_host(logits_V: torch.Tensor, position: int) -> np.ndarray:
    logits = logits_V.detach().float().cpu().numpy()
    if np.isnan(logits).any():
        raise WarmsetError(
            f"The model's output at position {position} is not a number: no token can be drawn."
        )
    return logits


def _logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    logprobs = wide - np.log(np.exp(wide).sum())
    best = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(
        token=token,
        logprob=float(logprobs[token]),
        top=tuple((int(other), float(logprobs[other])) for other in best),
    )


def _filtered(scores_V: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Put -inf where top-k, top-p or min-p leave a token out; the most likely token always stays."""
    order = np.argsort(-scores_V, kind="stable")
    probs = np.exp(scores_V[order] - scores_V[order[0]])
    keep = np.ones(len(order), dtype=bool)
    if config.min_p > 0.0:
        keep &= probs >= config.min_p
    if config.top_k > 0:
        keep[config.top_k :] = False
    if config.top_p < 1.0:
        mass = np.where(keep, probs, 0.0)
        before = np.cumsum(mass) - mass
        keep &= before < config.top_p * mass.sum()
    keep[0] = True
    result = np.full_like(scores_V, -np.inf)
    result[order[keep]] = scores_V[order[keep]]
    return result

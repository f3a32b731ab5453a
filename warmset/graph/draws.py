"""Draws the tokens of a window's rows on the device, as `sample.Sampler` does on the host.

The noise is `noise.gumbel`, the same bits on both sides, so a token is the same wherever it is drawn; only where top-p
or min-p cut between two tokens that an ulp separates could it differ. What the host alone knows (penalties, biases,
log-probabilities) keeps a request on the host; `why_not` says so. Numbers lie in device memory, so that one captured
graph serves every request of its kind.

    logits_TV  [T, V]  after each row     position_T  [T] int64  of the token that is drawn
"""

from __future__ import annotations

from typing import Literal

import torch

from warmset.config import SamplingConfig
from warmset.noise import gumbel, signed

Kind = Literal["greedy", "free", "filtered"]
"""greedy: the best token. free: temperature alone. filtered: also top-k, top-p or min-p."""


def kind_of(config: SamplingConfig) -> Kind:
    if config.temperature == 0.0:
        return "greedy"
    filters = config.top_k > 0 or config.top_p < 1.0 or config.min_p > 0.0
    return "filtered" if filters else "free"


def why_not(config: SamplingConfig) -> str | None:
    """Why a request is drawn on the host, as the end of a sentence, or None."""
    if config.changes_scores:
        return "penalties and biases are applied on the host"
    if config.logprobs is not None:
        return "log-probabilities are taken on the host"
    return None


class Draws:
    """The numbers of the current request, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._seed = torch.zeros((), dtype=torch.int64, device=device)
        self._temperature = torch.ones((), dtype=torch.float64, device=device)
        self._top_p = torch.ones((), dtype=torch.float64, device=device)
        self._min_p = torch.zeros((), dtype=torch.float64, device=device)
        self._top_k = torch.zeros((), dtype=torch.int64, device=device)

    def use(self, config: SamplingConfig) -> Kind:
        """The windows that follow draw by `config`; returns which kind of graph they need."""
        assert why_not(config) is None
        self._seed.fill_(signed(config.seed))
        self._temperature.fill_(config.temperature or 1.0)
        self._top_p.fill_(config.top_p)
        self._min_p.fill_(config.min_p)
        self._top_k.fill_(config.top_k)
        return kind_of(config)

    def draw(self, kind: Kind, logits_TV: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """Token of each row, int64 [T]; among equal scores the smallest id."""
        logits_TV = logits_TV.float()
        if kind == "greedy":
            return logits_TV.argmax(dim=-1)
        scores_TV = logits_TV.double()
        scores_TV = (scores_TV - scores_TV.amax(dim=-1, keepdim=True)) / self._temperature
        if kind == "filtered":
            scores_TV = self._filtered(scores_TV)
        token_V = torch.arange(logits_TV.shape[-1], device=logits_TV.device)
        return (scores_TV + gumbel(self._seed, position_T[:, None], token_V)).argmax(dim=-1)

    def _filtered(self, scores_TV: torch.Tensor) -> torch.Tensor:
        sorted_TV, order_TV = scores_TV.sort(dim=-1, descending=True, stable=True)
        probs_TV = (sorted_TV - sorted_TV[:, :1]).exp()
        rank_V = torch.arange(scores_TV.shape[-1], device=scores_TV.device)
        keep_TV = (probs_TV >= self._min_p) & ((rank_V < self._top_k) | (self._top_k == 0))
        mass_TV = torch.where(keep_TV, probs_TV, 0.0)
        before_TV = mass_TV.cumsum(dim=-1) - mass_TV
        keep_TV &= (before_TV < self._top_p * mass_TV.sum(dim=-1, keepdim=True)) | (self._top_p >= 1.0)
        keep_TV |= rank_V == 0
        return torch.full_like(scores_TV, -torch.inf).scatter(
            -1, order_TV, torch.where(keep_TV, sorted_TV, -torch.inf)
        )

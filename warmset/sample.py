"""Logits -> token ids, seeded.

The token at a position is the argmax of (logits / temperature + Gumbel noise), where the noise is keyed by
(seed, position) alone: the same position draws the same token however the windows fall (Gumbel-max: Maddison
et al., arXiv 1411.0030). Temperature 0 is greedy; among equal logits the smallest id wins. Runs on the host in
float64, on one row; knows no text.
"""

from __future__ import annotations

import numpy as np
import torch

from warmset.config import SamplingConfig
from warmset.errors import WarmsetError


def sample_token(logits_V: torch.Tensor, config: SamplingConfig, position: int) -> int:
    """Draw the token of one position from float logits [V]."""
    scores_V = logits_V.detach().float().cpu().numpy().astype(np.float64)
    if np.isnan(scores_V).any():
        raise WarmsetError(
            f"The model's output at position {position} is not a number: no token can be drawn."
        )
    if config.temperature == 0.0:
        return int(np.argmax(scores_V))
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the greatest to -inf: greedy
        scores_V = (scores_V - scores_V.max()) / config.temperature
    scores_V = _filtered(scores_V, config)
    generator = np.random.Generator(np.random.Philox(key=[config.seed, position]))
    return int(np.argmax(scores_V + generator.gumbel(size=scores_V.shape)))


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

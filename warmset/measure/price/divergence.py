"""How far two predictions of the same token are apart: argmax, KL, loss. Float64 throughout.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOP = 64
"""Tokens of the reference that the lower bound of the KL keeps apart; all others are lumped into one."""
MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Divergence:
    """Of T rows: kl_T and kl_top_T float64 in nats, same_T bool (equal argmax), loss_T float64 of the second one."""

    kl_T: Tensor
    kl_top_T: Tensor
    same_T: Tensor
    loss_T: Tensor


def losses(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """float64 [T]: minus the log-probability of each target, in nats."""
    return torch.cat([
        -torch.log_softmax(part_TV.double(), dim=1).gather(1, part_T[:, None])[:, 0]
        for part_TV, part_T in zip(_parts(logits_TV), _parts(target_T, logits_TV.shape[1]), strict=True)
    ])  # fmt: skip


def compare(reference_TV: Tensor, other_TV: Tensor, target_T: Tensor) -> Divergence:
    """Divergence of `other` from `reference`, logits of any float dtype; all of the KL is KL(reference || other).

    kl_T: over the full vocabulary. kl_top_T: over the reference's `TOP` most likely tokens and one class for all
    others; merging classes never adds to a KL (data-processing inequality), so it is a lower bound of kl_T. Equal
    logits give exactly 0 in both.
    """
    width = reference_TV.shape[1]
    parts = zip(_parts(reference_TV), _parts(other_TV), _parts(target_T, width), strict=True)
    rows = [_compare(*part) for part in parts]
    return Divergence(*(torch.cat(column) for column in zip(*rows, strict=True)))


def _compare(
    reference_TV: Tensor, other_TV: Tensor, target_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_p_TV = torch.log_softmax(reference_TV.double(), dim=1)
    log_q_TV = torch.log_softmax(other_TV.double(), dim=1)
    p_TV = log_p_TV.exp()
    term_TV = torch.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV), 0.0)
    top_TJ = log_p_TV.topk(min(TOP, log_p_TV.shape[1]), dim=1).indices
    kl_top_T = term_TV.gather(1, top_TJ).sum(dim=1) + _tail(log_p_TV, log_q_TV, top_TJ)
    same_T = reference_TV.argmax(dim=1) == other_TV.argmax(dim=1)
    loss_T = -log_q_TV.gather(1, target_T[:, None])[:, 0]
    return term_TV.sum(dim=1).clamp(min=0), kl_top_T.clamp(min=0), same_T, loss_T


def _tail(log_p_TV: Tensor, log_q_TV: Tensor, top_TJ: Tensor) -> Tensor:
    """The term of the class that holds every token outside `top_TJ`."""
    log_p_T = log_p_TV.scatter(1, top_TJ, -torch.inf).logsumexp(dim=1)
    log_q_T = log_q_TV.scatter(1, top_TJ, -torch.inf).logsumexp(dim=1)
    return torch.where(log_p_T > -torch.inf, log_p_T.exp() * (log_p_T - log_q_T), 0.0)


def _parts(values: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """In pieces of so few rows that float64 copies stay small."""
    width = values.shape[1] if width is None else width
    return values.split(max(1, MOST_ELEMENTS // width))

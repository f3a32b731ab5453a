"""The rules behind the policies, as functions of tensors.

No rule waits for a device: a loop over ranks runs over all K of them where lo and hi are tensors, and masks.
Shape letters: T rows, E experts, K picks a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from warmset.routing.counters import cold_picks
from warmset.routing.scores import FLOAT32_MAX, NO_EXPERT, RouterRule, clean, own_pick, ranking, sigmoid


def swap(
    scores_TE: Tensor,
    ids_TK: Tensor,
    slot_E: Tensor,
    margin: Tensor | float,
    lo: Tensor | int,
    hi: Tensor | int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids_TK, swapped_TK bool, tail_cold_T) after the margin swap of ranks lo..hi, in this order.

    ids_TK int32 may hold repeats and padding (-1 or E). Only cold picks leave and only residents enter, so
    the best resident not picked is always the next one of a list made once, before the first swap.
    """
    cold_TK = cold_picks(ids_TK, slot_E)
    rank_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    tail_TK = cold_TK & (rank_K >= lo) & (rank_K <= hi)
    swapped_TK = torch.zeros_like(tail_TK)
    if not tail_TK.is_cuda and not bool(tail_TK.any()):
        return ids_TK, swapped_TK, tail_TK.sum(dim=1)
    free_TE = _without_picked(scores_TE, ids_TK).masked_fill(slot_E < 0, -math.inf)
    found_TK, found_score_TK = _best(free_TE, ids_TK.shape[1])
    score_TK = _score_of(scores_TE, ids_TK)
    next_T1 = torch.zeros(ids_TK.shape[0], 1, dtype=torch.long, device=ids_TK.device)
    ids_TK = ids_TK.clone()
    for rank in _visited(lo, hi, ids_TK.shape[1]):
        score_T1 = found_score_TK.gather(1, next_T1)
        close_T1 = (score_T1 > -math.inf) & (score_TK[:, rank, None] - score_T1 <= margin)
        take_T1 = tail_TK[:, rank, None] & close_T1
        ids_TK[:, rank, None] = torch.where(take_T1, found_TK.gather(1, next_T1), ids_TK[:, rank, None])
        swapped_TK[:, rank, None] = take_T1
        next_T1 = (next_T1 + take_T1).clamp(max=ids_TK.shape[1] - 1)
    return ids_TK, swapped_TK, tail_TK.sum(dim=1)


def join_window(
    scores_TE: Tensor,
    own_TK: Tensor,
    swapped_ids_TK: Tensor,
    swapped_TK: Tensor,
    slot_E: Tensor,
    lo: Tensor | int,
    hi: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """(ids_TK, stays_TK bool): the window's swaps seen together.

    R = the cold experts that some row still picks: they are read anyway. A swap away from a member of R is
    taken back; one that stays takes the best member of R not picked by its row, where that beats it.
    """
    num_experts = slot_E.shape[0]
    read_E = torch.zeros(num_experts + 1, dtype=torch.bool, device=slot_E.device)
    cold_TK = cold_picks(swapped_ids_TK, slot_E)
    read_E[torch.where(cold_TK, swapped_ids_TK, num_experts).long()] = True  # one place more takes the others
    read_E = read_E[:num_experts]
    back_TK = swapped_TK & read_E[own_TK.clamp(0, num_experts - 1).long()]
    stays_TK = swapped_TK & ~back_TK
    ids_TK = torch.where(back_TK, own_TK, swapped_ids_TK)
    if not stays_TK.is_cuda and not bool(stays_TK.any()):
        return ids_TK, stays_TK
    free_TE = _without_picked(scores_TE, ids_TK).masked_fill(~read_E, -math.inf)
    found_TK, found_score_TK = _best(free_TE, ids_TK.shape[1])
    score_TK = _score_of(scores_TE, ids_TK)
    next_T1 = torch.zeros(ids_TK.shape[0], 1, dtype=torch.long, device=ids_TK.device)
    for rank in _visited(lo, hi, ids_TK.shape[1]):
        take_T1 = stays_TK[:, rank, None] & (found_score_TK.gather(1, next_T1) > score_TK[:, rank, None])
        ids_TK[:, rank, None] = torch.where(take_T1, found_TK.gather(1, next_T1), ids_TK[:, rank, None])
        next_T1 = (next_T1 + take_T1).clamp(max=ids_TK.shape[1] - 1)
    return ids_TK, stays_TK


def swap_at_random(
    scores_TE: Tensor,
    own_TK: Tensor,
    swapped_TK: Tensor,
    slot_E: Tensor,
    position_T: Tensor,
    layer: int,
    seed: int,
) -> Tensor:
    """ids_TK with a random resident not picked wherever `swapped_TK`; the same for a row in any window."""
    ids_TK = own_TK.clone()
    for rank in range(own_TK.shape[1]):
        free_TE = (_without_picked(scores_TE, ids_TK) > -math.inf) & (slot_E >= 0)
        num_free_T = free_TE.sum(dim=1)
        nth_T = _hash(position_T, layer, rank, seed) % num_free_T.clamp(min=1)
        chosen_TE = free_TE & (free_TE.cumsum(dim=1) == nth_T[:, None] + 1)
        chosen_T = chosen_TE.int().argmax(dim=1).int()
        ids_TK[:, rank] = torch.where(swapped_TK[:, rank] & (num_free_T > 0), chosen_T, ids_TK[:, rank])
    return ids_TK


def add_bias(
    scores_TE: Tensor, own_TK: Tensor, slot_E: Tensor, beta: Tensor, protect: Tensor | int
) -> Tensor:
    """ids_TK: the first `protect` own picks, then the best others by score + beta where resident."""
    num_picks = own_TK.shape[1]
    biased_TE = torch.where(slot_E >= 0, scores_TE + beta, scores_TE).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    biased_TE = torch.where(scores_TE == -math.inf, scores_TE, biased_TE)
    rank_K = torch.arange(num_picks, device=own_TK.device)
    kept_TK = (rank_K < protect).expand_as(own_TK)
    rest_TK = own_pick(_without_picked(biased_TE, torch.where(kept_TK, own_TK, NO_EXPERT)), num_picks)
    index_TK = (rank_K - protect).clamp(min=0).expand_as(own_TK)
    return torch.where(kept_TK, own_TK, rest_TK.gather(1, index_TK))


def prefer_prefix(
    scores_TE: Tensor, slot_E: Tensor, protect: Tensor | int, max_rank: Tensor | int, top_k: int
) -> Tensor:
    """ids_TK: the first `protect` of the ranking, residents among its first `max_rank`, then the others."""
    num_experts = scores_TE.shape[1]
    ranking_TE = ranking(scores_TE)
    place_E = torch.arange(num_experts, device=scores_TE.device)
    resident_TE = (slot_E[ranking_TE] >= 0) & (scores_TE.gather(1, ranking_TE) > -math.inf)
    later_TE = torch.where(resident_TE & (place_E < max_rank), 1, 2)
    class_TE = torch.where(place_E < protect, 0, later_TE)
    order_TE = (class_TE * num_experts + place_E).argsort(dim=1)  # keys are distinct: no ties
    return ranking_TE.gather(1, order_TE[:, :top_k]).int()


def prefix_of_mass(scores_TE: Tensor, logits_TE: Tensor, rule: RouterRule, mass: Tensor) -> Tensor:
    """int64 [T, 1]: length of the shortest prefix of the ranking whose weights add up to `mass`.

    Weights: softmax or normalised sigmoid over the experts that can be picked; in float64, so that the order
    of the sums does not decide.
    """
    logits_TE = clean(logits_TE)
    weight_TE = sigmoid(logits_TE) if rule.scoring == "sigmoid" else torch.softmax(logits_TE.double(), dim=1)
    weight_TE = weight_TE.double().masked_fill(scores_TE == -math.inf, 0.0)
    weight_TE = weight_TE / weight_TE.sum(dim=1, keepdim=True).clamp(min=1e-300)
    reached_TE = weight_TE.gather(1, ranking(scores_TE)).cumsum(dim=1) >= mass.double()
    return (~reached_TE).sum(dim=1, keepdim=True) + 1


def without(ids_TK: Tensor, dropped_TK: Tensor) -> Tensor:
    """The picks that are not dropped, in order, then -1."""
    order_TK = dropped_TK.int().argsort(dim=1, stable=True)
    return ids_TK.masked_fill(dropped_TK, NO_EXPERT).gather(1, order_TK)


def pick_finite(scores_TE: Tensor, top_k: int) -> Tensor:
    """The best `top_k` experts above -inf, then -1."""
    ids_TK, score_TK = _best(scores_TE, top_k)
    return ids_TK.masked_fill(score_TK == -math.inf, NO_EXPERT)


def _best(scores_TE: Tensor, num_picks: int) -> tuple[Tensor, Tensor]:
    ids_TK = own_pick(scores_TE, num_picks)
    return ids_TK, scores_TE.gather(1, ids_TK.long())


def _score_of(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    return scores_TE.gather(1, ids_TK.clamp(0, scores_TE.shape[1] - 1).long())


def _without_picked(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """scores_TE with -inf at the row's picks; padding (-1 or E) is passed over."""
    num_rows, num_experts = scores_TE.shape
    padded = torch.cat([scores_TE, scores_TE.new_empty(num_rows, 1)], dim=1)  # one place more takes padding
    index_TK = torch.where((ids_TK >= 0) & (ids_TK < num_experts), ids_TK, num_experts).long()
    return padded.scatter_(1, index_TK, -math.inf)[:, :num_experts]


def _visited(lo: Tensor | int, hi: Tensor | int, num_picks: int) -> range:
    """Ranks to look at; the tail mask decides where lo and hi are in device memory."""
    if isinstance(lo, int) and isinstance(hi, int):
        return range(lo, min(hi, num_picks - 1) + 1)
    return range(num_picks)


def _hash(position_T: Tensor, layer: int, rank: int, seed: int) -> Tensor:
    """Non-negative int64 [T], the same on every device: the finaliser of splitmix64 on wrapping integers."""
    start = (seed * 1_000_003 + layer) * 1_009 + rank
    x = position_T.long() * 0x1E3779B97F4A7C15 + start % 2**62
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**63 - 1)

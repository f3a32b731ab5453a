"""Input of the routing bench: layers with a chosen number of cold tail picks in every row, or rows of a trace.

Shape letters: L layers, T rows, E experts, K picks a row.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from warmset.measure.trace import Trace
from warmset.routing import own_pick, selection_scores
from warmset.routing.scores import RouterRule


@dataclass(frozen=True, kw_only=True)
class Layers:
    """One window through L layers: logits_LTE, and slot_LE int32, -1 where cold."""

    logits_LTE: Tensor
    slot_LE: Tensor

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Layers:
        return Layers(logits_LTE=self.logits_LTE.to(device, dtype), slot_LE=self.slot_LE.to(device))


def made_layers(
    num_layers: int,
    num_rows: int,
    rule: RouterRule,
    num_experts: int,
    ranks: tuple[int, int],
    num_cold: int,
    seed: int,
) -> Layers:
    """Random logits, a third of the experts resident, and `num_cold` cold picks among `ranks` of every row."""
    generator = torch.Generator().manual_seed(seed)
    chooser = random.Random(seed)
    logits: list[Tensor] = []
    slots: list[Tensor] = []
    while len(logits) < num_layers:
        logits_TE = torch.randn(num_rows, num_experts, generator=generator)
        tail_TR = own_pick(logits_TE, rule.top_k)[:, ranks[0] : ranks[1] + 1].tolist()
        state = _residency(tail_TR, num_cold, chooser)
        if state is None:
            continue  # two rows want the same expert cold and resident
        slot_E = torch.where(torch.rand(num_experts, generator=generator) < 1 / 3, 0, -1).int()
        for expert, cold in state.items():
            slot_E[expert] = -1 if cold else 0
        logits.append(logits_TE)
        slots.append(slot_E)
    return Layers(logits_LTE=torch.stack(logits), slot_LE=torch.stack(slots))


def _residency(tail_TR: list[list[int]], num_cold: int, chooser: random.Random) -> dict[int, bool] | None:
    """{expert: cold} that gives every row `num_cold` cold picks in its tail, or None where rows conflict."""
    state: dict[int, bool] = {}
    for tail in tail_TR:
        still = num_cold - sum(state.get(expert, False) for expert in tail)
        open_experts = [expert for expert in tail if expert not in state]
        if not 0 <= still <= len(open_experts):
            return None
        cold = set(chooser.sample(open_experts, still))
        state.update({expert: expert in cold for expert in open_experts})
    return state


def trace_layers(trace: Trace, num_layers: int, num_rows: int, share: float = 0.33) -> Layers:
    """Windows of consecutive rows of a trace, spread over it; residents are each layer's most picked experts.

    The first half of the rows chooses the residents, the windows come from the second half.
    """
    scores_NLE = trace.scores_NLE.float()
    half = trace.num_rows // 2
    num_experts = scores_NLE.shape[2]
    rule = RouterRule(top_k=trace.top_k)
    logits, slots = [], []
    for n in range(num_layers):
        layer = n % scores_NLE.shape[1]
        start = half + (trace.num_rows - half - num_rows) * n // num_layers
        logits.append(scores_NLE[start : start + num_rows, layer])
        picks = own_pick(selection_scores(scores_NLE[:half, layer], rule), trace.top_k)
        counts_E = torch.bincount(picks.flatten().long(), minlength=num_experts)
        slot_E = torch.full((num_experts,), -1, dtype=torch.int32)
        slot_E[counts_E.topk(round(share * num_experts)).indices] = 0
        slots.append(slot_E)
    return Layers(logits_LTE=torch.stack(logits), slot_LE=torch.stack(slots))

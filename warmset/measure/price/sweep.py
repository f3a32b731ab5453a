"""Which policies are put side by side by `--policies all`, and the curve of exact routing with more slots.

Policies that protect the router's first picks protect as many as the default tail leaves alone, so that all of them
change the same ranks; drop-cold and fewer-picks need no residents to choose from. Margins and betas are in score units.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from warmset.measure.price.passes import RoutingFacts, cold_experts
from warmset.routing import (
    AdditiveBias,
    CachePrior,
    CumulativeMass,
    DropCold,
    FewerPicks,
    MarginSwap,
    MaxRank,
    Policy,
    ResidentOnly,
    WindowJoint,
    default_ranks,
)

MARGINS = (0.1, 0.25, 0.5, 1.0, 2.0)
JOINT_MARGINS = (0.5, 1.0, 2.0)
BETAS = (0.25, 0.5, 1.0)
STRENGTHS = (0.05, 0.1)
MASSES = (0.5, 0.7)
SLOT_SHARES = (0.33, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEWER_PICKS = "fewer-picks"


def all_policies(top_k: int) -> dict[str, list[Policy]]:
    """Family -> its policies from gentle to strong, for a router of `top_k` picks."""
    protect = default_ranks(top_k)[0]
    families: dict[str, list[Any]] = {
        "margin": [MarginSwap(margin=margin) for margin in MARGINS],
        "window-joint": [WindowJoint(margin=margin) for margin in JOINT_MARGINS],
        "additive-bias": [AdditiveBias(beta=beta, protect=protect) for beta in BETAS],
        "cache-prior": [CachePrior(strength=strength, protect=protect) for strength in STRENGTHS],
        "max-rank": [MaxRank(max_rank=top_k * times // 2, protect=protect) for times in (4, 8)],
        "cumulative-mass": [CumulativeMass(mass=mass, protect=protect) for mass in MASSES],
        "drop-cold": [DropCold(weight=round(share / top_k, 4)) for share in (0.5, 0.9)],
        FEWER_PICKS: [FewerPicks(k=k) for k in range(top_k - 1, max(0, top_k - 4), -1)],
        "resident-only": [ResidentOnly()],
    }
    return {family: policies for family, policies in families.items() if policies}


def cold_with(routing: RoutingFacts, slot_LE: torch.Tensor) -> float:
    """Cold experts a token that exact routing would read with this table, from the router's own picks."""
    total, count = 0, len(routing.own_NLK)
    bounds = [0, *(np.flatnonzero(np.diff(routing.window_N)) + 1).tolist(), count]
    for start, end in itertools.pairwise(bounds):
        own_LTK = torch.from_numpy(routing.own_NLK[start:end].astype(np.int32)).transpose(0, 1)
        total += int(cold_experts(own_LTK, slot_LE).sum())
    return total / count

"""Which experts a row gets: the router's own pick, and policies that prefer what is resident.

Reading order: scores (logits to picks and weights), counters (what a routed window is), rules (each policy's
arithmetic), params (numbers in device memory), base (the frame of a policy), policies (the values), parse (their
names). Plain torch: neither transformers nor triton is imported here.
"""

from warmset.routing.base import Policy
from warmset.routing.counters import COUNTER_NAMES, Routed, as_dict, raise_for_errors
from warmset.routing.params import PolicyTable, RangeMeans, RouteContext, default_ranks, resolve_ranks
from warmset.routing.parse import POLICIES, describe, parse_policy
from warmset.routing.policies import (
    DEFAULT_MARGIN,
    AdditiveBias,
    CachePrior,
    CumulativeMass,
    DropCold,
    Exact,
    FewerPicks,
    MarginSwap,
    MaxRank,
    RandomSwap,
    ResidentOnly,
    WindowJoint,
)
from warmset.routing.scores import RouterRule, auto_margin, own_pick, selection_scores, weights_of

__all__ = [
    "COUNTER_NAMES",
    "DEFAULT_MARGIN",
    "POLICIES",
    "AdditiveBias",
    "CachePrior",
    "CumulativeMass",
    "DropCold",
    "Exact",
    "FewerPicks",
    "MarginSwap",
    "MaxRank",
    "Policy",
    "PolicyTable",
    "RandomSwap",
    "RangeMeans",
    "ResidentOnly",
    "RouteContext",
    "Routed",
    "RouterRule",
    "WindowJoint",
    "as_dict",
    "auto_margin",
    "default_ranks",
    "describe",
    "own_pick",
    "parse_policy",
    "raise_for_errors",
    "resolve_ranks",
    "selection_scores",
    "weights_of",
]

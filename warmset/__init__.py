"""Warmset: Mixture-of-Experts models bigger than the fast memory of the machine.

Reading order, which is the way of the data:

    checkpoint -> store -> slots -> profile -> routing -> experts -> router -> model -> window -> engine -> text -> cli

The public names below are loaded when they are first used, so that `import warmset.routing` stays light: it
pulls neither transformers nor triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "warmset.text",
    "EngineConfig": "warmset.config",
    "SamplingConfig": "warmset.config",
    "WarmsetError": "warmset.errors",
    "CheckpointError": "warmset.errors",
    "PolicyError": "warmset.errors",
    "RowError": "warmset.errors",
    "Routed": "warmset.routing",
    "RouterRule": "warmset.routing",
    "Policy": "warmset.routing",
    "parse_policy": "warmset.routing",
    "Exact": "warmset.routing",
    "MarginSwap": "warmset.routing",
    "AdditiveBias": "warmset.routing",
    "CachePrior": "warmset.routing",
    "MaxRank": "warmset.routing",
    "CumulativeMass": "warmset.routing",
    "WindowJoint": "warmset.routing",
    "DropCold": "warmset.routing",
    "FewerPicks": "warmset.routing",
    "ResidentOnly": "warmset.routing",
    "RandomSwap": "warmset.routing",
    "route": "warmset.route_rows",
    "price": "warmset.measure.price",
    "as_windows": "warmset.measure.price",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'warmset' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

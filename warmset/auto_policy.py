"""`--route-resident auto`: the margins that ship with a known model, else the default.

A model is known by its fingerprint, so a copy in another folder is known too. Knows files, no weights.
"""

from __future__ import annotations

import json

from warmset.config import EngineConfig, Resolved
from warmset.models import BUILTIN_POLICIES
from warmset.prepare import prepare
from warmset.routing import DEFAULT_MARGIN, MarginSwap, Policy
from warmset.routing.parse import read_policy_file


def auto_policy(config: EngineConfig) -> Resolved[Policy]:
    """The policy for the model of this configuration, and why; WarmsetError where the model cannot be found."""
    fingerprint = prepare(config).checkpoint.fingerprint()
    for name, path in BUILTIN_POLICIES.items():
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["fingerprint"] == fingerprint:
            cost, saved = held["measured"]["excess_kl"], held["measured"]["bytes_saved"]
            why = f"the calibration of {name}: {cost:.2g} nats of excess KL, {saved:.1%} fewer bytes when measured"
            return Resolved(value=read_policy_file(path), why=why)
    why = f"no calibration ships with this model, and {DEFAULT_MARGIN} is the default for softmax routers"
    return Resolved(value=MarginSwap(), why=why)

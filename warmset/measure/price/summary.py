"""From passes to figures: one arm beside off, with intervals, controls and a verdict.

A verdict is `measured` or `no verdict`. There is none where the policy changed no pick: equal outputs then say nothing
about the policy (everything may have been resident). Losses and KL are in nats; perplexity is exp(loss).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from warmset.measure.price.bootstrap import Blocks
from warmset.measure.price.documents import ScoredText
from warmset.measure.price.measurement import Pass

PLACES = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Where the ranges of positions begin."""
MEASURED, NO_VERDICT = "measured", "no verdict"


class Summary:
    """Figures over one text; every interval comes from the same seeded blocks."""

    def __init__(self, text: ScoredText, expert_bytes: int, *, seed: int = 0) -> None:
        self.text, self.expert_bytes = text, expert_bytes
        self.of_N = text.of_positions()
        self.blocks = Blocks(self.of_N["document"], seed=seed)

    def off(self, off: Pass) -> dict[str, Any]:
        """The figures of the pass with routing off."""
        loss = self.blocks.mean(off.loss_N)
        return {
            "policy": "off",
            "positions": len(off.loss_N),
            "argmax_same": 1.0,
            "kl": 0.0,
            "kl_top64": 0.0,
            "kl_p99": 0.0,
            "loss": loss.value,
            "loss_interval": loss.as_list(),
            "loss_change": 0.0,
            "perplexity": math.exp(loss.value),
            **self.traffic(off),
            "by_kind": self._by_kind({"loss": off.loss_N}),
            "by_place": self._by_place({"loss": off.loss_N}),
            "seconds": off.seconds,
        }

    def arm(
        self, name: str, off: Pass, arm: Pass, nulls: Sequence[Pass] = (), random: Pass | None = None
    ) -> dict[str, Any]:
        """The figures of one policy beside off, with whatever controls there are."""
        change_N = arm.loss_N - off.loss_N
        kl, same = self.blocks.mean(arm.kl_N), self.blocks.mean(arm.same_N)
        change, p99 = self.blocks.mean(change_N), self.blocks.quantile(arm.kl_N, 0.99)
        loss = self.blocks.mean(arm.loss_N)
        traffic, traffic_off = self.traffic(arm), self.traffic(off)
        split = {"kl": arm.kl_N, "argmax_same": arm.same_N.astype(float), "loss_change": change_N}
        verdict, why = judge(arm)
        return {
            "policy": name,
            "verdict": verdict,
            "why": why,
            "positions": len(arm.loss_N),
            "argmax_same": same.value,
            "argmax_same_interval": same.as_list(),
            "kl": kl.value,
            "kl_interval": kl.as_list(),
            "kl_top64": float(arm.kl_top_N.mean()),
            "kl_p99": p99.value,
            "kl_p99_interval": p99.as_list(),
            **self._excess(arm, nulls),
            "loss": loss.value,
            "loss_change": change.value,
            "loss_change_interval": change.as_list(),
            "perplexity": math.exp(loss.value),
            "random_swaps": None if random is None else self._control(off, random),
            **traffic,
            "bytes_saved": 1 - traffic["bytes_per_token"] / traffic_off["bytes_per_token"]
            if traffic_off["bytes_per_token"]
            else None,
            "swaps_by_layer_and_rank": arm.routing.moved_NLK.sum(axis=0).tolist(),
            "by_kind": self._by_kind(split),
            "by_place": self._by_place(split),
            "seconds": arm.seconds,
        }

    def traffic(self, found: Pass) -> dict[str, Any]:
        """What a pass read and swapped, a token and a layer-window."""
        routing, count = found.routing, len(found.loss_N)
        return {
            "swaps": int(routing.swaps_N.sum()),
            "dropped": int(routing.dropped_N.sum()),
            "tail_cold": int(routing.tail_cold_N.sum()),
            "rows_changed": int(routing.changed_NL.sum()),
            "cold_experts_per_layer_window": float(routing.cold_WL.mean()),
            "cold_experts_per_token": float(routing.cold_WL.sum() / count),
            "bytes_per_token": float(routing.cold_WL.sum() * self.expert_bytes / count),
        }

    def _excess(self, arm: Pass, nulls: Sequence[Pass]) -> dict[str, Any]:
        if not nulls:
            return {"null": None, "excess_kl": None, "excess_kl_interval": None}
        null_N = np.mean([null.kl_N for null in nulls], axis=0)
        null, excess = self.blocks.mean(null_N), self.blocks.mean(arm.kl_N - null_N)
        return {
            "null": {
                "kl": null.value,
                "kl_interval": null.as_list(),
                "kl_of_each": [float(other.kl_N.mean()) for other in nulls],
            },
            "excess_kl": excess.value,
            "excess_kl_interval": excess.as_list(),
        }

    def _control(self, off: Pass, random: Pass) -> dict[str, Any]:
        kl, change = self.blocks.mean(random.kl_N), self.blocks.mean(random.loss_N - off.loss_N)
        return {
            "kl": kl.value,
            "kl_interval": kl.as_list(),
            "argmax_same": float(random.same_N.mean()),
            "loss_change": change.value,
            "loss_change_interval": change.as_list(),
            "swaps": int(random.routing.swaps_N.sum()),
        }

    def _by_kind(self, split: dict[str, np.ndarray]) -> dict[str, Any]:
        kind_N = self.of_N["kind"]
        return {kind: self._part(split, kind_N == number) for number, kind in enumerate(self.text.kinds)}

    def _by_place(self, split: dict[str, np.ndarray]) -> dict[str, Any]:
        place_N, found = self.of_N["place"], {}
        for start, end in zip(PLACES, (*PLACES[1:], np.iinfo(np.int64).max), strict=True):
            among_N = (place_N >= start) & (place_N < end)
            if among_N.any():
                last = min(end - 1, int(place_N.max()))
                found[f"{start}-{last}"] = self._part(split, among_N)
        return found

    def _part(self, split: dict[str, np.ndarray], among_N: np.ndarray) -> dict[str, Any]:
        found: dict[str, Any] = {"positions": int(among_N.sum())}
        for name, values_N in split.items():
            mean = self.blocks.mean(values_N, among_N)
            found[name], found[f"{name}_interval"] = mean.value, mean.as_list()
        return found


def judge(arm: Pass) -> tuple[str, str]:
    """(verdict, why): no verdict where no pick was changed."""
    changed = int(arm.routing.changed_NL.sum())
    if changed == 0:
        return NO_VERDICT, "the policy changed no pick, so equal outputs say nothing about it"
    return MEASURED, f"picks of {changed:,} rows in a layer were changed"


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other one beats: fewer bytes, or less KL at as many bytes, in order of bytes."""
    front: list[int] = []
    best = math.inf
    for index in sorted(range(len(points)), key=lambda number: points[number]):
        if points[index][1] < best:
            front.append(index)
            best = points[index][1]
    return front

"""The longer measurements of `warmset price`: margins within a budget, and free answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import warmset
from warmset.config import shown
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.measure.price.budget import GRID, Curve, Point, alone, find_by_layer, find_single
from warmset.measure.price.documents import ScoredText, shared_runs
from warmset.measure.price.free import FreeText, shipped_prompts
from warmset.measure.price.measurement import Pass, Progress
from warmset.measure.price.run import PriceConfig, Source, price_engine, scored_text
from warmset.profile import Identity, write_atomically
from warmset.routing import MarginSwap, Policy, describe
from warmset.routing.parse import policy_file


@dataclass(frozen=True)
class Found:
    """The search's measured points on the calibration text; the last of each list is what was chosen."""

    budget_kl: float
    calibration: ScoredText
    single: list[Point]
    by_layer: list[Point]
    curves: list[Curve]

    @property
    def policies(self) -> list[MarginSwap]:
        """One margin for all layers, then one for each."""
        return [self.single[-1].policy, self.by_layer[-1].policy]

    def results(self, identity: Identity, arms: list[dict[str, Any]]) -> dict[str, Any]:
        """For the record; `arms`: figures on the report text, those of `policies` among them."""
        by_name = {arm["policy"]: arm for arm in arms}
        single, by_layer = self._side(self.single, by_name), self._side(self.by_layer, by_name)
        return {
            "budget_kl": self.budget_kl,
            "calibration": {
                "text": self.calibration.name,
                "token_hash": self.calibration.token_hash,
                "positions": self.calibration.num_positions,
            },
            "shared_runs_of_50": 0,
            "fingerprint": identity.fingerprint,
            "single": single,
            "by_layer": by_layer,
            "compared": compared(single["on_text"], by_layer["on_text"]),
            "each_layer_alone": [
                [dict(zip(("margin", "excess_kl", "bytes_saved"), step, strict=True)) for step in curve]
                for curve in self.curves
            ],
        }

    def _side(self, points: list[Point], by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
        name = describe(points[-1].policy)
        keys = (
            "excess_kl",
            "excess_kl_interval",
            "bytes_saved",
            "bytes_per_token",
            "argmax_same",
            "loss_change",
        )
        return {
            "policy": name,
            "on_calibration": [
                {"policy": describe(p.policy), "excess_kl": p.excess_kl, "bytes_saved": p.bytes_saved}
                for p in points
            ],
            "on_text": {key: by_name[name][key] for key in keys},
        }


def compared(single: dict[str, Any], by_layer: dict[str, Any]) -> dict[str, float | None]:
    """One margin a layer over one for all, measured on the same text: bytes saved, and excess KL."""

    def over(key: str) -> float | None:
        return by_layer[key] / single[key] if by_layer[key] is not None and single[key] else None

    return {f"{key}_ratio": over(key) for key in ("bytes_saved", "excess_kl")}


class Search:
    """Finds margins on a calibration text; several budgets share their passes.

    WarmsetError where that text shares a run of 50 tokens with the one that figures are reported on.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Any,
        reported: ScoredText,
        config: PriceConfig,
        slots: Any,
        *,
        calibration: Source,
        positions: int,
        ranks: tuple[int, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        whole = scored_text(calibration, tokenizer, replace(config, positions=None), engine)
        shared = shared_runs(whole, reported)
        if shared:
            raise WarmsetError(
                f"calibration and text must share no run of 50 tokens. Got {shared:,} in {shown(whole.name)}."
            )
        self.text = whole.openings(positions, config.rows)
        self._ranks = ranks
        self._num_layers = engine.prepared.experts.num_layers
        self._pricing = price_engine(engine, self.text, config, slots, progress)
        self._measurement = self._pricing.measurement
        self._measurement.check_off()
        self._off = self._bytes(self._measurement.reference())

    def find(self, budget_kl: float) -> Found:
        """The margins for a budget of excess KL, in nats."""
        single = find_single(self._measure, budget_kl, self._ranks)
        curves = [self._curve(layer) for layer in range(self._num_layers)]
        by_layer = find_by_layer(self._measure, curves, budget_kl, self._ranks)
        return Found(budget_kl, self.text, single, by_layer, curves)

    def finish(self) -> None:
        """Delete what was kept for an interruption."""
        self._pricing.finish()

    def _measure(self, policy: MarginSwap) -> Point:
        found = self._measurement.policy(policy)
        return Point(policy, float(found.kl_N.mean()) - self._null_kl(found), self._saved(found))

    def _curve(self, layer: int) -> Curve:
        """One layer alone; its null is measured at the last margin and taken to grow with the rows changed."""
        policies = [alone(layer, margin, self._num_layers, self._ranks) for margin in GRID]
        passes = [self._measurement.policy(policy) for policy in policies]
        rows = [int(found.routing.changed_NL.sum()) for found in passes]
        a_row = self._null_kl(passes[-1]) / max(1, rows[-1])
        return [
            (margin, max(0.0, float(found.kl_N.mean()) - a_row * changed), self._saved(found))
            for margin, found, changed in zip(GRID, passes, rows, strict=True)
        ]

    def _null_kl(self, found: Pass) -> float:
        if not found.routing.changed_NL.any():
            return 0.0
        return float(self._measurement.nulls(found, self._pricing.dtype, seeds=1)[0].kl_N.mean())

    def _saved(self, found: Pass) -> float:
        return 1 - self._bytes(found) / self._off if self._off else 0.0

    def _bytes(self, found: Pass) -> float:
        return self._pricing.summary.traffic(found)["bytes_per_token"]


def write_policy_file(path: str | Path, found: dict[str, Any], model: str, about: dict[str, Any]) -> None:
    """The margins a layer as a file for `--policy FILE`, with what they were found and measured on."""
    evidence = {
        "model": model,
        "found_by": f"warmset {warmset.__version__}",
        **{key: found[key] for key in ("fingerprint", "budget_kl", "calibration")},
        "measured": {
            "text": about["text"],
            "token_hash": about["token_hash"],
            "rows": about["rows"],
            "resident": about["resident"],
            **found["by_layer"]["on_text"],
        },
    }
    policy = warmset.parse_policy(found["by_layer"]["policy"])
    write_atomically(Path(path), policy_file(policy, evidence))


def measure_free(
    engine: TokenEngine,
    tokenizer: Any,
    policies: list[Policy],
    seed: int,
    progress: Callable[[str, int, int], None] | None,
) -> list[dict[str, Any]]:
    """Free answers to the shipped prompts with the null, then with each policy."""
    prompts = [tokenizer.encode(prompt) for prompt in shipped_prompts()]
    answers = FreeText(engine, prompts, seed=seed, progress=progress)
    return [answers.null(), *(answers.policy(policy) for policy in policies)]

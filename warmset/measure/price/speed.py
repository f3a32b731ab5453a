"""`warmset price --speed`: what a margin buys, by margin and tail, as captured windows at the shape of a large model.

The windows are those of `bench window --trace`: one resident set, one routing trace, off and every margin and tail as
legs that take turns. Each leg runs the same windows in every round, and its stage table comes from windows of its own.
Rounds go on as long as the time allows, at least one; the price itself is measured elsewhere and joined by margin and
ranks (`prices_of`).

    results["legs"]["margin0_25_ranks6_9"]   ms, cold_wait_ms, cold_experts, tokens_per_sec, ...
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warmset.config import require
from warmset.errors import WarmsetError
from warmset.measure.trace import Trace, save_trace
from warmset.measure.whole_input import WHOLE_SHAPES, read_trace
from warmset.measure.whole_legs import Leg, LegBench
from warmset.measure.whole_request import Request
from warmset.measure.whole_window import Staged
from warmset.routing import MarginSwap, default_ranks, parse_policy

WINDOWS, ROUNDS, STAGED = 16, 3, 12
BUDGET_SEC = 68.0
"""A round begins only when it will be over by then; all is over within 75 s."""
SLACK = 1.2
"""Of the expected time of a round: beginnings of sequences."""
MOST_LEGS = 24
REHEARSAL_ROWS = 64
ONE_A_WINDOW = "one a window: the trace has no marks of windows of so many rows"
PRICED = ("policy", "argmax_same", "kl", "excess_kl", "excess_kl_interval", "loss_change", "bytes_saved")
PRICED_ON = ("text", "token_hash", "positions", "rows", "resident", "experts_total")
"""What a record of speed says of the prices beside it."""
Ranks = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """What is measured; checked before any work. tails: inclusive ranks; slots None: as many as 8,083 of 24,576."""

    shape: str
    rows: int
    margins: list[float]
    tails: list[Ranks]
    trace: Path
    slots: int | None = None
    budget_sec: float = BUDGET_SEC

    def __post_init__(self) -> None:
        require(self.shape in WHOLE_SHAPES, "shape", f"one of {', '.join(WHOLE_SHAPES)}", self.shape)
        self.windows()
        most = WHOLE_SHAPES[self.shape].experts.top_k - 1
        for low, high in self.tails:
            require(0 <= low <= high <= most, "ranks", f"LO-HI of 0 to {most}", f"{low}-{high}")
        names = list(self.policies())
        require(len(names) == len(self.margins) * len(self.tails), "margins and ranks", "different", names)
        require(1 <= len(names) < MOST_LEGS, "margins x ranks", f"1 to {MOST_LEGS - 1} legs", len(names))

    def policies(self) -> dict[str, MarginSwap]:
        """Leg -> policy; the first tail with all its margins comes first."""
        return {
            leg_name(margin, tail): MarginSwap(margin=margin, ranks=tail)
            for tail in self.tails
            for margin in self.margins
        }

    def windows(self) -> Request:
        return Request(
            shape=self.shape,
            rows=[self.rows],
            colds=[],
            trace=self.trace,
            slots=self.slots,
            trace_windows=WINDOWS,
            budget_sec=self.budget_sec,
        )


def check_trace(request: SpeedRequest) -> None:
    """WarmsetError where the trace is none, is of another router, or ends above the greatest margin."""
    trace, marks = read_trace(request.trace)
    experts = WHOLE_SHAPES[request.shape].experts
    number, picks = trace.scores_NLE.shape[2], trace.top_k
    if (number, picks) != (experts.experts, experts.top_k):
        raise WarmsetError(
            f"--trace must have {experts.experts} experts and {experts.top_k} picks a row. Got {number} and {picks}."
        )
    most = None if marks is None else marks.margin
    if most is not None and max(request.margins) > most:
        raise WarmsetError(
            f"--margins must be at most {most:g}, down to which this trace was recorded. Got {max(request.margins):g}."
        )


def default_tails(top_k: int) -> list[Ranks]:
    """The default tail, one that begins two ranks earlier, and the last two ranks: 6-9, 4-9, 8-9 of ten picks."""
    low, high = default_ranks(top_k)
    return list(dict.fromkeys([(low, high), (max(1, low - 2), high), (max(1, high - 1), high)]))


def leg_name(margin: float, tail: Ranks) -> str:
    return f"margin{margin:g}_ranks{tail[0]}_{tail[1]}".replace(".", "_")


def rehearsal_trace(shape: str, folder: Path) -> Path:
    """A file of random scores for a shape that no trace ships for, to try the run and not to measure."""
    experts = WHOLE_SHAPES[shape].experts
    generator = torch.Generator().manual_seed(0)
    scores_NLE = torch.randn(REHEARSAL_ROWS, 2, experts.experts, generator=generator).half()
    trace = Trace(
        scores_NLE=scores_NLE,
        kind_N=torch.zeros(REHEARSAL_ROWS, dtype=torch.uint8),
        kinds=("random",),
        top_k=experts.top_k,
        renormalize=True,
        model="none",
        fingerprint="none",
    )
    save_trace(trace, folder / "random.safetensors")
    return folder / "random.safetensors"


def run_speed(request: SpeedRequest, device: torch.device) -> dict[str, Any]:
    """Measure; returns config, results, and `failed`, the names of the parts and legs that did not finish."""
    with torch.inference_mode():
        bench = SpeedBench(request, device)
        bench.run()
    config = {
        "shape": request.shape,
        "rows": request.rows,
        "margins": request.margins,
        "tails": [list(tail) for tail in request.tails],
        "trace": request.trace.name,
        "slots": len(bench.resident),
        "layers": bench.shape.layers,
        "experts": bench.shape.experts,
        "windows": WINDOWS,
        "past_tokens": bench.whole.past_tokens,
        "expert_bytes": bench.shape.layout.nbytes,
    }
    return {"config": config, "results": bench.results, "failed": bench.failed}


class SpeedBench(LegBench):
    """One run; `results` fills part by part."""

    def __init__(self, request: SpeedRequest, device: torch.device) -> None:
        self._begun = time.perf_counter()
        super().__init__(request.windows(), device)
        self._policies: dict[str, Any] = {"off": None, **request.policies()}
        self._rows = request.rows

    def run(self) -> None:
        for name, work in (("setup", self._setup), ("rates", self._rates), ("check", self._check)):
            self._part(name, work)
            if self.failed:
                return
        self._part("speed", self._turns)
        self.results["took_sec"] = time.perf_counter() - self._begun

    def _turns(self) -> dict[str, Any]:
        """Rounds over all legs, there and back; a leg's stages are measured in its first turn."""
        legs: dict[str, Leg] = {}
        staged: dict[str, list[Staged]] = {}
        rounds = 1
        self.script.on = True
        try:
            for name, policy in self._policies.items():
                if time.perf_counter() > self._end:
                    print(f"warmset: {name}: no time left", file=sys.stderr, flush=True)
                    self.failed.append(name)
                    continue
                legs[name] = self._leg(policy)
                self._run_leg(legs[name], self._rows)
                staged[name] = [self._leg_staged(legs[name], self._rows, STAGED)]
            while rounds < ROUNDS and self._another_round_fits(legs):
                for leg in list(legs.values())[:: -1 if rounds % 2 else 1]:
                    self._run_leg(leg, self._rows)
                rounds += 1
        finally:
            self.script.on = False
        committed = self.tiled[self._rows].committed
        self.results["legs"] = {
            name: self._figures(self._policies[name], leg, staged[name], committed or 1.0)
            for name, leg in legs.items()
        }
        return {
            "rounds": rounds,
            "committed_per_window": committed or 1.0,
            "committed_from": ONE_A_WINDOW if committed is None else "the trace's own windows",
        }

    def _another_round_fits(self, legs: dict[str, Leg]) -> bool:
        if self.device.type != "cuda":  # a rehearsal
            return False
        runs = WINDOWS + 2  # the first two warm up
        expected = SLACK * sum(leg.window_ms[-1] for leg in legs.values()) * runs / 1e3
        return time.perf_counter() + expected < self._end

    def _figures(
        self, policy: MarginSwap | None, leg: Leg, staged: list[Staged], committed: float
    ) -> dict[str, Any]:
        found = self._leg_figures(leg, staged)
        stages = found["stages"]["stages"]
        return {
            "margin": None if policy is None else policy.margin,
            "ranks": None if policy is None or policy.ranks is None else list(policy.ranks),
            "cold_wait_ms": stages.get("cold wait", None if found["cold_experts"] else 0.0),
            "tokens_per_sec": committed * 1e3 / found["ms"],
            **found,
        }


# -- prices -----------------------------------------------------------------------------------------------------


def prices_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Leg name -> figures of its price, from the results of `warmset price` with margins."""
    found = {}
    for arm in [*results["policies"], *results.get("other_ranks", [])]:
        policy = parse_policy(arm["policy"]) if arm["policy"].startswith("margin:") else None
        if isinstance(policy, MarginSwap) and isinstance(policy.margin, int | float):
            top_k = len(arm["swaps_by_layer_and_rank"][0])
            tail = policy.ranks or default_ranks(top_k)
            found[leg_name(policy.margin, tail)] = {key: arm[key] for key in PRICED}
    return found


def read_prices(path: Path) -> dict[str, Any]:
    """The results in a file that `warmset price --json` wrote, or in its record; WarmsetError where there are none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WarmsetError(f"--prices {path} cannot be read: {error}.") from None
    try:
        found: dict[str, Any] = value.get("results", value)
        prices_of(found)
        kept = {key: found[key] for key in ("policies", *PRICED_ON)}
        return {**kept, "other_ranks": found.get("other_ranks", [])}
    except (KeyError, TypeError, AttributeError, IndexError):
        raise WarmsetError(f"--prices {path} is nothing that `warmset price --json` wrote.") from None

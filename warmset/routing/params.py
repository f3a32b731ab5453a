"""A policy's numbers in device memory, and what a policy may know of a window.

A kernel reads its numbers from a `PolicyTable` when it runs, so a captured CUDA graph follows changes.
Shape letters: T rows, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warmset.errors import PolicyError


def as_float32(name: str, value: float) -> float:
    """The number rounded to float32 once; PolicyError where it is no number or not finite then."""
    try:
        rounded = torch.tensor(float(value), dtype=torch.float32).item()
    except (TypeError, ValueError):
        raise PolicyError(f"`{name}` must be a finite number. Got {value!r}.") from None
    if not math.isfinite(rounded):
        raise PolicyError(f"`{name}` must be a finite number in float32. Got {value!r}.")
    return rounded


def default_ranks(top_k: int) -> tuple[int, int]:
    """The last 40% of K ranks, at least one: 10 -> 6-9, 8 -> 5-7, 4 -> 3-3, 2 -> 1-1."""
    return top_k - max(1, top_k * 2 // 5), top_k - 1


def resolve_ranks(ranks: tuple[int, int] | None, top_k: int) -> tuple[int, int, str | None]:
    """(lo, hi, note): inclusive 0-based ranks of the tail; hi is capped at K-1 and the note says so.

    lo > hi means that no rank is in the tail.
    """
    if ranks is None:
        return *default_ranks(top_k), None
    lo, hi = check_ranks(ranks)
    if hi < top_k:
        return min(lo, top_k), hi, None
    return min(lo, top_k), top_k - 1, f"ranks {lo}-{hi} end at {top_k - 1}: a row has {top_k} picks"


def check_ranks(ranks: object) -> tuple[int, int]:
    """Two whole numbers, the first not negative."""
    if not isinstance(ranks, tuple | list) or len(ranks) != 2 or not all(type(r) is int for r in ranks):
        raise PolicyError(f"`ranks` must be two whole numbers (lo, hi). Got {ranks!r}.")
    if ranks[0] < 0:
        raise PolicyError(f"`ranks` must start at 0 or later. Got {ranks[0]}.")
    return ranks[0], ranks[1]


@dataclass(frozen=True, kw_only=True)
class PolicyTable:
    """One policy's numbers, one entry a layer, in device memory.

    value_L float32: the margin (or beta, strength, mass, weight, by policy). lo_L, hi_L int32: the tail's
    ranks; policies that protect the first picks keep their number in lo_L, MaxRank keeps `max_rank` in hi_L.
    """

    value_L: Tensor
    lo_L: Tensor
    hi_L: Tensor
    top_k: int
    notes: list[str] = field(default_factory=list)

    @classmethod
    def full(
        cls,
        num_layers: int,
        value: float,
        lo: int,
        hi: int,
        *,
        top_k: int,
        device: torch.device | str = "cpu",
    ):
        """The same numbers for every layer."""
        return cls(
            value_L=torch.full((num_layers,), as_float32("value", value), dtype=torch.float32, device=device),
            lo_L=torch.full((num_layers,), lo, dtype=torch.int32, device=device),
            hi_L=torch.full((num_layers,), hi, dtype=torch.int32, device=device),
            top_k=top_k,
        )

    @property
    def margin_L(self) -> Tensor:
        """value_L under the name it has for MarginSwap and WindowJoint."""
        return self.value_L

    def set_value(self, value: float, layer: int | None = None, *, name: str = "margin") -> None:
        """Writes the number in place, for one layer or all."""
        self.value_L[_layers(layer)] = as_float32(name, value)

    def set_ranks(self, ranks: tuple[int, int], layer: int | None = None) -> str | None:
        """Writes the tail's ranks in place; returns the note where hi was capped."""
        lo, hi, note = resolve_ranks(ranks, self.top_k)
        self.lo_L[_layers(layer)] = lo
        self.hi_L[_layers(layer)] = hi
        return note


def _layers(layer: int | None) -> slice | int:
    return slice(None) if layer is None else layer


@dataclass(kw_only=True)
class RouteContext:
    """What a policy may know of a window besides its scores and the residency.

    layer: index into the table. table: the policy's numbers; None takes them from the policy itself.
    mean_range_L float32: `RangeMeans.mean_L`, for CachePrior. position_T int64: positions of the rows in
    their sequence, which seed RandomSwap (0, 1, ... without them).
    """

    layer: int = 0
    table: PolicyTable | None = None
    mean_range_L: Tensor | None = None
    position_T: Tensor | None = None


class RangeMeans:
    """A layer's mean, over past committed rows, of (greatest - least finite score); CachePrior's yardstick.

    `observe` keeps the ranges of the window in flight, `commit` adds those of the rows that were committed,
    so a window never sees itself. Everything stays on the device.
    """

    def __init__(self, num_layers: int, max_rows: int, device: torch.device | str = "cpu") -> None:
        self.range_LT = torch.zeros(num_layers, max_rows, dtype=torch.float32, device=device)
        self.sum_L = torch.zeros(num_layers, dtype=torch.float64, device=device)
        self.num_rows = 0
        self.mean_L = torch.zeros(num_layers, dtype=torch.float32, device=device)

    def observe(self, layer: int, scores_TE: Tensor) -> None:
        """Keeps the ranges of this window's rows; nothing is counted yet."""
        self.observe_range(layer, score_range(scores_TE))

    def observe_range(self, layer: int, range_T: Tensor) -> None:
        """The same from ranges that are there already (`Routed.range_T`)."""
        self.range_LT[layer, : range_T.shape[0]] = range_T

    def commit(self, rows: int | list[int]) -> None:
        """Adds the ranges of the window's first `rows` rows, or of the rows listed, and renews the means."""
        chosen = list(range(rows)) if isinstance(rows, int) else rows
        if chosen:
            self.sum_L += self.range_LT[:, chosen].double().sum(dim=1)
            self.num_rows += len(chosen)
            self.mean_L.copy_(self.sum_L / self.num_rows)


def score_range(scores_TE: Tensor) -> Tensor:
    """float32 [T]: greatest minus least finite score of each row; 0 where none is finite."""
    finite_TE = scores_TE > -math.inf
    top_T = scores_TE.amax(dim=1)
    low_T = scores_TE.masked_fill(~finite_TE, math.inf).amin(dim=1)
    range_T = torch.where(finite_TE.any(dim=1), top_T - low_T, 0.0)
    return range_T.clamp(max=torch.finfo(torch.float32).max)

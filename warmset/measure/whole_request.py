"""What `bench window` is asked to measure in whole windows, and which legs that makes of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warmset.config import ROUTE_KERNELS, require
from warmset.measure.whole_input import WHOLE_SHAPES
from warmset.routing import MarginSwap, Policy

BUDGET_SEC = 230.0
TRACE_WINDOWS = 32
LEGS = ("off", "swap_serial", "route_fused")
MARGIN = 0.25
LEG_NAMES = {"serial": "swap_serial", "warp": "swap_warp", "fused": "route_fused"}
"""Route kernel -> the leg of the margin swap that it makes."""


@dataclass(kw_only=True)
class Request:
    """What to measure; checked before any work."""

    shape: str
    rows: list[int]
    colds: list[float]
    trace: Path | None = None
    slots: int | None = None
    """Experts that have slots, with a trace; None: as many of the shape's as 8,083 are of 24,576."""
    trace_windows: int = TRACE_WINDOWS
    """Of the trace, spread over it."""
    margin: float | None = None
    """Of the legs that swap; None: 0.25, or off where `route_kernel` asks for one leg."""
    route_kernel: str | None = None
    """The kernels of the one leg to measure; None: three legs."""
    budget_sec: float = BUDGET_SEC

    def __post_init__(self) -> None:
        require(self.shape in WHOLE_SHAPES, "shape", f"one of {', '.join(WHOLE_SHAPES)}", self.shape)
        experts = WHOLE_SHAPES[self.shape].experts
        for number in self.rows:
            require(number in experts.distinct, "rows", f"of {', '.join(map(str, experts.distinct))}", number)
        for mean in self.colds:
            require(0 <= mean <= 4, "cold-experts", "0 to 4 a layer", mean)
        require(self.budget_sec > 0, "budget-sec", "above 0", self.budget_sec)
        total = experts.layers * experts.experts
        if self.slots is None:
            self.slots = total * 8083 // 24576
        require(0 <= self.slots <= total, "slots", f"0 to {total}", self.slots)
        kernel = self.route_kernel
        require(
            kernel is None or kernel in ROUTE_KERNELS,
            "route-kernel",
            f"one of {', '.join(ROUTE_KERNELS)}",
            kernel,
        )
        if self.margin is None and kernel is None:
            self.margin = MARGIN
        if self.margin is not None:
            MarginSwap(margin=self.margin)

    def legs(self) -> dict[str, tuple[Policy | None, str]]:
        """Leg -> its policy and the kernels that route, over a trace."""
        swap = None if self.margin is None else MarginSwap(margin=self.margin)
        if self.route_kernel is not None:
            name = "off" if swap is None else LEG_NAMES[self.route_kernel]
            return {name: (swap, self.route_kernel)}
        return dict(zip(LEGS, ((None, "fused"), (swap, "serial"), (swap, "fused")), strict=True))

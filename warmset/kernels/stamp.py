"""A kernel that writes the device's clock into a place: when the work before it on its stream was done.

The clock (`%globaltimer`, ns) is one for the whole device, so stamps of different streams can be compared. It ticks
every 32 ns on an H200, on older devices every microsecond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import FP_OPTIONS


@triton.jit(do_not_specialize=["place"])
def stamp_kernel(stamp_N, place):
    """stamp_N[place] = the clock now, int64 ns."""
    tl.store(stamp_N + place, tl.extra.cuda.globaltimer())


def stamp(stamp_N: torch.Tensor, place: int) -> None:
    """Write the clock into `stamp_N[place]` (int64, on the device) when the stream gets there."""
    stamp_kernel[(1,)](stamp_N, place, **FP_OPTIONS)

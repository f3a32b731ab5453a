"""A kernel that only reads: the rate of memory that reading experts is measured against."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def read_only_kernel(data_N, out_1, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Read STEPS blocks of int32 and write nothing unless their sum is a number that random data does not give."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)  # 64-bit: the buffer is larger than 2**31 bytes
    total_N = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        total_N += tl.load(data_N + first + step * BLOCK + tl.arange(0, BLOCK))
    total = tl.sum(total_N)
    if total == 0x12345678:
        tl.store(out_1, total)


def read_only(data_N: torch.Tensor, out_1: torch.Tensor, block: int, steps: int, warps: int) -> int:
    """Read `data_N` (int32) once, whole blocks only; returns the bytes read."""
    programs = data_N.numel() // (block * steps)
    read_only_kernel[(programs,)](
        data_N, out_1, BLOCK=block, STEPS=steps, num_warps=warps, enable_fp_fusion=True
    )
    return programs * block * steps * 4

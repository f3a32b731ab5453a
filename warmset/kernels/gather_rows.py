"""Rows of a table that lies in pinned host memory, read in place by their index, inside a captured graph.

table   [N, D] in host memory, at an address that the device can read
id_R    [R]    int64, rows wanted
out_RD  [R, D] on the device
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(address, id_R, out_RD, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    table = address.to(tl.int64).to(tl.pointer_type(out_RD.dtype.element_ty))  # 64-bit: an address
    index = tl.load(id_R + row).to(tl.int64)  # 64-bit: a table of 45 billion numbers
    values = tl.load(table + index * D + d, mask=d < D, other=0.0)
    tl.store(out_RD + row * D + d, values, mask=d < D)


def gather_rows(address: int, id_R: torch.Tensor, out_RD: torch.Tensor) -> None:
    """Fill `out_RD` with the rows `id_R` (contiguous int64) of the table at `address`, in the dtype of `out_RD`."""
    rows, width = out_RD.shape
    if rows:
        gather_rows_kernel[(rows,)](
            address,
            id_R,
            out_RD,
            D=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            enable_fp_fusion=True,
        )

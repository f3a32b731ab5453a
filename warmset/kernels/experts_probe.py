"""Asks the device whether a kernel can read pinned host memory by its address.

It cannot everywhere (some virtual machines, some drivers under Windows); experts are then copied, not read in
place. The question is answered by reading: a pattern is copied by address and compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_from_kernel(address, out_N, count, BLOCK: tl.constexpr):
    """out[i] = the int32 at address + 4 i."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.int64).to(tl.pointer_type(tl.int32))  # 64-bit: an address
    tl.store(out_N + index, tl.load(source + index, mask=index < count, other=0), mask=index < count)


def copy_from(address: int, out_N: torch.Tensor) -> None:
    """Fill `out_N` (int32 [N], on the device) from the memory at `address`."""
    count = out_N.numel()
    copy_from_kernel[(triton.cdiv(count, 1024),)](address, out_N, count, BLOCK=1024, enable_fp_fusion=True)


def can_read(memory_B: torch.Tensor, device: torch.device) -> bool:
    """Whether a kernel on `device` reads `memory_B` (uint8, pinned host memory) as the host sees it.

    The bytes are used for a pattern and put back, so this may be asked of memory in use.
    """
    count = min(memory_B.numel() // 4, 4096)
    if count == 0:
        return False
    view_N = memory_B[: 4 * count].view(torch.int32)
    kept_N = view_N.clone()
    pattern_N = torch.arange(count, dtype=torch.int32) * 0x01000193 + 7
    out_N = torch.zeros(count, dtype=torch.int32, device=device)
    try:
        view_N.copy_(pattern_N)
        copy_from(view_N.data_ptr(), out_N)
        return torch.equal(out_N.cpu(), pattern_N)
    except RuntimeError:
        return False
    finally:
        view_N.copy_(kept_N)

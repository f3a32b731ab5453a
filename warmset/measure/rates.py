"""What the memory of this machine gives: the rates that floors are made of, measured in the same run."""

from __future__ import annotations

from functools import partial

import torch

from warmset.measure.clock import Replay, time_ms

READ_BYTES = 4 << 30
READ_FORMS = ((1024, 8, 4), (4096, 4, 8))
COPIES = 128


def hbm_read_gbs(device: torch.device) -> float:
    """GB/s of a kernel that only reads device memory; on a CPU the interpreter's, which says nothing."""
    from warmset.kernels.experts_read import read_only

    gpu = device.type == "cuda"
    size = READ_BYTES if gpu else 1 << 16
    data_N = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    out_1 = torch.zeros(1, dtype=torch.int32, device=device)
    best = 0.0
    for form in READ_FORMS if gpu else READ_FORMS[:1]:
        num_bytes = read_only(data_N, out_1, *form)
        best = max(best, num_bytes / Replay(partial(read_only, data_N, out_1, *form), device).ms() / 1e6)
    return best


def pcie_copy_gbs(rows_NB: torch.Tensor, device: torch.device) -> float:
    """GB/s of copies of one expert each from `rows_NB`, uint8 [N, nbytes] in pinned host memory."""
    count, nbytes = min(COPIES, len(rows_NB)), rows_NB.shape[1]
    target_NB = torch.empty(count, nbytes, dtype=torch.uint8, device=device)

    def copies() -> None:
        for index in range(count):
            target_NB[index].copy_(rows_NB[index], non_blocking=True)

    return count * nbytes / time_ms(copies, device, 5) / 1e6

"""Plain torch for `experts` and `experts_prompt`: the same inputs, tables of addresses included, on the CPU.

The matrices are read where the table points, as the kernels do it, and every step is taken in float64 but for the
one rounding that the kernels make on purpose (h in the dtype of the weights).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory at `address` as a tensor; the caller keeps it alive."""
    count = dtype.itemsize
    for length in shape:
        count *= length
    raw = (ctypes.c_uint8 * count).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def run_window(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    address_LE: torch.Tensor,
    *,
    layer: int,
    width: int,
    down_offset: int,
    activation: str,
) -> torch.Tensor:
    """Sum over ranks of weight * expert(x): float64 [T, H]. Picks of -1 or E add nothing.

    down_offset: elements from an expert's address to its down matrix.
    """
    hidden, dtype = x_TH.shape[1], x_TH.dtype
    num_experts = address_LE.shape[1]
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for row, ids_K in enumerate(ids_TK.tolist()):
        for rank, expert in enumerate(ids_K):
            if not 0 <= expert < num_experts:
                continue
            address = int(address_LE[layer, expert])
            gate_up = tensor_at(address, (2 * width, hidden), dtype).double()
            down = tensor_at(address + down_offset * dtype.itemsize, (hidden, width), dtype).double()
            gate, up = (gate_up @ x_TH[row].double()).chunk(2)
            h_I = (ACTIVATIONS[activation](gate) * up).to(dtype).double()
            out_TH[row] += weights_TK[row, rank].double() * (down @ h_I)
    return out_TH

"""The small steps between the matrix products of a window, each in one launch: norms, gates, activations.

transformers runs each as three to nine kernels, which is most of a window's launches. Roundings to the compute dtype
are where transformers has them. Every program works on one row, so its bits do not depend on the number of rows.

    N rows, D width of a row; G residual streams, H hidden; shapes of the arguments at each launcher
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

FP = {"enable_fp_fusion": False}


@triton.jit
def rms_norm_kernel(
    x_ND, weight_D, out_ND, x_row, x_group, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Root-mean-square norm of group `program_id(1)` of row `program_id(0)`."""
    row, group = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(x_ND + row.to(tl.int64) * x_row + group * x_group + d, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_D + group * D + d, mask=inside, other=0.0)
    if PLUS_ONE:
        y = x * (1.0 + weight.to(tl.float32))
    else:
        y = weight.to(tl.float32) * x.to(out_ND.dtype.element_ty).to(tl.float32)
    tl.store(out_ND + (row * GROUPS + group) * D + d, y.to(out_ND.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, plus_one: bool, groups: int = 1
) -> torch.Tensor:
    """Norm over the last dimension of x [..., D], or over each of its `groups` parts; contiguous, dtype of x.

    plus_one: y = x_hat * (1 + w), rounded once; else x_hat is rounded before it is multiplied by w.
    """
    width = x.shape[-1]
    row_stride = _row_stride(x)
    if row_stride is None:
        x, row_stride = x.contiguous(), width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    part = width // groups
    rows = x.numel() // width
    block = triton.next_power_of_2(part)
    rms_norm_kernel[(rows, groups)](
        x, weight_D, out, row_stride, part, eps,
        D=part, GROUPS=groups, BLOCK=block, PLUS_ONE=plus_one, num_warps=_warps(block), **FP,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def _row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row to the next where the rows of x [..., D] lie evenly, else None."""
    if x.stride(-1) != 1:
        return None
    dims = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1] if dims else x.shape[-1]


@triton.jit
def gated_norm_kernel(
    x_ND, gate_ptr, weight_D, out_ND, gate_row, gate_group, gate_head, eps,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One head of one row: norm, weight, and the activation of its gate."""
    line = tl.program_id(0)
    row, head = line // HEADS, line % HEADS
    d = tl.arange(0, BLOCK)
    inside = d < D
    dtype: tl.constexpr = out_ND.dtype.element_ty
    x = tl.load(x_ND + line * D + d, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_D + d, mask=inside, other=0.0)
    x = (weight.to(tl.float32) * x.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    at = gate_ptr + row * gate_row + (head // REPEAT) * gate_group + (head % REPEAT) * gate_head
    gate = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    act = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        act = gate * act
    tl.store(out_ND + line * D + d, (x * act).to(dtype), mask=inside)


def gated_norm(
    x_TNV: torch.Tensor,
    gate: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    *,
    repeat: int,
    group_stride: int,
    sigmoid: bool,
) -> torch.Tensor:
    """x [T, N, V] contiguous, normed by head and gated; [T, N * V].

    gate: [T, ...] with head n of row t at t * stride(0) + (n // repeat) * group_stride + (n % repeat) * V.
    """
    num_rows, heads, width = x_TNV.shape
    out = torch.empty(num_rows, heads * width, dtype=x_TNV.dtype, device=x_TNV.device)
    block = triton.next_power_of_2(width)
    gated_norm_kernel[(num_rows * heads,)](
        x_TNV, gate, weight_V, out, gate.stride(0), group_stride, width, eps,
        HEADS=heads, REPEAT=repeat, D=width, BLOCK=block, SIGMOID=sigmoid, num_warps=1, **FP,
    )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(x_NI2, out_NI, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    dtype: tl.constexpr = out_NI.dtype.element_ty
    gate = tl.load(x_NI2 + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_NI2 + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_NI + row * WIDTH + i, (act * up).to(dtype), mask=inside)


def silu_mul(x_NI2: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of contiguous x [N, 2 I] = (gate, up): [N, I]."""
    rows, width = x_NI2.shape[0], x_NI2.shape[1] // 2
    out_NI = torch.empty(rows, width, dtype=x_NI2.dtype, device=x_NI2.device)
    block = min(1024, triton.next_power_of_2(width))
    silu_mul_kernel[(rows, triton.cdiv(width, block))](
        x_NI2, out_NI, WIDTH=width, BLOCK=block, num_warps=4, **FP
    )
    return out_NI


@triton.jit
def stream_gates_kernel(
    low_ND, act_NR, inject_NG, RANK: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, INJECT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    WIDTH: tl.constexpr = RANK + (G if INJECT else 0)
    i = tl.arange(0, BLOCK)
    dtype: tl.constexpr = low_ND.dtype.element_ty
    x = tl.load(low_ND + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    x = (x / G).to(dtype).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    tl.store(act_NR + row * RANK + i, (x * sigmoid).to(dtype), mask=i < RANK)
    if INJECT:
        at = inject_NG + row * G + i - RANK
        tl.store(at, (2.0 * sigmoid.to(dtype).to(tl.float32)).to(dtype), mask=(i >= RANK) & (i < WIDTH))


def stream_gates(low_ND: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a hyper-connection's low-rank product [N, rank (+ G)]: silu(x / G) [N, rank] and 2 sigmoid(x / G) [N, G]."""
    rows, width = low_ND.shape
    act_NR = torch.empty(rows, rank, dtype=low_ND.dtype, device=low_ND.device)
    inject_NG = torch.empty(rows, streams, dtype=low_ND.dtype, device=low_ND.device)
    block = triton.next_power_of_2(width)
    stream_gates_kernel[(rows,)](
        low_ND, act_NR, inject_NG, RANK=rank, G=streams, BLOCK=block, INJECT=width > rank, num_warps=4, **FP,
    )  # fmt: skip
    return act_NR, inject_NG


@triton.jit
def stream_mix_kernel(
    mix_NGH, normed_NGH, out_NH, H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    dtype: tl.constexpr = out_NH.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for g in tl.static_range(G):
        at = (row * G + g) * H + h
        mix = tl.load(mix_NGH + at, mask=inside, other=0.0).to(tl.float32)
        weight = (1.0 / (1.0 + tl.exp(-mix))).to(dtype).to(tl.float32)
        x = tl.load(normed_NGH + at, mask=inside, other=0.0).to(tl.float32)
        total += (weight * x).to(dtype).to(tl.float32)
    tl.store(out_NH + row * H + h, (total / G).to(dtype), mask=inside)


def stream_mix(mix: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    """Mean over the streams of sigmoid(mix) * normed; both contiguous [N, G * H]: [N, H]."""
    rows, hidden = mix.shape[0], mix.shape[1] // streams
    out_NH = torch.empty(rows, hidden, dtype=mix.dtype, device=mix.device)
    block = min(512, triton.next_power_of_2(hidden))
    stream_mix_kernel[(rows, triton.cdiv(hidden, block))](
        mix, normed, out_NH, H=hidden, G=streams, BLOCK=block, num_warps=4, **FP,
    )  # fmt: skip
    return out_NH

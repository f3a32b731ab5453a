"""Kernels that run the experts of many rows, as a prompt has them: tiles of rows that share an expert.

    picks sorted by expert --> gate_up_many: h --> down_many: y, a line a pick --> sum_ranks: out

Shape letters as in `experts`; M rows of a tile, S picks in order of their expert.

    tiles_N3   [N, 3] int64  for each tile: the expert's address, its first and its last-plus-one place in order_S
    order_S    [S]    int32  picks (row * K + rank) in order of their expert
    h_SI       [S, I] dtype  what `gate_up_many` leaves, in that order
    y_PH       [P, H] dtype  one line a pick, at the pick's own place

A launch takes the tiles of any experts, resident or landed in a buffer: it only sees addresses, so the bits of a
row do not depend on which launch an expert fell into.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from warmset.kernels.experts import ACTIVATIONS, _activate

BLOCK_M = 64
BLOCK_N = 64
BLOCK_K = 64


@triton.jit
def _tile(tiles_N3, order_S, M: tl.constexpr):
    """The address of this tile's expert, its places [M] in the order, which exist, and their picks [M]."""
    entry = tiles_N3 + tl.program_id(1) * 3
    address = tl.load(entry)
    place_M = (tl.load(entry + 1) + tl.arange(0, M)).to(tl.int32)
    inside_M = place_M < tl.load(entry + 2)
    pick_M = tl.load(order_S + place_M, mask=inside_M, other=0)
    return address, place_M, inside_M, pick_M


@triton.jit
def gate_up_many_kernel(
    x_TH, tiles_N3, order_S, h_SI,
    K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, ACTIVATION: tl.constexpr,  # noqa: E741
    M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h = act(x Wg') * (x Wu') for one tile of rows and N columns."""
    address, place_M, inside_M, pick_M = _tile(tiles_N3, order_S, M)
    row_M = (pick_M // K).to(tl.int64)  # 64-bit: T * H may pass 2**31 elements
    gate_IH = tl.multiple_of(address.to(tl.pointer_type(x_TH.dtype.element_ty)), 16)
    up_IH = tl.multiple_of(gate_IH + I * H, 16) if (I * H) % 8 == 0 else gate_IH + I * H
    i_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, BLOCK_K)
    in_I = i_N < I
    gate_MN = tl.zeros((M, N), tl.float32)
    up_MN = tl.zeros((M, N), tl.float32)
    for start in range(0, H, BLOCK_K):
        in_H = start + k_K < H
        x_at_MK = x_TH + row_M[:, None] * H + (start + k_K)[None, :]
        where_KN = i_N[None, :] * H + (start + k_K)[:, None]
        if (H % BLOCK_K == 0) and (I % N == 0):
            x_MK = tl.load(x_at_MK, mask=inside_M[:, None], other=0.0)
            gate_KN = tl.load(gate_IH + where_KN)
            up_KN = tl.load(up_IH + where_KN)
        else:
            inside = in_H[:, None] & in_I[None, :]
            x_MK = tl.load(x_at_MK, mask=inside_M[:, None] & in_H[None, :], other=0.0)
            gate_KN = tl.load(gate_IH + where_KN, mask=inside, other=0.0)
            up_KN = tl.load(up_IH + where_KN, mask=inside, other=0.0)
        gate_MN = tl.dot(x_MK, gate_KN, gate_MN, input_precision="ieee")
        up_MN = tl.dot(x_MK, up_KN, up_MN, input_precision="ieee")
    h_MN = (_activate(gate_MN, ACTIVATION) * up_MN).to(h_SI.dtype.element_ty)
    where_MN = place_M.to(tl.int64)[:, None] * I + i_N[None, :]
    tl.store(h_SI + where_MN, h_MN, mask=inside_M[:, None] & in_I[None, :])


@triton.jit
def down_many_kernel(
    h_SI, tiles_N3, order_S, y_PH,
    H: tl.constexpr, I: tl.constexpr, DOWN_OFFSET: tl.constexpr,  # noqa: E741
    M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = h Wd' for one tile of rows and N columns, put at the picks' own places."""
    address, place_M, inside_M, pick_M = _tile(tiles_N3, order_S, M)
    down_HI = tl.multiple_of(address.to(tl.pointer_type(h_SI.dtype.element_ty)) + DOWN_OFFSET, 16)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, BLOCK_K)
    in_H = n_N < H
    y_MN = tl.zeros((M, N), tl.float32)
    for start in range(0, I, BLOCK_K):
        in_I = start + k_K < I
        h_at_MK = h_SI + place_M.to(tl.int64)[:, None] * I + (start + k_K)[None, :]
        where_KN = n_N[None, :] * I + (start + k_K)[:, None]
        if (I % BLOCK_K == 0) and (H % N == 0):
            h_MK = tl.load(h_at_MK, mask=inside_M[:, None], other=0.0)
            down_KN = tl.load(down_HI + where_KN)
        else:
            h_MK = tl.load(h_at_MK, mask=inside_M[:, None] & in_I[None, :], other=0.0)
            down_KN = tl.load(down_HI + where_KN, mask=in_I[:, None] & in_H[None, :], other=0.0)
        y_MN = tl.dot(h_MK, down_KN, y_MN, input_precision="ieee")
    where_MN = pick_M.to(tl.int64)[:, None] * H + n_N[None, :]
    tl.store(y_PH + where_MN, y_MN.to(y_PH.dtype.element_ty), mask=inside_M[:, None] & in_H[None, :])


@triton.jit
def sum_ranks_kernel(
    y_PH, ids_TK, weights_TK, out_TH,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over ranks, in order, of weight * y, in float32; padding adds nothing."""
    row = tl.program_id(0).to(tl.int64)
    h_N = tl.program_id(1) * N + tl.arange(0, N)
    total_N = tl.zeros((N,), tl.float32)
    for rank in tl.static_range(K):
        pick = row * K + rank
        expert = tl.load(ids_TK + pick)
        if (expert >= 0) & (expert < E):
            weight = tl.load(weights_TK + pick).to(tl.float32)
            total_N += weight * tl.load(y_PH + pick * H + h_N, mask=h_N < H, other=0.0).to(tl.float32)
    tl.store(out_TH + row * H + h_N, total_N.to(out_TH.dtype.element_ty), mask=h_N < H)


def gate_up_many(
    x_TH: torch.Tensor,
    tiles_N3: torch.Tensor,
    order_S: torch.Tensor,
    h_SI: torch.Tensor,
    *,
    top_k: int,
    activation: str,
) -> None:
    """Fill the lines of `h_SI` that the tiles name."""
    hidden, width = x_TH.shape[1], h_SI.shape[1]
    gate_up_many_kernel[(triton.cdiv(width, BLOCK_N), len(tiles_N3))](
        x_TH, tiles_N3, order_S, h_SI, K=top_k, H=hidden, I=width, ACTIVATION=ACTIVATIONS[activation],
        M=BLOCK_M, N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def down_many(
    h_SI: torch.Tensor,
    tiles_N3: torch.Tensor,
    order_S: torch.Tensor,
    y_PH: torch.Tensor,
    *,
    down_offset: int,
) -> None:
    """Fill the lines of `y_PH` that the tiles name. down_offset: elements from an address to the down matrix."""
    hidden, width = y_PH.shape[1], h_SI.shape[1]
    down_many_kernel[(triton.cdiv(hidden, BLOCK_N), len(tiles_N3))](
        h_SI, tiles_N3, order_S, y_PH, H=hidden, I=width, DOWN_OFFSET=down_offset,
        M=BLOCK_M, N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def sum_ranks(
    y_PH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    out_TH: torch.Tensor,
    *,
    num_experts: int,
) -> None:
    """Weighted sum over the ranks of each row: `out_TH` [T, H]."""
    (num_rows, top_k), hidden = ids_TK.shape, out_TH.shape[1]
    sum_ranks_kernel[(num_rows, triton.cdiv(hidden, 256))](
        y_PH, ids_TK, weights_TK, out_TH, E=num_experts, K=top_k, H=hidden, N=256,
        num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip

"""Attention of a window's few rows over a long static cache: keys split over many programs, then joined.

    query, keys, values, mask --attend--> partial sums of each split --join--> out

Tiles of keys that no row may see are passed over, so neither the unused end of the cache nor blocks that an indexer
left out are read. A tile holds 16 (row, head) pairs of one key head, so a row's bits do not depend on T.

Shape letters: T rows, A heads, B key heads, S places of the cache, D width of a head, G = A / B, P splits.

    query  [A, T, D]   keys, values  [B, S, D]   mask  [T, S] bool
    part_PAT[D]  float32 weighted sums, greatest score and sum of each split
    out    [T, A, D]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 16
BLOCK_S = 64
MAX_SPLITS = 64


@triton.jit
def attend_kernel(
    query_ptr, query_head, query_row, keys_ptr, values_ptr, key_head_stride, mask_ptr, mask_row,
    sum_ptr, peak_ptr, total_ptr, num_places, places_a_split, scale,
    T: tl.constexpr, A: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    key_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = tile * TILE + tl.arange(0, TILE)
    row, head = pair // G, key_head * G + pair % G
    real = pair < T * G
    d = tl.arange(0, D)
    query_MD = tl.load(
        query_ptr + head[:, None] * query_head + row[:, None] * query_row + d[None, :],
        mask=real[:, None], other=0.0,
    )  # fmt: skip
    keys_at = keys_ptr + key_head.to(tl.int64) * key_head_stride
    values_at = values_ptr + key_head.to(tl.int64) * key_head_stride
    sum_MD = tl.zeros((TILE, D), tl.float32)
    peak_M = tl.full((TILE,), float("-inf"), tl.float32)
    total_M = tl.zeros((TILE,), tl.float32)
    first = split * places_a_split
    for start in range(first, tl.minimum(first + places_a_split, num_places), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        seen_MS = tl.load(
            mask_ptr + row[:, None] * mask_row + s[None, :],
            mask=real[:, None] & (s < num_places)[None, :], other=0,
        ) != 0  # fmt: skip
        if tl.max(tl.max(seen_MS.to(tl.int32), 1), 0) > 0:
            there = (s < num_places)[:, None]
            key_SD = tl.load(keys_at + s[:, None].to(tl.int64) * D + d[None, :], mask=there, other=0.0)
            score_MS = tl.dot(query_MD, tl.trans(key_SD), input_precision="ieee") * scale
            score_MS = tl.where(seen_MS, score_MS, float("-inf"))
            new_M = tl.maximum(peak_M, tl.max(score_MS, 1))
            base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
            old_M = tl.exp(peak_M - base_M)
            part_MS = tl.exp(score_MS - base_M[:, None])
            total_M = total_M * old_M + tl.sum(part_MS, 1)
            value_SD = tl.load(values_at + s[:, None].to(tl.int64) * D + d[None, :], mask=there, other=0.0)
            sum_MD = sum_MD * old_M[:, None]
            sum_MD = tl.dot(part_MS.to(value_SD.dtype), value_SD, sum_MD, input_precision="ieee")
            peak_M = new_M
    line = (split * A + head) * T + row
    tl.store(sum_ptr + line[:, None].to(tl.int64) * D + d[None, :], sum_MD, mask=real[:, None])
    tl.store(peak_ptr + line, peak_M, mask=real)
    tl.store(total_ptr + line, total_M, mask=real)


@triton.jit
def join_kernel(
    sum_ptr, peak_ptr, total_ptr, out_TAD,
    T: tl.constexpr, A: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, PAD)
    d = tl.arange(0, D)
    line = (p * A + head) * T + row
    peak_P = tl.load(peak_ptr + line, mask=p < P, other=float("-inf"))
    total_P = tl.load(total_ptr + line, mask=p < P, other=0.0)
    peak = tl.max(peak_P, 0)
    factor_P = tl.exp(peak_P - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(total_P * factor_P, 0)
    sum_PD = tl.load(sum_ptr + line[:, None].to(tl.int64) * D + d[None, :], mask=(p < P)[:, None], other=0.0)
    out_D = tl.sum(sum_PD * factor_P[:, None], 0) / total
    tl.store(out_TAD + (row * A + head) * D + d, out_D.to(out_TAD.dtype.element_ty))


def why_not(head_dim: int) -> str | None:
    """Why the kernel cannot run heads of this width, as the end of a sentence, or None."""
    if head_dim < 16 or head_dim > 256 or head_dim != triton.next_power_of_2(head_dim):
        return f"heads are {head_dim} wide, which is no power of two from 16 to 256"
    return None


def window_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask_TS: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of `query` [A, T, D] over `keys`, `values` [B, S, D], each contiguous in its last dimension.

    mask_TS: bool, what each row may see, at least one place. Returns [T, A, D].
    """
    (heads, num_rows, width), (key_heads, places, _) = query.shape, keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and query.stride(2) == 1 and mask_TS.stride(1) == 1
    blocks = triton.cdiv(places, BLOCK_S)
    a_split = triton.cdiv(blocks, min(MAX_SPLITS, blocks))
    splits = triton.cdiv(blocks, a_split)
    group = heads // key_heads
    make: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    sums = torch.empty(splits, heads, num_rows, width, **make)
    peaks, totals = torch.empty(splits, heads, num_rows, **make), torch.empty(splits, heads, num_rows, **make)
    out_TAD = torch.empty(num_rows, heads, width, dtype=query.dtype, device=query.device)
    attend_kernel[(key_heads, triton.cdiv(num_rows * group, TILE), splits)](
        query, query.stride(0), query.stride(1), keys, values, keys.stride(0),
        mask_TS.view(torch.uint8), mask_TS.stride(0),
        sums, peaks, totals, places, a_split * BLOCK_S, scale,
        T=num_rows, A=heads, G=group, D=width, TILE=TILE, BLOCK_S=BLOCK_S,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    join_kernel[(heads, num_rows)](
        sums, peaks, totals, out_TAD,
        T=num_rows, A=heads, D=width, P=splits, PAD=triton.next_power_of_2(splits),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out_TAD

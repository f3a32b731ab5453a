"""A QSA indexer's picks for a window's few rows: which blocks of the cache each row may attend to, in four launches.

    rows     queries: norm, rotary; the rows' own index keys into the cache; keys of the blocks that the window touches
    scores   sum over heads of relu(query . block key)
    pick     the best blocks of each row, of equal scores the first
    mask     places of those blocks, and those after the last whole block

Every program works on one row or one block, so a row's bits do not depend on the number of rows.

Shape letters: T rows, N heads of the indexer, D width of an index key, R rotary width, S places, B = S // ratio blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .window_state import IndexWeights

SCORE_BLOCKS = 32
FP = {"enable_fp_fusion": False}


@triton.jit
def _normed(x, weight, inverse, dtype: tl.constexpr, PLUS_ONE: tl.constexpr):
    y = x * inverse
    if PLUS_ONE:
        return (y * (1.0 + weight)).to(dtype).to(tl.float32)
    return (weight * y.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _turned(y, partner, cos, sin, d, dtype: tl.constexpr, R: tl.constexpr):
    """Rotary embedding by halves, rounded where transformers rounds; `partner` is y's other half, sign included."""
    left = (y * cos).to(dtype).to(tl.float32)
    right = (partner * sin).to(dtype).to(tl.float32)
    return tl.where(d < R, left + right, y).to(dtype)


@triton.jit
def rows_kernel(
    qk_TX, qk_row, cos_TR, sin_TR, angle_row, query_weight_D, key_weight_D, eps_query, eps_key,
    begin_2, index_keys_SD, block_keys_BD, block_cos_BR, block_sin_BR, query_TND,
    num_blocks,
    T: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr,
    PAD_D: tl.constexpr, PAD_RATIO: tl.constexpr, QUERY_PLUS_ONE: tl.constexpr, KEY_PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Program of a row's head, of a row's key (head N), or, after T * (N + 1), of a block."""
    dtype: tl.constexpr = query_TND.dtype.element_ty
    program = tl.program_id(0)
    start = tl.load(begin_2 + 1)
    d = tl.arange(0, PAD_D)
    inside = d < D
    HALF: tl.constexpr = R // 2
    other = tl.where(d < HALF, d + HALF, tl.where(d < R, d - HALF, d))
    sign = tl.where(d < HALF, -1.0, 1.0)
    if program < T * (N + 1):
        row, head = program // (N + 1), program % (N + 1)
        at = qk_TX + row * qk_row + head * D
        raw = tl.load(at + d, mask=inside, other=0.0)
        if head == N:
            tl.store(index_keys_SD + (start + row) * D + d, raw, mask=inside)
        else:
            x = raw.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps_query)
            weight = tl.load(query_weight_D + d, mask=inside, other=0.0).to(tl.float32)
            x_other = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
            weight_other = tl.load(query_weight_D + other, mask=inside, other=0.0).to(tl.float32)
            y = _normed(x, weight, inverse, dtype, QUERY_PLUS_ONE)
            partner = sign * _normed(x_other, weight_other, inverse, dtype, QUERY_PLUS_ONE)
            cos = tl.load(cos_TR + row * angle_row + d, mask=d < R, other=0.0).to(tl.float32)
            sin = tl.load(sin_TR + row * angle_row + d, mask=d < R, other=0.0).to(tl.float32)
            turned = _turned(y, partner, cos, sin, d, dtype, R)
            tl.store(query_TND + (row * N + head) * D + d, turned, mask=inside)
    else:
        block = start // RATIO + (program - T * (N + 1))
        if block < num_blocks:
            r = tl.arange(0, PAD_RATIO)
            place = block * RATIO + r
            fresh = (place >= start) & (place < start + T)
            old = (r < RATIO) & ~fresh
            fresh_at = qk_TX + (place - start) * qk_row + N * D
            old_at = index_keys_SD + place * D
            key = tl.load(old_at[:, None] + d[None, :], mask=old[:, None] & inside[None, :], other=0.0)
            key += tl.load(
                fresh_at[:, None] + d[None, :],
                mask=((r < RATIO) & fresh)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            key_other = tl.load(
                old_at[:, None] + other[None, :], mask=old[:, None] & inside[None, :], other=0.0
            )
            key_other += tl.load(
                fresh_at[:, None] + other[None, :],
                mask=((r < RATIO) & fresh)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            x = (tl.sum(key.to(tl.float32), 0) / RATIO).to(dtype).to(tl.float32)
            x_other = (tl.sum(key_other.to(tl.float32), 0) / RATIO).to(dtype).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps_key)
            weight = tl.load(key_weight_D + d, mask=inside, other=0.0).to(tl.float32)
            weight_other = tl.load(key_weight_D + other, mask=inside, other=0.0).to(tl.float32)
            y = _normed(x, weight, inverse, dtype, KEY_PLUS_ONE)
            partner = sign * _normed(x_other, weight_other, inverse, dtype, KEY_PLUS_ONE)
            cos = tl.load(block_cos_BR + block * R + d, mask=d < R, other=0.0).to(tl.float32)
            sin = tl.load(block_sin_BR + block * R + d, mask=d < R, other=0.0).to(tl.float32)
            turned = _turned(y, partner, cos, sin, d, dtype, R)
            tl.store(block_keys_BD + block * D + d, turned, mask=inside)


@triton.jit
def scores_kernel(
    query_TND, block_keys_BD, begin_2, scores_TB, num_blocks, root,
    N: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, PAD_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK_B blocks for one row; -inf where the block is not whole yet."""
    row = tl.program_id(0)
    whole = (tl.load(begin_2 + 1) + row + 1) // RATIO
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, PAD_D)
    there = b < whole
    total_B = tl.zeros((BLOCK_B,), tl.float32)
    key_BD = tl.load(
        block_keys_BD + b[:, None].to(tl.int64) * D + d[None, :],
        mask=there[:, None] & (d < D)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    for head in tl.static_range(N):
        query_D = tl.load(query_TND + (row * N + head) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total_B += tl.maximum(tl.sum(key_BD * query_D[None, :], 1), 0.0)
    score_B = tl.where(there, total_B / root, float("-inf"))
    tl.store(scores_TB + row * num_blocks + b, score_B, mask=b < num_blocks)


@triton.jit
def pick_kernel(
    scores_TB, picked_TB, num_blocks, TOP: tl.constexpr, PAD_B: tl.constexpr
):  # fmt: skip
    """The TOP best blocks of one row. No score is below 0, so its bits order it; -inf has a negative key."""
    row = tl.program_id(0)
    b = tl.arange(0, PAD_B)
    score_B = tl.load(scores_TB + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    key_B = tl.where(score_B == float("-inf"), -1, score_B.to(tl.int32, bitcast=True))
    least = 0
    for step in range(31):
        candidate = least | (1 << (30 - step))
        count = tl.sum((key_B >= candidate).to(tl.int32), 0)
        least = tl.where(count >= TOP, candidate, least)
    above_B = key_B > least
    tie_B = key_B == least
    left = TOP - tl.sum(above_B.to(tl.int32), 0)
    picked_B = above_B | (tie_B & (tl.cumsum(tie_B.to(tl.int32), 0) <= left))
    tl.store(picked_TB + row * num_blocks + b, picked_B.to(tl.uint8), mask=b < num_blocks)


@triton.jit
def mask_kernel(
    picked_TB, begin_2, mask_TS, num_blocks, num_places, RATIO: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    whole = (tl.load(begin_2 + 1) + row + 1) // RATIO
    block = s // RATIO
    picked = tl.load(picked_TB + row * num_blocks + block, mask=block < num_blocks, other=0)
    seen = (picked != 0) | (s >= whole * RATIO)
    tl.store(mask_TS + row.to(tl.int64) * num_places + s, seen.to(tl.uint8), mask=s < num_places)


def index_blocks(
    qk_TX: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    weights: IndexWeights,
    begin_2: torch.Tensor,
    index_keys_SD: torch.Tensor,
    block_keys_BD: torch.Tensor,
    block_cos_BR: torch.Tensor,
    block_sin_BR: torch.Tensor,
) -> torch.Tensor:
    """Which places each row of the window at `begin_2[1]` may see, bool [T, S]; places to come count as seen.

    qk_TX: [T, (N + 1) D], the heads' queries and the row's key; cos, sin: of the rows and of the blocks' first places.
    The rows' keys and the touched blocks' keys are written into index_keys_SD and block_keys_BD.
    """
    num_rows, (blocks, width) = len(qk_TX), block_keys_BD.shape
    heads, places, device = weights.heads, len(index_keys_SD), qk_TX.device
    assert qk_TX.stride(1) == cos_TR.stride(1) == sin_TR.stride(1) == 1
    assert (
        cos_TR.stride(0) == sin_TR.stride(0) and block_cos_BR.is_contiguous() and block_sin_BR.is_contiguous()
    )
    assert index_keys_SD.is_contiguous() and block_keys_BD.is_contiguous()
    pad = triton.next_power_of_2(width)
    touched = (num_rows + weights.ratio - 2) // weights.ratio + 1
    query_TND = torch.empty(num_rows, heads, width, dtype=qk_TX.dtype, device=device)
    rows_kernel[(num_rows * (heads + 1) + touched,)](
        qk_TX, qk_TX.stride(0), cos_TR, sin_TR, cos_TR.stride(0),
        weights.query_D, weights.key_D, weights.query_eps, weights.key_eps,
        begin_2, index_keys_SD, block_keys_BD, block_cos_BR, block_sin_BR, query_TND, blocks,
        T=num_rows, N=heads, D=width, R=cos_TR.shape[1], RATIO=weights.ratio,
        PAD_D=pad, PAD_RATIO=triton.next_power_of_2(weights.ratio),
        QUERY_PLUS_ONE=weights.query_plus_one, KEY_PLUS_ONE=weights.key_plus_one, num_warps=4, **FP,
    )  # fmt: skip
    scores_TB = torch.empty(num_rows, blocks, dtype=torch.float32, device=device)
    scores_kernel[(num_rows, triton.cdiv(blocks, SCORE_BLOCKS))](
        query_TND, block_keys_BD, begin_2, scores_TB, blocks, float(width**0.5),
        N=heads, D=width, RATIO=weights.ratio, PAD_D=pad, BLOCK_B=SCORE_BLOCKS, num_warps=4, **FP,
    )  # fmt: skip
    picked_TB = torch.empty(num_rows, blocks, dtype=torch.uint8, device=device)
    pad_blocks = triton.next_power_of_2(blocks)
    pick_kernel[(num_rows,)](
        scores_TB, picked_TB, blocks, TOP=weights.top, PAD_B=pad_blocks,
        num_warps=max(1, min(16, pad_blocks // 512)), **FP,
    )  # fmt: skip
    mask_TS = torch.empty(num_rows, places, dtype=torch.uint8, device=device)
    mask_kernel[(num_rows, triton.cdiv(places, 1024))](
        picked_TB, begin_2, mask_TS, blocks, places, RATIO=weights.ratio, BLOCK_S=1024, num_warps=4, **FP,
    )  # fmt: skip
    return mask_TS.view(torch.bool)

"""Packed keys: a row's scores, experts and residency as one distinct unsigned integer each.

A key holds a score's order above, below it the expert's index, turned round, and the lowest bit says cold. Keys are
distinct, so one warp reduction (REDUX) finds the next pick with its index and residency, ties in order; `keys - last`
wraps round, which puts everything below `last` on top, so a round of top-k needs no mask.

32 bits do not hold a float32 and an index. The key keeps the high bits of the part of the row that can matter: from
`floor`, the least of the 32 lanes' greatest scores (at least 32 experts reach it), to the row's greatest. `lost` says
whether bits were dropped; two neighbours that agree in all bits kept are then in an order that is not known. Keys of
64 bits, and of 32 from bf16, hold everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import KEY_OF_MINUS_INF, order_key


@triton.jit
def pack(score, slot, expert, WIDE: tl.constexpr, FROM_BF16: tl.constexpr, BITS: tl.constexpr):
    """(keys, lost): distinct unsigned keys, and nonzero where scores that differ may agree in the bits kept."""
    key = order_key(score)
    low = ((1 << BITS) - 1 - expert).to(tl.uint32) * 2 + (slot.to(tl.uint32, bitcast=True) >> 31)
    if WIDE:
        keys = (key.to(tl.uint64) << 32) | low.to(tl.uint64)
        lost = tl.max(key, 0) * 0
    elif FROM_BF16:
        keys = (key & 0xFFFF0000) | low
        lost = tl.max(key, 0) * 0
    else:
        in_lane = tl.max(tl.reshape(key, [1 << (BITS - 7), 32, 4]), 2)
        floor = tl.min(tl.max(in_lane, 0), 0)
        # Length of top - floor in bits, from the exponent of its float32; rounded up it costs a bit, no more.
        span = tl.max(key, 0) - floor
        length = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
        shift = tl.maximum(length + BITS + 1 - 32, 0).to(tl.uint32)
        above = tl.maximum(key, floor) - floor
        kept = above >> shift
        keys = (kept << (BITS + 1)) | low
        lost = tl.max(above & ((1 << shift) - 1), 0)
    return keys, lost


@triton.jit
def next_below(keys, last):
    """The greatest key below `last`; one that is not below it where there is none."""
    return last + tl.max(keys - last, 0)


@triton.jit
def same_bits(key, other, SHIFT: tl.constexpr):
    """Whether two keys agree in all bits of their scores."""
    return ((key ^ other) >> SHIFT) == 0


@triton.jit
def expert_of(key, BITS: tl.constexpr):
    return (1 << BITS) - 1 - ((key >> 1) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def pick_next(
    keys, last, cold_bits, kept, own, tied, rank, lane, protect, BITS: tl.constexpr, SHIFT: tl.constexpr
):
    """One round of `own_pick`: what was known after `rank` picks, after one more."""
    below = next_below(keys, last)
    tied = tied | same_bits(below, last, SHIFT)
    cold_bits |= (below & 1).to(tl.int32) << rank
    kept = tl.where(rank < protect, below, kept)
    own = tl.where(lane == rank, expert_of(below, BITS), own)
    return below, cold_bits, kept, own, tied


@triton.jit
def is_minus_inf(key, SHIFT: tl.constexpr):
    """Whether the score in a key of 64 bits, or of 32 from bf16, is -inf."""
    return (key >> SHIFT) == (KEY_OF_MINUS_INF if SHIFT == 32 else KEY_OF_MINUS_INF >> 16)


@triton.jit
def own_pick(keys, lost, lane, protect, K: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """(own, cold_bits, last, kept, in_error, unsure): the router's own pick, rank r in lane r.

    cold_bits: bit r is set where pick r is cold. last: key of the last pick. kept: key of pick `protect` - 1.
    unsure: the bits kept do not settle the order.
    """
    last = tl.max(keys, 0)
    kept = last
    cold_bits = (last & 1).to(tl.int32)
    own = tl.where(lane == 0, expert_of(last, BITS), -1)
    tied = last != last
    if SHIFT == 32:  # rare: one copy of the round, in a loop
        for rank in range(1, K):
            last, cold_bits, kept, own, tied = pick_next(
                keys, last, cold_bits, kept, own, tied, rank, lane, protect, BITS, SHIFT
            )
    else:
        for rank in tl.static_range(1, K):
            last, cold_bits, kept, own, tied = pick_next(
                keys, last, cold_bits, kept, own, tied, rank, lane, protect, BITS, SHIFT
            )
    if SHIFT == BITS + 1:
        tied = tied | same_bits(next_below(keys, last), last, SHIFT)
        # Bucket 0 holds all that lies at `floor` or below: its order is not known.
        unsure = (tied & (lost != 0)) | ((last >> SHIFT) == 0)
        in_error = last != last
    else:
        unsure = last != last
        in_error = is_minus_inf(last, SHIFT)
    return own, cold_bits, last, kept, in_error, unsure

"""A third form of SPEC-routing in plain Python, for tests: lists and loops, no tensor, nothing of warmset.

Written from the specification's sentences, not from the package. A row is a list of floats; resident is a set.
"""

from __future__ import annotations

import math
import struct

FLOAT32_MAX = 3.4028234663852886e38


def f32(x: float) -> float:
    """x rounded to float32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def clean(row: list[float]) -> list[float]:
    out = []
    for x in row:
        if math.isnan(x):
            x = -math.inf
        elif x == math.inf:
            x = FLOAT32_MAX
        out.append(x)
    return out


def ranking(row: list[float]) -> list[int]:
    """Experts above -inf, best first, the smaller index first among equals."""
    real = [e for e in range(len(row)) if row[e] > -math.inf]
    return sorted(real, key=lambda e: (-row[e], e))


def best(row: list[float], candidates) -> int | None:
    found = None
    for e in sorted(candidates):
        if row[e] > -math.inf and (found is None or row[e] > row[found]):
            found = e
    return found


def own(row: list[float], k: int) -> list[int] | None:
    """The router's pick, or None for a row in error."""
    order = ranking(row)
    return order[:k] if len(order) >= k else None


def margin_swap(row, ids, resident, margin, lo, hi):
    """(ids, tail_cold, swaps) by section 2, step by step."""
    ids, tail_cold, swaps = list(ids), 0, 0
    for r in range(lo, min(hi, len(ids) - 1) + 1):
        e = ids[r]
        if e < 0 or e >= len(row) or e in resident:
            continue
        tail_cold += 1
        f = best(row, [x for x in resident if x not in ids])
        if f is not None and f32(row[e] - row[f]) <= f32(margin):
            ids[r] = f
            swaps += 1
    return ids, tail_cold, swaps


def window_joint(rows, k, resident, margin, lo, hi):
    """Ids of each row by section 8; None for a row in error."""
    owns = [own(row, k) for row in rows]
    after = [
        None if o is None else margin_swap(row, o, resident, margin, lo, hi)[0]
        for row, o in zip(rows, owns, strict=True)
    ]
    read = {e for ids in after if ids for e in ids if e not in resident}
    out = []
    for row, o, ids in zip(rows, owns, after, strict=True):
        if o is None:
            out.append(None)
            continue
        ids = [o[r] if ids[r] != o[r] and o[r] in read else ids[r] for r in range(k)]
        for r in range(k):
            if ids[r] != o[r]:
                g = best(row, [x for x in read if x not in ids])
                if g is not None and row[g] > row[ids[r]]:
                    ids[r] = g
        out.append(ids)
    return out


def additive_bias(row, k, resident, beta, protect):
    first = own(row, k)[:protect]
    biased = [
        min(max(f32(x + f32(beta)), -FLOAT32_MAX), FLOAT32_MAX) if e in resident and x > -math.inf else x
        for e, x in enumerate(row)
    ]
    rest = [e for e in ranking(biased) if e not in first]
    return first + rest[: k - len(first)]


def max_rank(row, k, resident, protect, limit):
    order = ranking(row)
    out = order[: min(protect, k)]
    for e in order[:limit]:
        if len(out) < k and e in resident and e not in out:
            out.append(e)
    for e in order:
        if len(out) < k and e not in out:
            out.append(e)
    return out


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    parts = [math.exp(x - top) for x in row]
    return [p / math.fsum(parts) for p in parts]


def mass_rank(row, mass) -> int:
    """The smallest prefix of the ranking whose softmax mass reaches `mass`."""
    weights, total = softmax(row), 0.0
    for n, e in enumerate(ranking(row), start=1):
        total += weights[e]
        if total >= mass:
            return n
    return len(row)


def weights(row, ids, *, renormalize=True, scoring="softmax", scale=1.0):
    """Weights of ids in float64; 0 for padding. 1e-20: the models guard the sum of sigmoids with it."""
    real = [e for e in ids if 0 <= e < len(row)]
    if scoring == "sigmoid":
        part = {e: 1 / (1 + math.exp(-row[e])) if row[e] > -700 else 0.0 for e in real}
        total = sum(part[e] for e in real) + 1e-20 if renormalize else 1.0
    elif renormalize:
        top = max((row[e] for e in real), default=0.0)
        part = {e: math.exp(row[e] - top) for e in real}
        total = sum(part[e] for e in real)
    else:
        part, total = dict(enumerate(softmax(row))), 1.0
    return [part[e] / total * scale if 0 <= e < len(row) else 0.0 for e in ids]


def same_set_keeps_order(o, ids):
    """Where only the order changed, the router's ids stay."""
    return o if set(o) == set(ids) else ids

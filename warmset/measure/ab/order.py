"""Which arm goes first in each pair."""

from __future__ import annotations

ORDERS = ("alternating", "halves")
"""What an experiment may use. `fixed`, A first in every pair, exists for simulations only: drift misleads it."""


def first_arms(pairs: int, order: str) -> list[str]:
    """`a` or `b` for each pair. Both orders put A first in half of the pairs (of an odd number, in one more)."""
    if order == "alternating":
        return ["ab"[pair % 2] for pair in range(pairs)]
    if order == "halves":
        return ["a" if pair < (pairs + 1) // 2 else "b" for pair in range(pairs)]
    assert order == "fixed", order
    return ["a"] * pairs

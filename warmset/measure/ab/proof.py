"""Whether both arms of a pair did the same work: the same tokens, or the same windows of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Sides = dict[str, dict[str, Any]]
"""The legs of a pair by arm."""


def of_windows(config: dict[str, Any]) -> bool:
    """Whether samples are windows of a trace; else they are answers."""
    return "windows" in config


def equal_tokens(sides: Sides) -> tuple[int, int]:
    """Tokens that both answers of a sample have at the same place, and all tokens; (0, 0) for windows of a trace."""
    equal = total = 0
    for left, right in zip(sides["a"]["samples"], sides["b"]["samples"], strict=True):
        pairs = list(zip(left.get("tokens", "").split(), right.get("tokens", "").split(), strict=False))
        equal += sum(x == y for x, y in pairs)
        total += len(pairs)
    return equal, total


def compare_work(config: dict[str, Any], complete: Sequence[tuple[int, Sides]]) -> dict[str, Any]:
    """What is known of the work of both arms, over complete pairs.

    `must_agree`: whether it has to be the same. Answers: where both arms are exact on the same model. Windows of a
    trace: always; and where both arms are exact, the experts that they read as well.
    `proven`: True or False where it must; None where a policy may make answers differ, or nothing was compared yet.
    `claim`: what has to agree, as the beginning of a sentence. `equal_tokens`: the share of equal tokens, of answers.
    """
    works = [config["arms"][arm]["exact_work"] for arm in ("a", "b")]
    exact = works[0] is not None and works[0] == works[1]
    keys = ["tokens_sha256"]
    claim, must_agree = "both arms are exact, and their tokens", exact
    if of_windows(config):
        keys = ["work_sha256", *(["distinct_experts"] if exact else [])]
        claim, must_agree = "the windows that both arms ran, or what exact arms read in them,", True
    differ = [number for number, sides in complete if _differ(sides, keys)]
    counts = [equal_tokens(sides) for _, sides in complete]
    equal, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return {
        "must_agree": must_agree,
        "both_exact": exact,
        "claim": claim,
        "proven": not differ if must_agree and complete else None,
        "pairs_that_differ": differ,
        "equal_tokens": equal / total if total else None,
    }


def _differ(sides: Sides, keys: Sequence[str]) -> bool:
    a, b = ([[sample.get(key) for key in keys] for sample in sides[arm]["samples"]] for arm in ("a", "b"))
    return a != b

"""Errors a user can meet.

    WarmsetError (ValueError)          bad input: one sentence, exit code 2, HTTP 400
    |-- CheckpointError                a file of the model is missing, cut, or not what it should be
    |-- PolicyError                    a routing policy or its parameters
    `-- RowError                       a row that cannot be routed: names layer and row

All are ValueErrors, so Python callers need not import this module. Our own bugs are asserts, never these.
"""

from __future__ import annotations


class WarmsetError(ValueError):
    """Bad input, in one sentence: what it is about, what is allowed, what came."""


class CheckpointError(WarmsetError):
    """A model's files are missing, damaged or in a layout that is not supported."""


class PolicyError(WarmsetError):
    """A routing policy or one of its parameters is not legal."""


class RowError(WarmsetError):
    """A row has fewer than K experts with a score above -inf, so the window was discarded; `row` is its number."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__

"""Gumbel noise of a draw, keyed by (seed, position, token) and equal bit for bit in numpy and in torch on any device.

A counter goes through the 64-bit mixing function of SplitMix64 (Steele, Lea, Flood 2014), 52 of its bits make a number
between 0 and 1, and -log(-log(u)) is taken with additions, multiplications and divisions only: those are exactly
rounded everywhere, where library logarithms differ in the last bit. float64 throughout; arguments may be numpy arrays
or tensors of int64, and the answer is of the same kind. Knows no logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LN2 = 0.6931471805599453
_LN2_REST = 2.3190468138462996e-17
_SQRT2_BITS = 0x6A09E667F3BCD
_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52
_TERMS = tuple(2.0 / (2 * n + 1) for n in range(11, 0, -1))


BLOCK_TOKENS = 8192
"""Tokens at a time: what lies in a processor's cache is five times as quick as a whole large vocabulary at once."""


def gumbel_numpy(seed: int, position: int, num_tokens: int) -> np.ndarray:
    """float64 [num_tokens]: the noise of every token at one position."""
    noise_V = np.empty(num_tokens)
    at_1 = np.full((1,), position, dtype=np.int64)
    with np.errstate(over="ignore"):  # integers wrap on purpose
        for start in range(0, num_tokens, BLOCK_TOKENS):
            end = min(num_tokens, start + BLOCK_TOKENS)
            noise_V[start:end] = gumbel(signed(seed), at_1, np.arange(start, end, dtype=np.int64))
    return noise_V


def gumbel(seed: Any, position: Any, token: Any) -> Any:
    """Noise float64 of int64 `position` and `token`, broadcast against each other; `seed` int64 or a number."""
    key = _mixed(_mixed(position * 0 + seed + _STEP) + (position + 1) * _STEP)
    bits = _mixed(key + (token + 1) * _STEP)
    uniform = _float(2 * _shifted(bits, 12) + 1) * 2.0**-53
    return -_log(-_log(uniform))


def signed(seed: int) -> int:
    """The seed's low 64 bits as int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def _shifted(x: Any, by: int) -> Any:
    """x >> by as if unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: Any) -> Any:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _float(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) else x.astype(np.float64)


def _as(x: Any, kind: str) -> Any:
    if isinstance(x, torch.Tensor):
        return x.view(torch.int64 if kind == "int64" else torch.float64)
    return x.view(kind)


def _log(x: Any) -> Any:
    """Natural logarithm of positive float64, within an ulp or two, by exactly rounded steps only."""
    bits = _as(x, "int64")
    mantissa = bits & _MANTISSA
    high = _shifted(_SQRT2_BITS - mantissa, 63)  # 1 where the mantissa is above sqrt(2): half of it is taken
    exponent = _float((bits >> 52) - 1023 + high)
    m = _as(mantissa | (_ONE - (high << 52)), "float64")
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = z * _TERMS[0]
    for term in _TERMS[1:]:
        total = (total + term) * z
    return exponent * _LN2 + (exponent * _LN2_REST + (s * total + s * 2.0))

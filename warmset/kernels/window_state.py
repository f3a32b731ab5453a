"""What the kernels of a window read and keep, apart from their launches; imports no triton.

Shapes as in `delta_window` and `index_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RING = 16
"""A window of up to 8 rows and the 8 before it: those that it reads are never those that it writes."""
TAPS = 4


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Where the projected rows lie: tensors of T lines, and elements between key heads (or groups of value heads).

    Key head m of row t begins at query[t, m * key_stride]; value head n at value[t, (n // repeat) * value_stride +
    (n % repeat) * V]; its b and a at [t, (n // repeat) * gate_stride + n % repeat].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    key_stride: int
    value_stride: int
    gate_stride: int


@dataclass(kw_only=True)
class DeltaState:
    """The state of one layer and one sequence; see the module."""

    ring_x_RC: torch.Tensor
    ring_k_RMD: torch.Tensor
    ring_d_RNV: torch.Tensor
    ring_g_RN: torch.Tensor
    state_NDV: torch.Tensor

    @classmethod
    def make(cls, *, channels: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int,
             dtype: torch.dtype, device: torch.device) -> DeltaState:  # fmt: skip
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            ring_x_RC=torch.zeros(RING, channels, dtype=dtype, device=device),
            ring_k_RMD=zeros(RING, key_heads, key_dim),
            ring_d_RNV=zeros(RING, value_heads, value_dim),
            ring_g_RN=zeros(RING, value_heads),
            state_NDV=zeros(value_heads, key_dim, value_dim),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.ring_x_RC, self.ring_k_RMD, self.ring_d_RNV, self.ring_g_RN, self.state_NDV]


@dataclass(frozen=True, kw_only=True)
class IndexWeights:
    """What a QSA indexer computes with, beside its projection. plus_one: the norm multiplies by 1 + weight."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    query_eps: float
    key_eps: float
    query_plus_one: bool
    key_plus_one: bool
    heads: int
    ratio: int
    """Places a block."""
    top: int
    """Blocks that a row may see, beside the places after the last whole one."""

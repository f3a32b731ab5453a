"""The slow tier: where a cold expert's bytes come from.

Two kinds, one interface: `read(layer, expert, out_B)` puts the expert's bytes, in the checkpoint's dtype and in
the layout of `checkpoint.ExpertLayout`, into a uint8 buffer.

    FileStore    the checkpoint's own files, by positional reads; never a second copy, never a memory map
                 (a map would compute on unaligned bytes and count as resident memory)
    ArenaStore   one arena in host RAM, pinned where CUDA is there, each expert once

Knows no slots, no router and no model. Buffers are aligned, since in float32 a one-row product changes its
bits with the alignment of the matrix.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from warmset.checkpoint import ALIGN_BYTES, ExpertLayout, ExpertMap, list_files, read_exactly


def aligned_bytes(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised uint8 tensor of `num_bytes` whose address is a multiple of 128."""
    raw = torch.empty(num_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGN_BYTES
    return raw[skip : skip + num_bytes]


class Store(Protocol):
    """The slow tier. `bytes_read` counts what `read` delivered, in checkpoint bytes without padding."""

    layout: ExpertLayout
    num_layers: int
    num_experts: int
    bytes_read: int
    name: str

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class FileStore:
    """The checkpoint's files, read by position (`preadv`) into the caller's buffer."""

    name = "files"

    def __init__(self, expert_map: ExpertMap) -> None:
        self.layout = expert_map.layout
        self.num_layers = expert_map.num_layers
        self.num_experts = expert_map.num_experts
        self.bytes_read = 0
        self._segments = expert_map.segments
        self._descriptors: dict[Path, int] = {
            file: os.open(file, os.O_RDONLY) for file in list_files(expert_map)
        }

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None:
        """Fill `out_B` (uint8 [layout.nbytes], on the CPU); padding bytes are left as they are."""
        view = memoryview(out_B.numpy())
        for segment in self._segments[layer][expert]:
            target = view[segment.dest : segment.dest + segment.nbytes]
            read_exactly(self._descriptors[segment.file], segment, target)
            self.bytes_read += segment.nbytes

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


class ArenaStore:
    """One block of host RAM with every expert once; pinned when `pin` is set and CUDA agrees."""

    name = "host arena"

    def __init__(self, source: FileStore, *, pin: bool, progress=None) -> None:
        self.layout = source.layout
        self.num_layers = source.num_layers
        self.num_experts = source.num_experts
        self.bytes_read = 0
        self.arena_NB = aligned_bytes(self.num_layers * self.num_experts * self.layout.nbytes).view(
            self.num_layers * self.num_experts, self.layout.nbytes
        )
        self.pinned = pin and _pin(self.arena_NB)
        for index in range(len(self.arena_NB)):
            source.read(*divmod(index, self.num_experts), self.arena_NB[index])
            if progress is not None:
                progress(index + 1, len(self.arena_NB))

    def view(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes in the arena, uint8 [layout.nbytes]."""
        return self.arena_NB[layer * self.num_experts + expert]

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None:
        out_B.copy_(self.view(layer, expert), non_blocking=self.pinned)
        self.bytes_read += self.layout.payload_bytes

    def close(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.arena_NB.data_ptr())
            self.pinned = False


def _pin(arena_NB: torch.Tensor) -> bool:
    """Register the arena with CUDA in place: the pinned allocator would round 20 GB up to 32."""
    if not torch.cuda.is_available() or arena_NB.numel() == 0:
        return False
    return int(torch.cuda.cudart().cudaHostRegister(arena_NB.data_ptr(), arena_NB.numel(), 0)) == 0

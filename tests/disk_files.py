"""Experts on disk without a model around them: random ones for the tests of slots, stores and readers."""

from __future__ import annotations

from pathlib import Path

import torch

from warmset.checkpoint import ExpertLayout, ExpertMap, Segment

Matrices = tuple[torch.Tensor, torch.Tensor]
"""gate_up [2I, H] and down [H, I] of one expert."""


def random_experts(layers: int, experts: int, layout: ExpertLayout, seed: int = 0) -> list[list[Matrices]]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(layout.dtype)

    hidden, width = layout.hidden, layout.width
    return [
        [(matrix(2 * width, hidden), matrix(hidden, width)) for _ in range(experts)] for _ in range(layers)
    ]


def write_experts(file: Path, experts_LE: list[list[Matrices]], layout: ExpertLayout) -> ExpertMap:
    """One file with every expert, down first, at odd offsets; returns where they lie."""
    segments = []
    with open(file, "wb") as stream:
        stream.write(b"odd")
        for experts_E in experts_LE:
            segments.append([])
            for gate_up, down in experts_E:
                parts = []
                for matrix, dest in ((down, layout.down_offset), (gate_up, 0)):
                    content = matrix.contiguous().view(torch.uint8).numpy().tobytes()
                    parts.append(Segment(file=file, offset=stream.tell(), nbytes=len(content), dest=dest))
                    stream.write(content)
                segments[-1].append(tuple(parts))
    modules = tuple(f"layers.{layer}.experts" for layer in range(len(experts_LE)))
    return ExpertMap(modules=modules, segments=tuple(map(tuple, segments)), layout=layout)

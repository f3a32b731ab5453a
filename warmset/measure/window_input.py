"""The fixed input of `bench window --part experts`: shapes, picks, and weights made where they lie.

Distinct experts a layer and cold experts a layer are fixed numbers, so that two machines measure the same work.
Weights are random. Host memory holds a few layers that all layers share; slots are distinct for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from warmset.checkpoint import ExpertLayout, Segment
from warmset.slots import AddressTable, Slots
from warmset.store import ArenaStore, CudaPin


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's expert part. `distinct`: rows of a window -> distinct experts a layer."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    dtype: torch.dtype
    distinct: dict[int, int]
    host_layers: int = 4
    prompt_tokens: int = 4096
    prompt_chunk: int = 2048

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(hidden=self.hidden, width=self.width, dtype=self.dtype)


SHAPES = {
    "qwen3-next-80b": Shape(
        layers=48,
        experts=512,
        top_k=10,
        hidden=2048,
        width=512,
        dtype=torch.bfloat16,
        distinct={1: 10, 4: 30, 8: 50},
    ),
    "tiny": Shape(
        layers=4,
        experts=16,
        top_k=4,
        hidden=32,
        width=16,
        dtype=torch.float32,
        distinct={1: 4, 4: 10, 8: 12},
        host_layers=2,
        prompt_tokens=160,
        prompt_chunk=80,
    ),
}


class _Nothing:
    """A source without files: the arena is filled afterwards."""

    def __init__(self, shape: Shape) -> None:
        self.layout = shape.layout
        self.num_layers = shape.host_layers
        self.num_experts = shape.experts

    def in_file_order(self) -> Iterator[tuple[int, int, Segment]]:
        return iter(())


class SharedArena(ArenaStore):
    """An arena of a few layers that stands for all of them: layer l is read from host layer l modulo their number."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._host_layers = shape.host_layers
        pinner: Any = CudaPin(device) if device.type == "cuda" else _Pretend()
        super().__init__(_Nothing(shape), pin=pinner.pin, unpin=pinner.unpin)  # type: ignore[arg-type]
        self.num_layers = shape.layers
        for row_B in self.arena_NB:
            row_B.copy_(random_rows(shape, 1, device)[0])
        self.readable = True

    def row(self, layer: int, expert: int) -> int:
        return (layer % self._host_layers) * self.num_experts + expert

    def addresses(self) -> torch.Tensor:
        rows = torch.tensor([self.row(layer, 0) for layer in range(self.num_layers)])[:, None]
        row_LE = rows + torch.arange(self.num_experts)
        address_LE = self.arena_NB.data_ptr() + row_LE * self.layout.nbytes
        return torch.where((row_LE + 1) * self.layout.nbytes <= self.pinned_bytes, address_LE, 0)


class _Pretend:
    def pin(self, address: int, num_bytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        pass


def random_rows(shape: Shape, count: int, device: torch.device) -> torch.Tensor:
    """`count` experts of random weights on the device, uint8 [count, nbytes]."""
    layout = shape.layout
    values = torch.randn(count, layout.nbytes // shape.dtype.itemsize, device=device) * shape.hidden**-0.5
    return values.to(shape.dtype).view(torch.uint8)


def make_slots(shape: Shape, resident: list[tuple[int, int]], device: torch.device) -> Slots:
    """Slots that hold the pairs, in order, with random weights made on the device."""
    slots = Slots(
        num_slots=len(resident),
        layout=shape.layout,
        num_layers=shape.layers,
        num_experts=shape.experts,
        device=device,
    )
    for slab in slots.slabs:
        for part in slab.split(64):
            part.copy_(random_rows(shape, len(part), device))
    for slot, (layer, expert) in enumerate(resident):
        slots.table_LE[layer, expert] = slot
        slots.owner[slot] = (layer, expert)
    slots.publish()
    return slots


def make_tables(shape: Shape, store: SharedArena, resident: list[tuple[int, int]], device: torch.device):
    slots = make_slots(shape, resident, device)
    return slots, AddressTable(slots, store)


def cold_by_layer(layers: int, mean: float) -> list[int]:
    """Cold experts of each layer, spread evenly: 0.63 is one in 30 of 48, 1.87 two in 42 and one in 6."""
    total = round(mean * layers)
    return [(index + 1) * total // layers - index * total // layers for index in range(layers)]


@dataclass(frozen=True, kw_only=True)
class WindowInput:
    """One window of all layers. `cold_L`: cold experts of each layer."""

    rows: int
    x_TH: torch.Tensor
    ids: list[torch.Tensor]
    weights_TK: torch.Tensor
    cold_L: list[int]

    def only_resident(self, slots: Slots) -> WindowInput:
        """The same window with its cold picks left out."""
        ids = [
            torch.where(slots.device_table_LE[layer][ids_TK.long()] >= 0, ids_TK, -1)
            for layer, ids_TK in enumerate(self.ids)
        ]
        return WindowInput(
            rows=self.rows, x_TH=self.x_TH, ids=ids, weights_TK=self.weights_TK, cold_L=[0] * len(ids)
        )


def make_window(
    shape: Shape, pool: int, rows: int, cold_L: list[int], device: torch.device, seed: int = 0
) -> WindowInput:
    """Picks with exactly the fixed number of distinct experts a layer, `cold_L` of them cold.

    Experts 0..pool-1 of each layer are resident.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for cold in cold_L:
        distinct = shape.distinct[rows]
        resident = torch.randperm(pool, generator=generator)[: distinct - cold]
        away = pool + torch.randperm(shape.experts - pool, generator=generator)[:cold]
        experts = torch.cat([resident, away])[torch.randperm(distinct, generator=generator)].tolist()
        ids.append(_spread(experts, rows, shape.top_k, generator).to(device))
    x_TH = torch.randn(rows, shape.hidden, generator=generator).to(shape.dtype).to(device)
    weights_TK = torch.rand(rows, shape.top_k, generator=generator).to(device)
    return WindowInput(
        rows=rows, x_TH=x_TH, ids=ids, weights_TK=weights_TK / weights_TK.sum(1, True), cold_L=cold_L
    )


def _spread(experts: list[int], rows: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [rows, top_k]: every expert at least once, none twice in a row."""
    table: list[list[int]] = [[] for _ in range(rows)]
    for index, expert in enumerate(experts):
        table[index % rows].append(expert)
    for row in table:
        left = [expert for expert in experts if expert not in row]
        order = torch.randperm(len(left), generator=generator).tolist()
        row.extend(left[index] for index in order[: top_k - len(row)])
    return torch.tensor(table, dtype=torch.int32)

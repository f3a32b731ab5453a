"""The slow tier: where a cold expert's bytes come from.

Two kinds, one interface: `begin(layer, expert, out_B)` starts to put the expert's bytes, in the store's own dtype and
in the layout of `checkpoint.ExpertLayout`, into a uint8 buffer; `read` does it and waits.

    FileStore    the checkpoint's own files, by positional reads (`disk`); never a second copy, never a memory map
                 (a map would compute on unaligned bytes and count as resident memory)
    ArenaStore   one arena in host RAM, each expert once, pinned as far as the system allows; an expert in its
                 pinned part has an address that a kernel can read

Knows no slots, no router and no model. Buffers are aligned, since in float32 a one-row product changes its
bits with the alignment of the matrix.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import gcd
from typing import Protocol

import torch

from warmset.checkpoint import ALIGN_BYTES, ExpertLayout, ExpertMap, Segment, list_files
from warmset.disk import NOTHING_TO_READ, Mode, Part, Reader, Reading

Pin = Callable[[int, int], bool]
"""(address, bytes) -> whether the memory is pinned now."""
Unpin = Callable[[int], None]
PAGE_BYTES = 4096
PIN_PART_BYTES = 1 << 28
KEPT_BYTES = 256 << 20
"""Experts of a checkpoint up to this size may stay in the page cache: reading them from the disk again costs more."""
FILL_AHEAD = 16
"""Segments under way at once while an arena is filled."""
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def aligned_bytes(
    num_bytes: int, device: torch.device | str = "cpu", *, to: int = ALIGN_BYTES, pinned: bool = False
) -> torch.Tensor:
    """An uninitialised uint8 tensor of `num_bytes` whose address is a multiple of `to` (128)."""
    pinned = pinned and torch.device(device).type == "cpu"
    with torch.inference_mode(
        False
    ):  # else threads outside of the caller's inference mode could not write to it
        raw = torch.empty(num_bytes + to, dtype=torch.uint8, device=device, pin_memory=pinned)
    skip = -raw.data_ptr() % to
    return raw[skip : skip + num_bytes]


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Host RAM that begins with a page, uint8, in huge pages where the system has them: they are there much sooner."""
    if num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_bytes(num_bytes, to=PAGE_BYTES)
    try:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"{num_bytes} bytes of host RAM") from None
    with suppress(OSError):  # a system that is built without them
        block.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return torch.frombuffer(block, dtype=torch.uint8)


class Store(Protocol):
    """The slow tier.

    bytes_read  what `read` delivered and what others add that use `begin`, in checkpoint bytes without padding
    read_ms     how long at least one read was under way; None where nothing is read, only copied
    """

    layout: ExpertLayout
    num_layers: int
    num_experts: int
    bytes_read: int
    name: str

    @property
    def read_ms(self) -> float | None: ...

    def begin(self, layer: int, expert: int, out_B: torch.Tensor) -> Reading: ...

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None: ...

    def addresses(self) -> torch.Tensor: ...

    def reset_counts(self) -> None: ...

    def close(self) -> None: ...


class FileStore:
    """The checkpoint's files, read by position into the caller's buffer, several blocks in flight.

    mode: how (`disk.Mode`); None: past the page cache, except for a checkpoint whose experts are so few bytes that
    their pages are no burden.
    """

    name = "files"

    def __init__(self, expert_map: ExpertMap, mode: Mode | None = None) -> None:
        self.layout = expert_map.layout
        self.num_layers = expert_map.num_layers
        self.num_experts = expert_map.num_experts
        self.bytes_read = 0
        self._segments = expert_map.segments
        self._files = list_files(expert_map)
        if mode is None:
            payload = self.num_layers * self.num_experts * self.layout.payload_bytes
            mode = "kept" if payload <= KEPT_BYTES else "direct"
        self._reader = Reader(self._files, mode)
        self._busy_sec_before = 0.0

    @property
    def mode(self) -> Mode:
        """How the files are read; `released` where the file system refused `direct`."""
        return self._reader.mode

    @property
    def read_ms(self) -> float:
        return 1e3 * (self._reader.clock.sec - self._busy_sec_before)

    def begin(self, layer: int, expert: int, out_B: torch.Tensor) -> Reading:
        """Start to fill `out_B` (uint8 [layout.nbytes], on the CPU), from any thread; counted by whoever waits.

        Padding bytes are left as they are.
        """
        target_B = out_B.numpy()
        return self._reader.begin(
            Part(segment.file, segment.offset, target_B[segment.dest : segment.dest + segment.nbytes])
            for segment in self._segments[layer][expert]
        )

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None:
        """Fill `out_B` and count it."""
        self.begin(layer, expert, out_B).wait()
        self.bytes_read += self.layout.payload_bytes

    def addresses(self) -> torch.Tensor:
        """int64 [L, E], all 0: no expert of a file can be read by address."""
        return torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64)

    def begin_segment(self, segment: Segment, out_B: torch.Tensor) -> Reading:
        """Start to fill `out_B` (uint8 [segment.nbytes], on the CPU) with one run of file bytes."""
        return self._reader.begin([Part(segment.file, segment.offset, out_B.numpy())])

    def in_file_order(self) -> Iterator[tuple[int, int, Segment]]:
        """(layer, expert, segment) of all experts: files in order of first use, each from front to back."""
        place = {file: index for index, file in enumerate(self._files)}
        found = [
            (layer, expert, segment)
            for layer, experts in enumerate(self._segments)
            for expert, segments in enumerate(experts)
            for segment in segments
        ]
        yield from sorted(found, key=lambda entry: (place[entry[2].file], entry[2].offset))

    def reset_counts(self) -> None:
        self.bytes_read = 0
        self._busy_sec_before = self._reader.clock.sec

    def close(self) -> None:
        self._reader.close()


class ArenaStore:
    """One block of host RAM with every expert once, in `dtype`; pinned as far as `pin` allows.

    The block is page-aligned and pinned in place, part by part, before the part is filled: the pinned allocator
    would round 20 GB up to 32. A refusal ends the pinning, not the start: what is left stays pageable and its
    experts are copied instead of read in place. Files are read in order, front to back.

        arena_NB      uint8 [L * E, layout.nbytes]
        pinned_bytes  how much of it is pinned, from the front
        readable      set by the caller once a kernel has read pinned memory by address; else nothing has an address
    """

    name = "host arena"
    read_ms = None

    def __init__(
        self,
        source: FileStore,
        *,
        dtype: torch.dtype | None = None,
        pin: Pin | None = None,
        unpin: Unpin | None = None,
        progress=None,
    ) -> None:
        self.layout = source.layout if dtype is None else source.layout.with_dtype(dtype)
        self.num_layers = source.num_layers
        self.num_experts = source.num_experts
        self.bytes_read = 0
        self.readable = False
        count = self.num_layers * self.num_experts
        self.arena_NB = _huge_pages(count * self.layout.nbytes).view(count, self.layout.nbytes)
        self.pinned_bytes = 0
        self._parts: list[int] = []
        # An arena that is only dropped is unpinned too: its addresses will be given to others.
        self._unpin_all = weakref.finalize(self, _unpin_parts, unpin, self._parts)
        # Parts begin and end with a page and an expert.
        step = PAGE_BYTES // gcd(self.layout.nbytes, PAGE_BYTES)
        self._part_rows = step * max(1, PIN_PART_BYTES // (step * self.layout.nbytes))
        if pin is not None:
            self._pin(pin)
        self._fill(source, progress)

    @property
    def nbytes(self) -> int:
        return self.arena_NB.numel()

    @property
    def pinned(self) -> bool:
        """Whether all of it is pinned."""
        return self.pinned_bytes == self.nbytes > 0

    def _pin(self, pin: Pin) -> None:
        for first in range(0, len(self.arena_NB), self._part_rows):
            part_NB = self.arena_NB[first : first + self._part_rows]
            part_NB.fill_(
                0
            )  # by all threads: to pin what has no pages yet takes one thread and several times as long
            if part_NB.numel() == 0 or not pin(part_NB.data_ptr(), part_NB.numel()):
                return
            self._parts.append(part_NB.data_ptr())
            self.pinned_bytes += part_NB.numel()

    def _fill(self, source: FileStore, progress) -> None:
        done, total = 0, len(self.arena_NB) * source.layout.payload_bytes
        coming: deque[tuple[Reading, Callable[[], None], int]] = deque()
        order = iter(source.in_file_order())
        while True:
            while len(coming) < FILL_AHEAD and (entry := next(order, None)) is not None:
                coming.append(self._begin_segment(source, *entry))
            if not coming:
                return
            reading, arrive, nbytes = coming.popleft()
            reading.wait()
            arrive()
            done += nbytes
            if progress is not None:
                progress(done, total)

    def _begin_segment(
        self, source: FileStore, layer: int, expert: int, segment: Segment
    ) -> tuple[Reading, Callable[[], None], int]:
        """A segment under way to its row, what is left to do when it is here, and its bytes."""
        row_B = self.view(layer, expert)
        if self.layout.dtype == source.layout.dtype:
            target_B = row_B[segment.dest : segment.dest + segment.nbytes]
            return source.begin_segment(segment, target_B), lambda: None, segment.nbytes
        raw_B = aligned_bytes(segment.nbytes)

        def convert() -> None:
            _convert(source.layout, segment.dest, raw_B, self.layout, row_B)

        return source.begin_segment(segment, raw_B), convert, segment.nbytes

    def row(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert

    def view(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes in the arena, uint8 [layout.nbytes]."""
        return self.arena_NB[self.row(layer, expert)]

    def same_memory(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Arena rows first..end-1 cut where a part ends: no copy may cross from one registration to the next."""
        while first < end:
            stop = min(end, (first // self._part_rows + 1) * self._part_rows)
            yield first, stop
            first = stop

    def is_pinned(self, layer: int, expert: int) -> bool:
        return (self.row(layer, expert) + 1) * self.layout.nbytes <= self.pinned_bytes

    def addresses(self) -> torch.Tensor:
        """int64 [L, E] on the host: where a kernel may read each expert, 0 where it may not."""
        count = len(self.arena_NB)
        base, stride = (self.arena_NB.data_ptr(), self.layout.nbytes) if self.nbytes else (0, 0)
        address_N = base + stride * torch.arange(count, dtype=torch.int64)
        pinned = self.pinned_bytes // self.layout.nbytes if self.readable else 0
        address_N[pinned:] = 0
        return address_N.view(self.num_layers, self.num_experts)

    def begin(self, layer: int, expert: int, out_B: torch.Tensor) -> Reading:
        """Copy an expert into `out_B`, on any device: for the current stream it is there at once."""
        out_B.copy_(self.view(layer, expert), non_blocking=self.is_pinned(layer, expert))
        return NOTHING_TO_READ

    def read(self, layer: int, expert: int, out_B: torch.Tensor) -> None:
        self.begin(layer, expert, out_B)
        self.bytes_read += self.layout.payload_bytes

    def reset_counts(self) -> None:
        self.bytes_read = 0

    def close(self) -> None:
        """Unpin; the memory goes back to the system with the last tensor that looks at it."""
        self._unpin_all()
        self.pinned_bytes, self.readable = 0, False


def _unpin_parts(unpin: Unpin | None, parts: list[int]) -> None:
    for address in parts:
        if unpin is not None:
            unpin(address)


def _convert(
    raw: ExpertLayout, dest: int, raw_B: torch.Tensor, layout: ExpertLayout, row_B: torch.Tensor
) -> None:
    """Put a segment of the checkpoint's dtype, at byte `dest` of its own layout, into an arena row."""
    if dest >= raw.down_offset:
        start = layout.down_offset + (dest - raw.down_offset) // raw.dtype.itemsize * layout.dtype.itemsize
    else:
        start = dest // raw.dtype.itemsize * layout.dtype.itemsize
    values = raw_B.view(raw.dtype)
    row_B[start : start + values.numel() * layout.dtype.itemsize].view(layout.dtype).copy_(values)


class CudaPin:
    """Pins host memory in place for every device, from the context of one of them (not of device 0 by accident)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register `num_bytes` bytes; False when the system refuses."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))
            if code != 0:
                # The refusal waits in CUDA's last-error slot, to be blamed on the next kernel: let this one take it.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
        return code == 0

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)

"""Runs the picked experts of a window, or of a chunk of a prompt, with kernels that read them where they lie.

    window   up to 64 rows: the kernels of `kernels.experts`, resident and cold experts on two streams. Nothing
             returns to the host as long as every cold expert can be read in place, so a graph may hold it.
    prompt   more rows: picks sorted by expert. Residents run from their slots; cold experts are copied in groups
             into two buffers, one filling while the other is computed on. Slots are not touched.

A cold expert that no kernel can read (its memory is not pinned, or it lies on disk) is brought to the device first,
in a window too: the picks come to the host between router and experts, and `landing` reads and copies while the
residents run. The kernels are the same, and so are the bits. Knows no router, no policy and no model. On the CPU,
where only tests run it, there are no streams and the kernels run in Triton's interpreter.

    x_TH [T, H] compute dtype, ids_TK [T, K] int32 (-1 or E is padding), weights_TK [T, K] float
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from warmset import memory
from warmset.checkpoint import ExpertLayout
from warmset.errors import WarmsetError
from warmset.landing import Landing
from warmset.slots import AddressTable, Slots
from warmset.stages import StageClock
from warmset.store import ArenaStore, CudaPin, FileStore, Store, aligned_bytes

MIN_CAPABILITY = (8, 0)
WINDOW_ROWS = 8
MAX_WINDOW_ROWS = 64
GROUP_BYTES = 64 << 20
COLD_PRIORITY = -1
"""Cold programs are few and wait for PCIe: they start before the many resident ones fill the device."""


def activation_name(activation: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The kernels' name of an activation, found by its values and not by its class; None when it is another."""
    known: dict[str, Callable] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }
    points = torch.linspace(-6, 6, 193)
    for name, function in known.items():
        if torch.allclose(activation(points), function(points), rtol=0, atol=1e-6):
            return name
    return None


def why_not(device: torch.device, activation: Callable) -> str | None:
    """Why the kernels cannot run there, as the end of a sentence, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None if activation_name(activation) is not None else "the activation is none they know"


class DeviceExperts:
    """The experts of all layers on one device. `tiles` are the kernels' block sizes (a name in kernels.experts)."""

    def __init__(
        self,
        slots: Slots,
        store: Store,
        table: AddressTable,
        activation: str,
        clock: StageClock,
        tiles: Any = None,
    ) -> None:
        from warmset.kernels import experts as kernels

        in_memory = isinstance(store, ArenaStore)
        assert not in_memory or slots.layout == store.layout, "the arena must hold the compute dtype"
        self._kernels = kernels
        self._slots = slots
        self._store = store
        self.table = table
        self._activation = activation
        self._clock = clock
        self.tiles = tiles or kernels.DEFAULT_TILES
        self._spaces: dict[int, Any] = {}
        self._buffers_BN: torch.Tensor | None = None
        self._landing = Landing(store, slots.layout, slots.device)
        self._in_place = table.all_readable
        self._gpu = slots.device.type == "cuda"
        self._cold_stream = self._stream(COLD_PRIORITY)
        self.host_copies = 0
        self.kinds: tuple[bool, ...] = (True, False)
        """Which kinds a window launches, cold first; the bench measures each alone."""

    def _stream(self, priority: int) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._slots.device, priority=priority) if self._gpu else None

    @property
    def max_window_rows(self) -> int:
        return self._kernels.MAX_ROWS

    def run(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Sum over ranks of weight * expert(x): [T, H] in the dtype of `x_TH`."""
        if len(x_TH) == 0:
            return torch.empty_like(x_TH)
        x_TH, weights_TK = _aligned(x_TH), weights_TK.contiguous()
        ids_TK = ids_TK.to(torch.int32).contiguous()
        with torch.cuda.device(self._slots.device) if self._gpu else nullcontext():
            if len(x_TH) <= self.max_window_rows:
                return self._run_window(layer, x_TH, ids_TK, weights_TK)
            return self._run_prompt(layer, x_TH, ids_TK, weights_TK)

    # -- a window ---------------------------------------------------------------------------------------------

    def _space(self, num_rows: int, top_k: int) -> Any:
        """Buffers for windows of up to 8 rows, and others for more: made once, so that graphs keep theirs."""
        rows = WINDOW_ROWS if num_rows <= WINDOW_ROWS else self.max_window_rows
        if rows not in self._spaces or len(self._spaces[rows].h_PI) < rows * top_k:
            layout = self._slots.layout
            with torch.inference_mode(False):  # whoever asks for figures changes them, outside of inference
                self._spaces[rows] = self._kernels.Workspace.make(
                    max_rows=rows, top_k=top_k, hidden=layout.hidden, width=layout.width,
                    dtype=layout.dtype, device=self._slots.device,
                )  # fmt: skip
        return self._spaces[rows]

    def _run_window(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        space = self._space(*ids_TK.shape)
        out_TH = torch.empty_like(x_TH)
        cold, resident = (kind in self.kinds for kind in (True, False))
        cold = cold and not self._slots.all_resident
        missing = self._missing(layer, ids_TK) if cold and not self._in_place else []
        self._landing.expect(layer, missing)
        before_residents = self._event(self._current_stream())
        if cold and not missing:
            with self._beside(before_residents):
                self._launch(layer, x_TH, ids_TK, weights_TK, space, out_TH, cold=True)
        if resident:
            with self._clock.stage("resident experts"):
                self._launch(layer, x_TH, ids_TK, weights_TK, space, out_TH, cold=False)
        if missing:
            with self._clock.stage("cold wait"), self._beside(before_residents):
                self._land(layer, missing)
                self._launch(layer, x_TH, ids_TK, weights_TK, space, out_TH, cold=True)
        if cold and self._cold_stream is not None:
            with self._clock.stage("cold wait"):
                torch.cuda.current_stream(self._slots.device).wait_stream(self._cold_stream)
        return out_TH

    @contextmanager
    def _beside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """On the cold stream, once the event of the current one has come."""
        if self._cold_stream is None:
            yield
            return
        assert after is not None
        self._cold_stream.wait_event(after)
        with torch.cuda.stream(self._cold_stream):
            yield

    def _launch(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        space: Any,
        out_TH: torch.Tensor,
        *,
        cold: bool,
    ) -> None:
        layout = self._slots.layout
        tables = (self._slots.device_table_LE, self.table.device_table_LE)
        self._kernels.gate_up(
            x_TH, ids_TK, *tables, space,
            layer=layer, cold=cold, width=layout.width, activation=self._activation, tiles=self.tiles,
        )  # fmt: skip
        self._kernels.down_sum(
            ids_TK, weights_TK, *tables, space, out_TH,
            layer=layer, cold=cold, width=layout.width, down_offset=self._down_offset, tiles=self.tiles,
        )  # fmt: skip

    @property
    def _down_offset(self) -> int:
        return self._slots.layout.down_offset // self._slots.layout.dtype.itemsize

    def _missing(self, layer: int, ids_TK: torch.Tensor) -> list[int]:
        """The picked experts that no kernel can read, in ascending order."""
        picked = set(ids_TK.flatten().tolist())  # host sync: only the host can read files and pageable memory
        return [
            expert
            for expert in sorted(picked)
            if 0 <= expert < self._store.num_experts and int(self.table.table_LE[layer, expert]) == 0
        ]

    def _land(self, layer: int, missing: list[int]) -> None:
        """Bring the missing experts to the device, and say where they are."""
        buffers_BN = self._buffers(len(missing))
        self._landing.land(layer, missing, buffers_BN)
        self.host_copies += len(missing)
        stride = buffers_BN.stride(0)
        landed_N = buffers_BN.data_ptr() + stride * torch.arange(len(missing), dtype=torch.int64)
        index_N = torch.tensor(missing, device=self._slots.device)
        self.table.device_table_LE[layer].index_copy_(0, index_N, landed_N.to(self._slots.device))

    def _buffers(self, at_least: int) -> torch.Tensor:
        """Places of one expert each on the device, uint8 [N, nbytes]: two groups of a prompt, or a window's."""
        layout = self._slots.layout
        if self._buffers_BN is None or len(self._buffers_BN) < at_least:
            group = group_size(layout.nbytes, self._store.num_experts)
            count = max(at_least, 2 * group)
            if self._gpu:  # host sync: nothing may still read the old places
                torch.cuda.synchronize(self._slots.device)
            self._buffers_BN = aligned_bytes(count * layout.nbytes, self._slots.device).view(
                count, layout.nbytes
            )
        return self._buffers_BN

    # -- a chunk of a prompt ----------------------------------------------------------------------------------

    def _run_prompt(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        from warmset.kernels import experts_prompt as kernels

        layout, num_experts = self._slots.layout, self._store.num_experts
        ids_P = ids_TK.reshape(-1).long()
        ids_P = torch.where((ids_P >= 0) & (ids_P < num_experts), ids_P, num_experts)
        order_S = torch.argsort(ids_P, stable=True).to(torch.int32)
        # host sync: which experts are cold, and how many rows each has, decides what is copied
        counts = torch.bincount(ids_P, minlength=num_experts + 1)[:num_experts].tolist()
        ends = torch.tensor(counts).cumsum(0).tolist()
        picked = [expert for expert in range(num_experts) if counts[expert]]
        resident = [expert for expert in picked if self._slots.slot_of(layer, expert) >= 0]
        cold = [expert for expert in picked if self._slots.slot_of(layer, expert) < 0]
        picks = ids_TK.numel()
        h_SI = x_TH.new_empty(picks, layout.width)
        y_PH = x_TH.new_empty(picks, layout.hidden)

        def compute(experts: list[int], addresses: list[int]) -> None:
            tiles_N3 = self._tiles(experts, addresses, counts, ends, kernels.BLOCK_M)
            kernels.gate_up_many(
                x_TH, tiles_N3, order_S, h_SI, top_k=ids_TK.shape[1], activation=self._activation
            )
            kernels.down_many(h_SI, tiles_N3, order_S, y_PH, down_offset=self._down_offset)

        copies = self._copy_groups(layer, cold)
        if resident:
            with self._clock.stage("resident experts"):
                compute(resident, [int(self.table.table_LE[layer, expert]) for expert in resident])
        for experts, addresses in copies:
            compute(experts, addresses)
        self._store.bytes_read += len(cold) * self._store.layout.payload_bytes
        out_TH = torch.empty_like(x_TH)
        kernels.sum_ranks(y_PH, ids_TK, weights_TK, out_TH, num_experts=num_experts)
        return out_TH

    def _tiles(
        self, experts: list[int], addresses: list[int], counts: list[int], ends: list[int], rows: int
    ) -> torch.Tensor:
        """int64 [N, 3] on the device: address, first and end of each tile of up to `rows` rows."""
        entries = [
            (address, start, min(start + rows, ends[expert]))
            for expert, address in zip(experts, addresses, strict=True)
            for start in range(ends[expert] - counts[expert], ends[expert], rows)
        ]
        return torch.tensor(entries, dtype=torch.int64).to(self._slots.device, non_blocking=True)

    def _copy_groups(self, layer: int, cold: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Groups of cold experts and their addresses on the device, each copied while the one before computes.

        The first copy starts with this call, before the residents are launched; the caller computes on a group
        between two steps, and the copy of the next is under way by then.
        """
        size = group_size(self._slots.layout.nbytes, self._store.num_experts)
        groups = [cold[first : first + size] for first in range(0, len(cold), size)]
        if not groups:
            return iter(())
        halves = self._buffers(2 * size).split(size)[:2]
        used: list[Any] = [None, None]
        if self._cold_stream is not None:
            self._cold_stream.wait_stream(torch.cuda.current_stream(self._slots.device))

        def copy(number: int) -> Any:
            with torch.cuda.stream(self._cold_stream) if self._gpu else nullcontext():
                if self._cold_stream is not None and used[number % 2] is not None:
                    self._cold_stream.wait_event(used[number % 2])
                self._landing.land(layer, groups[number], halves[number % 2])
                return self._event(self._cold_stream)

        return self._computed_beside(groups, halves, used, copy, copy(0))

    def _computed_beside(
        self,
        groups: list[list[int]],
        halves: Any,
        used: list[Any],
        copy: Callable[[int], Any],
        filled: Any,
    ) -> Iterator[tuple[list[int], list[int]]]:
        stride = self._slots.layout.nbytes
        for number, group in enumerate(groups):
            if self._gpu:
                with self._clock.stage("cold wait"):
                    torch.cuda.current_stream(self._slots.device).wait_event(filled)
            base = halves[number % 2].data_ptr()
            yield group, [base + place * stride for place in range(len(group))]
            used[number % 2] = self._event(self._current_stream())
            if number + 1 < len(groups):  # after the launch: reading a file keeps the host here
                filled = copy(number + 1)

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._slots.device) if self._gpu else None

    def _event(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else stream.record_event()

    def reset(self) -> None:
        """Forget picks that were launched without their counterpart (one kind alone)."""
        for space in self._spaces.values():
            space.arrived_N.zero_()

    # -- figures ----------------------------------------------------------------------------------------------

    def move_counts(self, num_rows: int, top_k: int) -> torch.Tensor:
        """int64 [2] on the device: distinct and cold experts of the windows of such a size since the last call, which
        are then counted there no more; for a captured window."""
        space = self._space(num_rows, top_k)
        counts_2 = space.counts_2.clone()
        space.counts_2.zero_()
        return counts_2

    def take_counts(self) -> tuple[int, int]:
        """Distinct experts of the windows since the last call, and the cold ones among them."""
        distinct = cold = 0
        for space in self._spaces.values():
            counts = space.counts_2.tolist()  # host sync: figures are asked for between answers
            space.counts_2.zero_()
            distinct, cold = distinct + counts[0], cold + counts[1]
        return distinct, cold


def open_arena(
    source: FileStore, device: torch.device, dtype: torch.dtype, pinner: Any = None, progress: Any = None
) -> tuple[ArenaStore, list[str]]:
    """The arena of a GPU engine, pinned and probed, and what the user should know, one sentence each.

    pinner: an object with `pin(address, bytes) -> bool` and `unpin(address)`; CUDA's by default.
    """
    pinner = pinner or CudaPin(device)
    needed = source.num_layers * source.num_experts * source.layout.with_dtype(dtype).nbytes
    notes = check_host_memory(needed)
    arena = ArenaStore(source, dtype=dtype, pin=pinner.pin, unpin=pinner.unpin, progress=progress)
    if not arena.pinned and arena.nbytes:
        notes.append(
            f"Only {arena.pinned_bytes / 2**30:.2f} of {arena.nbytes / 2**30:.2f} GiB of host memory could be "
            "pinned: the other experts are copied before they run, which is slower (raise `ulimit -l`; under WSL "
            "raise `memory=` in .wslconfig)."
        )
    if arena.pinned_bytes:
        try:
            from warmset.kernels.experts_probe import can_read

            arena.readable = can_read(arena.arena_NB.view(-1)[: arena.pinned_bytes], device)
        except ImportError:  # no triton: nothing would read it either
            arena.readable = False
        if not arena.readable:
            notes.append(
                "A kernel cannot read pinned host memory here: cold experts are copied before they run."
            )
    return arena, notes


def check_host_memory(needed: int) -> list[str]:
    """Refuse an arena that the cgroup would kill us for; warn about one that the system says it has no room for.

    Only a warning there: the memory of some virtual machines grows as it is used.
    """
    limit = memory.cgroup_left_bytes()
    if limit is not None and needed > limit:
        raise WarmsetError(
            f"host memory must hold all experts, {needed / 2**30:.2f} GiB, beside the slots. The cgroup leaves "
            f"{limit / 2**30:.2f} GiB."
        )
    left = memory.host_available_bytes()
    if needed <= left:
        return []
    return [
        f"The experts need {needed / 2**30:.2f} GiB of host memory, {left / 2**30:.2f} GiB seem to be left."
    ]


def group_size(nbytes: int, num_experts: int) -> int:
    """Experts that are copied together while a prompt is read."""
    return max(1, min(num_experts, GROUP_BYTES // nbytes))


def buffer_bytes(layout: ExpertLayout, num_experts: int, top_k: int, prompt_rows: int) -> tuple[int, int]:
    """Device bytes of a window's buffers, and of those that reading `prompt_rows` rows at once takes."""
    itemsize = layout.dtype.itemsize
    window = MAX_WINDOW_ROWS + WINDOW_ROWS
    window *= top_k * (layout.width * itemsize + layout.hidden * 4)
    copied = 2 * group_size(layout.nbytes, num_experts) * layout.nbytes
    lines = prompt_rows * top_k * (layout.width + layout.hidden) * itemsize
    return window, copied + lines


def _aligned(x_TH: torch.Tensor) -> torch.Tensor:
    x_TH = x_TH.contiguous()
    return x_TH if x_TH.data_ptr() % 16 == 0 else x_TH.clone()

"""Safetensors shards -> where the bytes of each expert lie.

Knows files, tensor names and layouts on disk; knows no slots, no routing and no modelling code. A checkpoint
is checked as a whole before anything is served: every shard that the index names is there, its header parses,
and its length is exactly what the header promises. The names on disk come from transformers' own conversion
table, so that per-expert (`experts.7.gate_proj.weight`, `w1`/`w2`/`w3`) and fused (`experts.gate_up_proj`)
checkpoints end in the same layout here.

Layout of one expert, wherever it lies (shape letters: I expert width, H hidden, E experts a layer):

    gate_up [2I, H]  gate rows first, then up rows, at byte 0
    down    [H, I]   at the next multiple of 128 bytes
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from warmset.errors import CheckpointError

ALIGN_BYTES = 128
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
EXPERT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def align_up(num_bytes: int, to: int = ALIGN_BYTES) -> int:
    return -(-num_bytes // to) * to


@dataclass(frozen=True, kw_only=True)
class TensorSpan:
    """One tensor on disk: `nbytes` bytes of `file` from `offset`, of `dtype` and `shape`."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of file bytes and its place in the expert's own layout."""

    file: Path
    offset: int
    nbytes: int
    dest: int


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Sizes of one expert: H hidden, I width, dtype; `nbytes` is the stride of one expert in memory."""

    hidden: int
    width: int
    dtype: torch.dtype

    @property
    def gate_up_bytes(self) -> int:
        return 2 * self.width * self.hidden * self.dtype.itemsize

    @property
    def down_bytes(self) -> int:
        return self.hidden * self.width * self.dtype.itemsize

    @property
    def down_offset(self) -> int:
        return align_up(self.gate_up_bytes)

    @property
    def payload_bytes(self) -> int:
        return self.gate_up_bytes + self.down_bytes

    @property
    def nbytes(self) -> int:
        return align_up(self.down_offset + self.down_bytes)

    def with_dtype(self, dtype: torch.dtype) -> ExpertLayout:
        return ExpertLayout(hidden=self.hidden, width=self.width, dtype=dtype)

    def views(self, buffer_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [2I, H] and down [H, I] as views of a uint8 buffer of `nbytes` bytes."""
        gate_up = buffer_B[: self.gate_up_bytes].view(self.dtype).view(2 * self.width, self.hidden)
        end = self.down_offset + self.down_bytes
        down = buffer_B[self.down_offset : end].view(self.dtype).view(self.hidden, self.width)
        return gate_up, down


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """The bytes of every expert: `segments[layer][expert]`, with one layout for all of them.

    `modules[layer]` is the dotted path of the experts module in the model, so a layer is named the same way
    here and there; layers without experts have no entry.
    """

    modules: tuple[str, ...]
    segments: tuple[tuple[tuple[Segment, ...], ...], ...]
    layout: ExpertLayout

    @property
    def num_layers(self) -> int:
        return len(self.segments)

    @property
    def num_experts(self) -> int:
        return len(self.segments[0])


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder whose shards have all been checked: `tensors` by name, config, and the bytes in all."""

    folder: Path
    config: dict
    tensors: dict[str, TensorSpan]
    total_bytes: int

    def fingerprint(self) -> str:
        """16 hex digits that tell two models apart: names, shapes and a sample of the routers' bytes.

        The routers' bytes are sampled since they decide what a learned profile is worth; a fine-tune with
        the same names and shapes has other routers.
        """
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            span = self.tensors[name]
            digest.update(f"{name}{span.dtype}{span.shape}".encode())
            if re.search(r"\.(gate|router)(\.\w+)?\.weight$", name):
                with open(span.file, "rb") as stream:
                    stream.seek(span.offset)
                    digest.update(stream.read(min(span.nbytes, 4096)))
        return digest.hexdigest()[:16]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named tensors on the CPU, in memory of their own and in the dtypes of the files."""
        with ExitStack() as streams:
            open_files: dict[Path, Any] = {}
            found = {}
            for name in names:
                span = self.tensors[name]
                if span.file not in open_files:
                    open_files[span.file] = streams.enter_context(open(span.file, "rb", buffering=0))
                found[name] = _read_tensor(open_files[span.file], span)
            for stream in open_files.values():  # read once: these pages would only be in the way
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return found


def _read_tensor(stream: Any, span: TensorSpan) -> torch.Tensor:
    tensor = torch.empty(span.shape, dtype=span.dtype)
    view = tensor.reshape(-1).view(torch.uint8).numpy().data if span.nbytes else memoryview(b"")
    done = 0
    while done < span.nbytes:
        count = os.preadv(stream.fileno(), [view[done:]], span.offset + done)
        if count <= 0:
            raise CheckpointError(f"{span.file} ended early: it was changed while Warmset used it.")
        done += count
    return tensor


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every file of a checkpoint folder and return where each tensor lies.

    Raises CheckpointError naming the file that is missing, cut, a Git LFS pointer, or not safetensors.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no config.json.")
    config = _read_json(config_file)
    tensors: dict[str, TensorSpan] = {}
    total_bytes = 0
    for shard in _shards(folder):
        for span in _read_header(shard):
            if span.name in tensors:
                other = tensors[span.name].file.name
                raise CheckpointError(f"{shard.name} and {other} both hold the tensor {span.name}.")
            tensors[span.name] = span
        total_bytes += shard.stat().st_size
    _check_index(folder, tensors)
    return Checkpoint(folder=folder, config=config, tensors=tensors, total_bytes=total_bytes)


def _read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: no JSON, no UTF-8, or a number past all bounds
        raise CheckpointError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object. Got {type(value).__name__}.")
    return value


def _weight_map(folder: Path) -> dict[str, str] | None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {name} must lie in a file of the same folder. Got {shard!r}.")
    return weight_map


def _shards(folder: Path) -> list[Path]:
    weight_map = _weight_map(folder)
    if weight_map is None:
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise CheckpointError(f"{folder} has pickled weights only; Warmset reads safetensors.")
        raise CheckpointError(f"{folder} has no model.safetensors and no model.safetensors.index.json.")
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing: model.safetensors.index.json names it.")
    return shards


def _check_index(folder: Path, tensors: dict[str, TensorSpan]) -> None:
    for name, shard in (_weight_map(folder) or {}).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{folder / shard} does not hold {name}, which the index says it does.")


def _read_header(file: Path) -> list[TensorSpan]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: fetch the file itself.")
        if len(head) < 8:
            raise CheckpointError(f"{file} is cut: {size} bytes are too few for a safetensors header.")
        (header_bytes,) = struct.unpack("<Q", head)
        if header_bytes > size - 8:
            raise CheckpointError(f"{file} is cut or not safetensors: its header would end past the file.")
        try:
            header = json.loads(stream.read(header_bytes))
            if not isinstance(header, dict):
                raise ValueError("it is no JSON object")
            header.pop("__metadata__", None)
            spans = [_span(file, 8 + header_bytes, name, entry) for name, entry in header.items()]
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{file} has a safetensors header that cannot be read: {error}.") from None
    expected = max((span.offset + span.nbytes for span in spans), default=8 + header_bytes)
    ends = [8 + header_bytes, *sorted(span.offset + span.nbytes for span in spans)]
    if sorted(span.offset for span in spans) != ends[:-1]:
        raise CheckpointError(f"{file} is damaged: its tensors overlap or leave gaps.")
    if size != expected:
        raise CheckpointError(f"{file} is damaged: its header promises {expected} bytes. Got {size}.")
    return spans


def _span(file: Path, base: int, name: str, entry: dict) -> TensorSpan:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: the tensor {name} has the unsupported dtype {entry['dtype']}.")
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{file}: the tensor {name} has offsets or a shape that are no whole numbers.")
    span = TensorSpan(
        name=name,
        file=file,
        offset=base + begin,
        nbytes=end - begin,
        dtype=DTYPES[entry["dtype"]],
        shape=tuple(entry["shape"]),
    )
    if span.nbytes != prod(span.shape) * span.dtype.itemsize or begin < 0:
        raise CheckpointError(f"{file}: the tensor {name} has {span.nbytes} bytes for shape {span.shape}.")
    return span


# -- experts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """One matrix or stack on disk that belongs to an experts module: `matrix` is gate, up, gate_up or down."""

    span: TensorSpan
    matrix: str
    expert: int | None


def find_experts(checkpoint: Checkpoint, model_type: str) -> tuple[ExpertMap, set[str]]:
    """Locate every expert by transformers' conversion table for `model_type`.

    Returns the map and the names of the tensors it covers; experts of `mtp.*` modules are left out. Raises
    CheckpointError when an expert is missing, has another shape, or the family stores experts in a way (a
    transposition, biases, scales) that this reader does not know.
    """
    pieces = _find_pieces(checkpoint, model_type, lambda module: not module.startswith("mtp."))
    if not pieces:
        raise CheckpointError(f"{checkpoint.folder} holds no experts that Warmset finds ({model_type}).")
    return _make_map(pieces)


def find_mtp_experts(checkpoint: Checkpoint, model_type: str) -> tuple[ExpertMap, set[str]] | None:
    """The experts of the layers that predict further tokens (`mtp.*`), as `find_experts` gives the others; or None."""
    pieces = _find_pieces(checkpoint, model_type, lambda module: module.startswith("mtp."))
    return _make_map(pieces) if pieces else None


def _find_pieces(
    checkpoint: Checkpoint, model_type: str, wanted: Callable[[str], bool]
) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = {}
    for span in checkpoint.tensors.values():
        located = _locate(span, model_type)
        if located is not None and wanted(located[0]):
            module, piece = located
            pieces.setdefault(module, []).append(piece)
    return pieces


def _make_map(pieces: dict[str, list[_Piece]]) -> tuple[ExpertMap, set[str]]:
    modules = tuple(sorted(pieces, key=_natural_key))
    layout = _layout_of(pieces[modules[0]])
    num_experts = _count_experts(pieces[modules[0]])
    segments = tuple(_segments(module, pieces[module], layout, num_experts) for module in modules)
    covered = {piece.span.name for found in pieces.values() for piece in found}
    return ExpertMap(modules=modules, segments=segments, layout=layout), covered


def _natural_key(name: str) -> list:
    parts = name.split(".")
    return [(0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part) for part in parts]


def _transforms(model_type: str) -> tuple[list, list]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    mapping: Iterable = get_checkpoint_conversion_mapping(model_type) or []
    mapping = list(mapping)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    return renamings, converters


def _locate(span: TensorSpan, model_type: str) -> tuple[str, _Piece] | None:
    """Which experts module a tensor belongs to and as what, or None for a tensor that is no expert."""
    if ".experts." not in span.name:
        return None
    from transformers.core_model_loading import apply_renamings, rename_source_key

    renamings, converters = _transforms(model_type)
    target, pattern = rename_source_key(span.name, renamings, converters)
    module, _, parameter = target.rpartition(".")
    if not module.endswith("experts"):
        raise CheckpointError(f"{span.file}: Warmset does not know the expert tensor {span.name}.")
    if pattern is None:  # already in the fused layout of the module
        if parameter not in ("gate_up_proj", "down_proj"):
            raise CheckpointError(f"{span.file}: Warmset does not know the expert tensor {span.name}.")
        return module, _Piece(span, "gate_up" if parameter == "gate_up_proj" else "down", None)
    converter = next(step for step in converters if pattern in step.source_patterns)
    operations = [type(step).__name__ for step in converter.operations]
    if operations not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
        raise CheckpointError(
            f"{span.file}: {model_type} stores experts through {' + '.join(operations)}, not supported yet."
        )
    glob = re.escape(pattern).replace(r"\*", r"(\d{1,9})")
    found = re.search(glob, apply_renamings(span.name, renamings))
    if found is None:
        raise CheckpointError(f"{span.file}: Warmset does not know the expert tensor {span.name}.")
    if parameter == "down_proj":
        matrix = "down"
    else:
        matrix = ("gate", "up")[list(converter.source_patterns).index(pattern)]
    return module, _Piece(span, matrix, int(found.group(1)))


def _layout_of(pieces: list[_Piece]) -> ExpertLayout:
    down = next((piece.span for piece in pieces if piece.matrix == "down"), None)
    if down is None:
        raise CheckpointError(f"{pieces[0].span.file}: no down projection beside {pieces[0].span.name}.")
    if len(down.shape) < 2:
        raise CheckpointError(f"{down.file}: {down.name} must be a matrix. Got the shape {down.shape}.")
    hidden, width = down.shape[-2:]
    if down.dtype not in EXPERT_DTYPES:
        raise CheckpointError(f"{down.file}: experts must be float32, bfloat16 or float16. Got {down.dtype}.")
    return ExpertLayout(hidden=hidden, width=width, dtype=down.dtype)


def _count_experts(pieces: list[_Piece]) -> int:
    down = [piece for piece in pieces if piece.matrix == "down"]
    return down[0].span.shape[0] if down[0].expert is None else len(down)


def _segments(
    module: str, pieces: list[_Piece], layout: ExpertLayout, num_experts: int
) -> tuple[tuple[Segment, ...], ...]:
    by_expert: list[dict[str, Segment]] = [{} for _ in range(num_experts)]
    half = layout.gate_up_bytes // 2
    place = {
        "gate_up": (0, layout.gate_up_bytes, (2 * layout.width, layout.hidden)),
        "gate": (0, half, (layout.width, layout.hidden)),
        "up": (half, half, (layout.width, layout.hidden)),
        "down": (layout.down_offset, layout.down_bytes, (layout.hidden, layout.width)),
    }
    for piece in pieces:
        span, (dest, nbytes, shape) = piece.span, place[piece.matrix]
        stacked = piece.expert is None
        if span.shape != ((num_experts, *shape) if stacked else shape) or span.dtype != layout.dtype:
            raise CheckpointError(
                f"{span.file}: {span.name} must be {shape} of {layout.dtype} an expert "
                f"({num_experts} experts). Got {span.shape} of {span.dtype}."
            )
        for expert in range(num_experts) if stacked else [piece.expert]:
            if expert is None or expert >= num_experts or piece.matrix in by_expert[expert]:
                raise CheckpointError(f"{span.file}: {span.name} has an expert index out of order.")
            offset = span.offset + (expert * nbytes if stacked else 0)
            by_expert[expert][piece.matrix] = Segment(file=span.file, offset=offset, nbytes=nbytes, dest=dest)
    for expert, found in enumerate(by_expert):
        if set(found) not in ({"gate_up", "down"}, {"gate", "up", "down"}):
            missing = {"gate", "up", "down"} - set(found)
            raise CheckpointError(f"{module}: expert {expert} has no {' and no '.join(sorted(missing))}.")
    return tuple(tuple(sorted(found.values(), key=lambda segment: segment.dest)) for found in by_expert)


def list_files(expert_map: ExpertMap) -> list[Path]:
    """The shards that hold experts, each once, in order of first use."""
    return list(
        dict.fromkeys(segment.file for layer in expert_map.segments for expert in layer for segment in expert)
    )

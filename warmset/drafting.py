"""Chooses and opens the source of drafts that a configuration asks for, and says why.

What can be refused is refused by `resolve`, before any weights are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warmset.checkpoint import Checkpoint, open_checkpoint
from warmset.config import EngineConfig, shown
from warmset.device_experts import DeviceExperts
from warmset.draft import Draft, LookupDraft, ModelDraft, NoDraft
from warmset.errors import CheckpointError, WarmsetError, first_line
from warmset.model import quiet_transformers, skip_unused_indexers
from warmset.models import find_model
from warmset.mtp import MtpDraft, has_mtp, mtp_bytes
from warmset.slots import Slots
from warmset.stages import StageClock
from warmset.store import FileStore

ROWS_WITH_DRAFTS = 4


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Rows a window may have, where its drafts come from, and why; `extra_bytes` is what the source keeps loaded."""

    rows: int
    source: str
    why: str
    extra_bytes: int = 0
    checkpoint: Checkpoint | None = None


def resolve(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> Drafting:
    """What `window`, `draft` and `draft_model` come to for this checkpoint; refuses what cannot work."""
    asked = config.draft is not None
    if config.draft == "mtp" and not has_mtp(checkpoint):
        raise WarmsetError(f"draft mtp needs an MTP layer (mtp.*), which {checkpoint.folder} does not have.")
    source = config.draft or _usual_source(config, checkpoint)
    if source == "none":
        more = (config.window or 1) > 1
        return Drafting(rows=1, source="none", why="no drafts, so one row" if more else "one row, no drafts")
    rows = config.window or ROWS_WITH_DRAFTS
    if rows == 1:
        return Drafting(rows=1, source="none", why="a window of one row has no drafts")
    why = "as asked" if asked else f"{source}, the best source that this model has"
    if source == "mtp":
        return Drafting(rows=rows, source=source, why=why, extra_bytes=mtp_bytes(checkpoint, dtype))
    if source == "model":
        second = _open_second(config, checkpoint)
        elements = sum(span.nbytes // span.dtype.itemsize for span in second.tensors.values())
        return Drafting(
            rows=rows, source=source, why=why, extra_bytes=elements * dtype.itemsize, checkpoint=second
        )
    return Drafting(rows=rows, source=source, why=why)


def _usual_source(config: EngineConfig, checkpoint: Checkpoint) -> str:
    if config.window is None or config.window == 1:
        return "none"
    return "mtp" if has_mtp(checkpoint) else "lookup"


def _open_second(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    assert config.draft_model is not None
    second = open_checkpoint(find_model(config.draft_model, None))
    if _tokens_of(second.folder) != _tokens_of(checkpoint.folder):
        raise WarmsetError(
            f"draft_model must have the tokenizer of the model it drafts for. Got {shown(config.draft_model)}, "
            "whose tokenizer.json has other tokens."
        )
    return second


def _tokens_of(folder: Path) -> Any:
    """What makes ids mean the same text: the tokenizer's model and the tokens added to it."""
    file = folder / "tokenizer.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        return value["model"], [(token["id"], token["content"]) for token in value["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {first_line(error)}") from None


def open_draft(
    drafting: Drafting,
    *,
    checkpoint: Checkpoint,
    trunk: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    make_kernels: Callable[[Slots, FileStore, Callable, StageClock], DeviceExperts | None],
) -> Draft:
    """Load what the source needs. make_kernels: what runs experts of other slots on this device."""
    if drafting.source == "none":
        return NoDraft()
    if drafting.source == "lookup":
        return LookupDraft()
    if drafting.source == "mtp":
        return MtpDraft(checkpoint, trunk, dtype, device, max_model_len, make_kernels)
    assert drafting.checkpoint is not None
    second = _load_second(drafting.checkpoint, dtype, device)
    skip_unused_indexers(second, max_model_len)
    return ModelDraft(second, trunk.config.vocab_size)


def _load_second(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    from warmset.states import SequenceState

    try:
        with quiet_transformers():
            second = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
            )
    except Exception as error:  # whatever building or loading raises is about these files
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {first_line(error)}") from None
    if not SequenceState.new(second.config).can_go_back():
        raise CheckpointError(f"{checkpoint.folder} has sliding-window attention, so it cannot draft.")
    return second.eval().requires_grad_(False).to(device)

"""A model looked at but not loaded: files found and checked, device, dtype, context and drafts resolved.

What a user got wrong is refused here, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warmset import checkpoint as ckpt
from warmset import drafting, model, plan, profile
from warmset.config import EngineConfig, shown
from warmset.errors import WarmsetError
from warmset.models import BUILTIN, find_model
from warmset.routing import Policy


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model looked at but not loaded: enough to refuse bad input before any work."""

    folder: Path
    checkpoint: ckpt.Checkpoint
    config: Any
    experts: ckpt.ExpertMap
    covered: set[str]
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    drafting: drafting.Drafting


def prepare(config: EngineConfig) -> Prepared:
    """Find and check the model's files and resolve device, dtype, context and slots, without loading weights."""
    folder = find_model(config.model, config.revision)
    if config.revision is not None and (config.model in BUILTIN or Path(config.model).expanduser().is_dir()):
        raise WarmsetError(
            f"revision is for hub ids. Got {shown(config.revision)} with {shown(config.model)}."
        )
    checkpoint = ckpt.open_checkpoint(folder)
    family = model.load_config(checkpoint)
    experts, covered = ckpt.find_experts(checkpoint, family.model_type)
    model.check_experts(family, experts)
    context = model.context_length(family)
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise WarmsetError(
            f"max_model_len must be at most the model's context, {context}. Got {max_model_len}."
        )
    device = resolve_device(config.device)
    if config.vram is not None:
        plan.parse_bytes(config.vram, "vram")
        if device.type != "cuda":
            raise WarmsetError(
                f"vram is for CUDA devices: on the {device.type} give slots. Got {config.vram!r}."
            )
    config.slots.resolve(experts_total=experts.num_layers * experts.num_experts, fitting=0, fitting_why="")
    if config.learn is not None:
        profile.profile_to_extend(Path(config.learn), identity_of(config.model, experts, checkpoint))
    dtype = _resolve_dtype(config.dtype, device, experts.layout.dtype)
    return Prepared(
        folder=folder,
        checkpoint=checkpoint,
        config=family,
        experts=experts,
        covered=covered,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        drafting=drafting.resolve(config, checkpoint, dtype),
    )


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` -> the device; refuses one that is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (":" in name and not (index.isascii() and index.isdecimal() and len(index) < 5)):
        raise WarmsetError(f"device must be auto, cpu, cuda or cuda:N. Got {shown(name)}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise WarmsetError(f"device {name} is not there: this machine has {count} CUDA devices.")
    return torch.device("cuda", int(index or 0))


def _resolve_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else stored


def identity_of(name: str, experts: ckpt.ExpertMap, checkpoint: ckpt.Checkpoint) -> profile.Identity:
    """What a profile of this model must say it is of."""
    return profile.Identity(
        model=name,
        num_layers=experts.num_layers,
        num_experts=experts.num_experts,
        fingerprint=checkpoint.fingerprint(),
    )


def check_policy(policy: Any) -> None:
    """Refuse what is neither a routing policy nor None."""
    if policy is not None and (isinstance(policy, type) or not isinstance(policy, Policy)):
        raise WarmsetError(f"policy must be an object with a method `route`, or None. Got {shown(policy)}.")


def check_prompt(num_tokens: int, max_model_len: int) -> None:
    """Refuse an empty prompt, and one that leaves no room for a new token."""
    if num_tokens == 0:
        raise WarmsetError("prompt must hold at least one token. Got an empty one.")
    if num_tokens >= max_model_len:
        raise WarmsetError(
            f"prompt must be shorter than max_model_len, {max_model_len} tokens. Got {num_tokens} tokens."
        )

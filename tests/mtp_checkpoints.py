"""Small checkpoints with an MTP layer."""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import load_file, save_file


def add_mtp(folder, to):
    """A copy of a random checkpoint with a random MTP layer under the names of published ones, experts one by one."""
    from warmset.checkpoint import open_checkpoint
    from warmset.model import load_config
    from warmset.mtp import MtpHead

    shutil.copytree(folder, to)
    checkpoint = open_checkpoint(to)
    config = load_config(checkpoint)
    from transformers import AutoModelForCausalLM

    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(11)
    head = MtpHead(trunk, torch.float32)
    inside = {"body.": "", "norm.": "norm."}
    tensors = load_file(to / "model.safetensors")
    for name, value in head.state_dict().items():
        if "embed_tokens" in name:
            continue
        place = next(
            (new + name.removeprefix(old) for old, new in inside.items() if name.startswith(old)), name
        )
        tensors[f"mtp.{place}"] = torch.randn_like(value) * 0.3 if value.ndim > 1 else value.clone()
    width, hidden = config.moe_intermediate_size, config.hidden_size
    for expert in range(config.num_experts):
        stem = f"mtp.layers.0.mlp.experts.{expert}"
        tensors[f"{stem}.gate_proj.weight"] = torch.randn(width, hidden) * 0.3
        tensors[f"{stem}.up_proj.weight"] = torch.randn(width, hidden) * 0.3
        tensors[f"{stem}.down_proj.weight"] = torch.randn(hidden, width) * 0.3
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to

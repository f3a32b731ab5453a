"""What a model takes in fast memory before any expert has a slot: weights, caches, buffers, from its configuration."""

from __future__ import annotations

from typing import Any

import torch

from warmset.checkpoint import ExpertLayout
from warmset.device_experts import buffer_bytes
from warmset.landing import staging_bytes
from warmset.plan import Needs
from warmset.prepare import Prepared
from warmset.window import PROMPT_CHUNK_ROWS

ACTIVATIONS_A_ROW = 32
"""Hidden-sized vectors a row that a layer holds at once, with room to spare: streams, heads, shared expert."""


def needs_of(
    prepared: Prepared,
    layout: ExpertLayout,
    trunk: torch.nn.Module,
    *,
    top_k: int,
    graphs: bool,
    snapshot_bytes: int,
) -> Needs:
    """Bytes of everything but the slots, at the longest sequence that the settings allow.

    layout: of an expert in fast memory. graphs: decode windows are captured, and keep static pages of their own.
    """
    config, experts = prepared.config, prepared.experts
    itemsize = prepared.dtype.itemsize
    rows = min(PROMPT_CHUNK_ROWS, prepared.max_model_len)
    window, prompt = buffer_bytes(layout, experts.num_experts, top_k, rows)
    # Activations that live together while a chunk is read, router logits, and the mask of the attention.
    prompt += rows * (ACTIVATIONS_A_ROW * config.hidden_size * itemsize + 4 * experts.num_experts)
    prompt += rows * prepared.max_model_len * itemsize
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in trunk.parameters()}
    on_gpu = prepared.device.type == "cuda"
    return Needs(
        weights=sum(weights.values()) + prepared.drafting.extra_bytes,
        cache=_cache_bytes(prepared, snapshot_bytes) * (2 if on_gpu and graphs else 1),
        prompt=prompt,
        window=window if on_gpu else staging_bytes(experts.layout, layout),
        max_model_len=prepared.max_model_len,
    )


def _cache_bytes(prepared: Prepared, snapshot_bytes: int) -> int:
    """Keys, values and recurrent states of the longest sequence, and the snapshots of earlier ones."""
    config: Any = prepared.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    attention = sum(kind != "linear_attention" for kind in kinds)
    keys_and_values = 2 * heads * head_dim * prepared.dtype.itemsize * prepared.max_model_len
    state = getattr(config, "linear_num_value_heads", 0) or 0
    state *= getattr(config, "linear_key_head_dim", 0) * getattr(config, "linear_value_head_dim", 0) * 4
    recurrent = len(kinds) - attention
    # A window keeps the state after each of its rows, the conversation earlier ones.
    states = recurrent * state * (1 + prepared.drafting.rows)
    attention += prepared.drafting.source == "mtp"
    return attention * keys_and_values + states + (snapshot_bytes if recurrent else 0)

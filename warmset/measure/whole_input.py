"""The input of `bench window`: models at the shapes of MODELS.md with random weights, and what their rows pick.

Weights are made on the device; the trunk is transformers' own model of the family, its experts lie in slots and in a
host arena that a few layers share. What a row picks does not come from random routers: `Script` gives every layer's
logits, from a fixed number of distinct and cold experts, or from a routing trace tiled over the layers with the experts
of each layer permuted. The router's own product runs all the same, and is timed.

Assumed for qwen4-exp-125b, whose card does not say: rotary embedding of a quarter of a head as Qwen3-Next has it, an
indexer of 4 x 128 with a budget of 2,048 and blocks of 32, one PLE layer of 16 rows of 128 a token, its table cut to
20,000 rows a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warmset import model
from warmset.checkpoint import ExpertMap
from warmset.errors import WarmsetError
from warmset.graph.forms import HostRows
from warmset.measure.recording import Recording, load_recording
from warmset.measure.trace import Trace, load_trace
from warmset.measure.window_input import SHAPES, Shape, WindowInput
from warmset.profile import hottest
from warmset.router import WarmRouter

PAST_TOKENS = 4096
GAP = 0.25
"""Between the logits of neighbouring ranks, where picks are fixed; exact in bf16."""
UNKNOWN_BELOW = 20.0
"""Scores that a recording left out are put so far below the least that it kept of their row."""


@dataclass(frozen=True, kw_only=True)
class WholeShape:
    """A model whose windows are measured: its experts, and transformers' configuration of the rest."""

    experts: Shape
    make_config: Callable[[], Any]
    past_tokens: int = PAST_TOKENS


def _qwen3_next(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import Qwen3NextConfig

        return Qwen3NextConfig(**changes)

    return make


def _qwen4_exp(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import Qwen4ExpTextConfig

        return Qwen4ExpTextConfig(**changes)

    return make


_TINY = dict(
    vocab_size=128, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    max_position_embeddings=512, eos_token_id=0,
    layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
_TINY_EXP = dict(
    hc_count=2, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=32,
    indexer_compress_ratio=8, ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=4, ngram_vocab_size_base=50,
    split_ngram_parts=2,
)  # fmt: skip
_EXP_125B = dict(
    num_hidden_layers=48, eos_token_id=0, max_position_embeddings=32768,
    indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=32,
    ple_layer_ids=[1], ngram_vocab_size_base=20_000,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
)  # fmt: skip

WHOLE_SHAPES = {
    "qwen3-next-80b": WholeShape(experts=SHAPES["qwen3-next-80b"], make_config=_qwen3_next()),
    "qwen4-exp-125b": WholeShape(experts=SHAPES["qwen3-next-80b"], make_config=_qwen4_exp(**_EXP_125B)),
    "tiny": WholeShape(experts=SHAPES["tiny"], make_config=_qwen3_next(**_TINY), past_tokens=64),
    "tiny-exp": WholeShape(
        experts=SHAPES["tiny"], make_config=_qwen4_exp(**_TINY, **_TINY_EXP), past_tokens=64
    ),
}


def make_trunk(shape: WholeShape, device: torch.device) -> Any:
    """transformers' model of the family without its experts, random weights, on the device."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = shape.make_config()
    small = copy.deepcopy(config)
    small.num_experts = 1  # the experts are left out; built first, all of them would not fit anywhere
    with torch.device(device), model.quiet_transformers():
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(small)]
        bare = model._without_experts(family)
        trunk = bare._from_config(small, dtype=shape.experts.dtype, attn_implementation="sdpa")
    for module in trunk.modules():
        if hasattr(module, "top_k") and hasattr(module, "num_experts") and hasattr(module, "weight"):
            module.num_experts = config.num_experts
            weight_EH = torch.randn(config.num_experts, config.hidden_size, device=device) * 0.02
            module.weight = torch.nn.Parameter(weight_EH.to(shape.experts.dtype))
    trunk.config.num_experts = config.num_experts
    _put_tables_on_the_host(trunk, device)
    return trunk.eval().requires_grad_(False)


def _put_tables_on_the_host(trunk: Any, device: torch.device) -> None:
    """Embeddings of n-grams belong in pinned host memory."""
    for module in list(trunk.modules()):
        if hasattr(module, "ngram_embedding"):
            table_ND = module.ngram_embedding.weight.data.cpu().contiguous()
            module.ngram_embedding = HostRows(
                table_ND.pin_memory() if device.type == "cuda" else table_ND, device
            )


def find_layers(trunk: Any, shape: Shape) -> list:
    """The MoE layers of a trunk that no checkpoint stands behind."""
    paths = [path for path, _ in trunk.named_modules() if path.endswith(".experts")]
    none = tuple(tuple(() for _ in range(shape.experts)) for _ in paths)
    return model.find_layers(trunk, ExpertMap(modules=tuple(paths), segments=none, layout=shape.layout))


class Script:
    """Gives every router's logits while it is `on`: logits_LTE [L, 8, E] in the trunk's dtype, written in place."""

    def __init__(self, trunk: Any, shape: Shape, device: torch.device) -> None:
        self.on = False
        self.logits_LTE = torch.full(
            (shape.layers, 8, shape.experts), -20.0, dtype=shape.dtype, device=device
        )
        self.routers: list[ScriptedRouter] = []
        for path, module in list(trunk.named_modules()):
            if isinstance(module, WarmRouter):
                parent, _, name = path.rpartition(".")
                router = ScriptedRouter(module, self)
                setattr(trunk.get_submodule(parent), name, router)
                self.routers.append(router)

    def use_routing(self, routing: Any) -> None:
        for router in self.routers:
            router._routing = routing

    def pick(self, window: WindowInput) -> None:
        """From now on every layer's rows pick `window.ids`, in that order."""
        for layer, ids_TK in enumerate(window.ids):
            rank_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
            logits_TK = (10.0 - GAP * rank_K).to(self.logits_LTE.dtype).expand(ids_TK.shape)
            rows_TE = self.logits_LTE[layer, : len(ids_TK)]
            rows_TE.fill_(-20.0).scatter_(1, ids_TK.long(), logits_TK)


class ScriptedRouter(WarmRouter):
    """In a router's place: its product, then the script's logits."""

    def __init__(self, inner: WarmRouter, script: Script) -> None:
        super().__init__(inner.original, inner.layer, inner._routing)
        self._script = script

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        logits_TE = super().logits(x_TH)
        if self._script.on:
            return self._script.logits_LTE[self.layer.index, : len(x_TH)]
        return logits_TE


@dataclass(frozen=True, kw_only=True)
class TiledTrace:
    """A trace over all layers of a shape: window w is logits_WLTE[w]; `resident`: the pairs that have slots.

    committed: rows that a window of the trace kept, on average; None where it has no windows of so many rows.
    """

    logits_WLTE: torch.Tensor
    resident: list[tuple[int, int]]
    why: str
    committed: float | None = None


def read_trace(path: Path) -> tuple[Trace, Recording | None]:
    """The scores of every row, and the marks of its windows: None for a file of full scores, which has none.

    Raises WarmsetError naming the file when it is no trace.
    """
    try:
        return load_trace(path), None
    except WarmsetError:
        recorded = load_recording(path)
    count_R = recorded.count_NL.reshape(-1).astype(np.int64)
    least_R = recorded.score_P[np.cumsum(count_R) - 1]
    dense_RE = np.repeat((least_R - UNKNOWN_BELOW)[:, None], recorded.num_experts, axis=1)
    dense_RE[np.repeat(np.arange(len(count_R)), count_R), recorded.expert_P] = recorded.score_P
    scores_NLE = torch.from_numpy(dense_RE).view(recorded.num_rows, recorded.num_layers, recorded.num_experts)
    trace = Trace(
        scores_NLE=scores_NLE.half(),
        kind_N=torch.from_numpy(recorded.kind_N),
        kinds=recorded.kinds,
        top_k=recorded.top_k,
        renormalize=recorded.renormalize,
        model=recorded.model,
        fingerprint=recorded.fingerprint,
    )
    return trace, recorded


def tile_trace(
    trace: Trace,
    shape: Shape,
    rows: int,
    slots: int,
    most_windows: int,
    counts_LE: np.ndarray | None,
    seed: int = 0,
    marks: Recording | None = None,
) -> TiledTrace:
    """Layer l takes layer l modulo the trace's number, its experts permuted by a permutation of its own.

    counts_LE: how often the trace's own layers picked each expert, for the choice of residents; None: counted on the
    trace itself. Windows are spread over the whole trace: those that `marks` has of so many rows, or else `rows`
    consecutive rows of one kind.
    """
    _, trace_layers, experts = trace.scores_NLE.shape
    if experts != shape.experts or trace.top_k != shape.top_k:
        raise WarmsetError(
            f"--trace must have {shape.experts} experts and {shape.top_k} picks a row. Got {experts} and {trace.top_k}."
        )
    generator = torch.Generator().manual_seed(seed)
    order_LE = torch.stack([torch.randperm(experts, generator=generator) for _ in range(shape.layers)])
    source_L = torch.arange(shape.layers) % trace_layers
    why = "a learned profile"
    if counts_LE is None:
        ids_NLK = trace.scores_NLE.float().topk(trace.top_k, dim=-1).indices
        counts = [
            torch.bincount(ids_NLK[:, layer].flatten(), minlength=experts) for layer in range(trace_layers)
        ]
        counts_LE, why = torch.stack(counts).double().numpy(), "the picks of the trace itself"
    tiled_LE = torch.from_numpy(np.asarray(counts_LE, dtype=np.float64))[source_L].gather(1, order_LE)
    own = (
        [] if marks is None else [(first, kept) for first, end, kept in marks.windows if end - first == rows]
    )
    starts = [first for first, _ in own] or [
        start
        for start in range(0, trace.num_rows - rows + 1, rows)
        if bool((trace.kind_N[start : start + rows] == trace.kind_N[start]).all())
    ]
    if not starts:
        raise WarmsetError(
            f"--trace must have a window of {rows} rows of one kind. Got {trace.num_rows} rows."
        )
    step = max(1, len(starts) // most_windows)
    row_WT = torch.tensor(starts[::step][:most_windows])[:, None] + torch.arange(rows)
    scores_WTLE = trace.scores_NLE[row_WT]
    logits_WLTE = torch.empty(len(row_WT), shape.layers, rows, experts, dtype=shape.dtype)
    for layer, source in enumerate(source_L.tolist()):
        logits_WLTE[:, layer] = scores_WTLE[:, :, source, order_LE[layer]]
    return TiledTrace(
        logits_WLTE=logits_WLTE,
        resident=hottest(tiled_LE.numpy(), min(slots, shape.layers * experts)),
        why=why,
        committed=sum(kept for _, kept in own) / len(own) if own else None,
    )


def learned_counts(trace: Any) -> Any:
    """Counts of the profile that ships with the trace's model; None where there is none that fits."""
    from warmset.models import BUILTIN_PROFILES
    from warmset.profile import Identity, load_profile

    path = BUILTIN_PROFILES.get(trace.model)
    if path is None:
        return None
    _, layers, experts = trace.scores_NLE.shape
    identity = Identity(
        model=trace.model, num_layers=layers, num_experts=experts, fingerprint=trace.fingerprint
    )
    profile, _ = load_profile(Path(path), identity)
    return None if profile is None else profile.counts_LE

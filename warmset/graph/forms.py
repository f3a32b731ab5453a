"""Static forms of transformers' modules: what a decode window runs in their places, one seam each.

    linear_attn        projections as one product, then the delta rule over rings of states
    QSA indexer        scores and picks of all rows at once, over keys of blocks that are kept
    attention          few rows over static pages
    norms, gates, MLPs one launch where transformers has three to nine
    n-gram rows (PLE)  gathered from pinned host memory by their address

`StaticForms` puts them in once; they act inside `using()` and leave the modules as they are outside of it, so prompts
and windows that no graph runs go on through transformers' own code. A module is taken by what it computes on random
rows or by the parameters it has, never by its family's name; one that is not understood keeps its own forward. On a
CPU the same forms run in plain torch (`kernels.window_reference`), or in Triton's interpreter.

    T rows, H hidden, S places of the cache, N value heads, B blocks of an indexer, D width of an index key
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from warmset.graph.cache import StaticCache
from warmset.kernels import window_reference
from warmset.kernels.window_state import IndexWeights, Projected

ATTENTION = "warmset_window"
_HELD_AS = "_warmset_static_forms"


def kernels_run(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on a GPU, or in the interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _ops(device: torch.device) -> Any:
    if not kernels_run(device):
        return window_reference
    from warmset.kernels import delta_window, index_blocks, small_ops, window_attention

    return SimpleNamespace(
        delta_window=delta_window.delta_window,
        index_blocks=index_blocks.index_blocks,
        window_attention=window_attention.window_attention,
        **{
            name: getattr(small_ops, name)
            for name in ("rms_norm", "gated_norm", "silu_mul", "stream_gates", "stream_mix")
        },
    )


def merged(*linears: nn.Linear) -> torch.Tensor:
    """One matrix [sum of outputs, H] of the linears, which become views of it: no byte is held twice."""
    weight = torch.cat([linear.weight.data for linear in linears])
    first = 0
    for linear in linears:
        linear.weight.data = weight[first : first + linear.out_features]
        first += linear.out_features
    return weight


def _plain(linear: Any) -> bool:
    return isinstance(linear, nn.Linear) and linear.bias is None


class StaticForms:
    """The static forms of one trunk; there is one object for each (`of`)."""

    def __init__(self, trunk: Any) -> None:
        self.trunk = trunk
        parameter = next(trunk.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self._ops = _ops(self.device)
        self.hidden_TH: torch.Tensor | None = None
        """The decoder's last hidden states in the last forward; inside `using`."""
        self._cache: StaticCache | None = None
        self._indexers: list[Any] = []
        self._index_weights: dict[int, IndexWeights] = {}
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.why_not: str | None = None
        """Why this trunk has no static form, as the end of a sentence."""
        self._put_in()
        trunk.get_decoder().register_forward_hook(self._keep_hidden)
        _register_attention()

    @classmethod
    def of(cls, trunk: Any) -> StaticForms:
        """The forms of this trunk, put in when they are first asked for."""
        held = vars(trunk)  # beside the modules: it lives as long as the trunk does
        if _HELD_AS not in held:
            held[_HELD_AS] = cls(trunk)
        return held[_HELD_AS]

    @contextmanager
    def using(self, cache: StaticCache) -> Iterator[None]:
        """Inside, forwards of the trunk are static windows over `cache`."""
        configs = {
            id(module.config): module.config for module in self.trunk.modules() if hasattr(module, "config")
        }
        before = {key: config._attn_implementation for key, config in configs.items()}
        self._cache = cache
        try:
            for config in configs.values():
                config._attn_implementation = ATTENTION
            yield
        finally:
            self._cache = self.hidden_TH = None
            for key, config in configs.items():
                config._attn_implementation = before[key]

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        if self._cache is not None:
            self.hidden_TH = output.last_hidden_state[0]

    def forward(self, token_T: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] after each row of a window at `position_T`; inside `using`."""
        inputs = self.inputs(position_T)
        return self.trunk(input_ids=token_T[None], cache=self._cache, use_cache=True, **inputs).logits[0]

    def inputs(self, position_T: torch.Tensor) -> dict[str, Any]:
        """Positions and mask of a window at `position_T`, as a forward takes them; inside `using`."""
        cache = self._cache
        assert cache is not None
        seen_TS = torch.arange(cache.places, device=self.device)[None] <= position_T[:, None]
        mask: Any = seen_TS[None, None]
        decoder = self.trunk.get_decoder()
        if "causal_mask_mapping" in inspect.unwrap(type(decoder).forward).__code__.co_varnames:
            kinds = set(self.trunk.config.layer_types)
            mask = {kind: None if kind == "linear_attention" else mask for kind in kinds}
        return {"position_ids": position_T[None], "attention_mask": mask}

    def prepare(self, cache: StaticCache) -> None:
        """What a forward must find ready: block keys of each indexer; outside of any graph."""
        for module in self._indexers:
            layer: Any = cache.layers[module.layer_idx]
            if layer.index_keys is None or layer.blocks_known:
                continue
            block_keys = self._all_block_keys(module, layer)
            if layer.block_keys is None:
                layer.block_keys = block_keys
            else:  # in place: a graph holds it
                layer.block_keys.copy_(block_keys)
            layer.blocks_known = True

    # -- putting in -------------------------------------------------------------------------------------------

    def _put_in(self) -> None:
        for path, module in self.trunk.named_modules():
            name = path.rpartition(".")[2]
            if name == "linear_attn":
                self._put_in_delta(module)
            elif _is_indexer(module):
                self._put_in_indexer(module)
            elif hasattr(module, "input_mix_weight_down"):
                self._put_in_streams(module)
            elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                self._put_in_mlp(module)
            elif "norm" in name and isinstance(getattr(module, "weight", None), nn.Parameter):
                self._put_in_norm(module)

    def _put(self, module: Any, form: Callable) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._cache is None:
                return inner(*args, **kwargs)
            return form(module, *args, **kwargs)

        module.forward = forward

    def _put_in_norm(self, module: Any) -> None:
        kind = _norm_kind(module)
        if kind is not None:
            self._put(
                module,
                lambda module, x: self._ops.rms_norm(
                    x, module.weight, kind.eps, plus_one=kind.plus_one, groups=kind.groups
                ),
            )

    def _put_in_mlp(self, module: Any) -> None:
        points = torch.linspace(-6, 6, 193)
        parts = (module.gate_proj, module.up_proj, module.down_proj)
        if not all(map(_plain, parts)) or not torch.allclose(
            module.act_fn(points), F.silu(points), atol=1e-6
        ):
            return
        weight = merged(module.gate_proj, module.up_proj)

        def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
            h_NI = self._ops.silu_mul(F.linear(x.reshape(-1, x.shape[-1]), weight))
            return module.down_proj(h_NI).view(x.shape)

        self._put(module, mlp)

    def _put_in_streams(self, module: Any) -> None:
        """A hyper-connection's read (Qwen4-Exp): mixed input, the streams themselves, and injection weights."""
        inject, streams = module.block_inject_weight, module.hc_count
        down = module.input_mix_weight_down
        weight = down.weight if inject is None else merged(down, inject)

        def read(module: Any, x: torch.Tensor) -> Any:
            normed = module.hc_norm(x)
            flat = normed.view(-1, normed.shape[-1])
            act_NR, inject_NG = self._ops.stream_gates(F.linear(flat, weight), down.out_features, streams)
            mix = module.input_mix_weight_up(act_NR)
            mixed = self._ops.stream_mix(mix, flat, streams).view(*x.shape[:-1], -1)
            return mixed if inject is None else (mixed, x, inject_NG.view(*x.shape[:-1], streams))

        self._put(module, read)

    # -- gated delta net --------------------------------------------------------------------------------------

    def _put_in_delta(self, module: Any) -> None:
        why = _why_not_delta(module, kernels_run(self.device))
        if why is not None:
            self.why_not = self.why_not or why
            return
        repeat = module.num_v_heads // module.num_k_heads
        key_dim, value_dim = module.head_k_dim, module.head_v_dim
        wide = repeat * value_dim
        if hasattr(module, "in_proj_qkvz"):
            weight = merged(module.in_proj_qkvz, module.in_proj_ba)
            starts = (0, key_dim, 2 * key_dim, 2 * key_dim + wide)
            gates = module.in_proj_qkvz.out_features
            ends = (gates, gates + repeat)
            strides = {"key_stride": 2 * key_dim + 2 * wide, "value_stride": 2 * key_dim + 2 * wide}
            strides["gate_stride"] = 2 * repeat
        else:
            parts = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
            weight = merged(*parts)
            keys = module.num_k_heads * key_dim
            starts = (0, keys, 2 * keys, parts[0].out_features)
            gates = parts[0].out_features + parts[1].out_features
            ends = (gates, gates + module.num_v_heads)
            strides = {"key_stride": key_dim, "value_stride": wide, "gate_stride": repeat}
        norm, conv = module.norm, module.conv1d
        sigmoid = norm.activation == "sigmoid"

        def delta_net(
            module: Any, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any
        ) -> torch.Tensor:
            layer = cache.layers[module.layer_idx]
            x = F.linear(hidden_states[0], weight)
            query, key, value, gate = (x[:, start:] for start in starts)
            b, a = (x[:, start:] for start in ends)
            projected = Projected(query=query, key=key, value=value, b=b, a=a, **strides)
            out_TNV = self._ops.delta_window(
                projected, conv.weight.view(-1, conv.weight.shape[-1]), module.A_log, module.dt_bias,
                cache.place.begin_2, layer.delta,
            )  # fmt: skip
            y = self._ops.gated_norm(
                out_TNV, gate, norm.weight, norm.variance_epsilon,
                repeat=repeat, group_stride=strides["value_stride"], sigmoid=sigmoid,
            )  # fmt: skip
            return module.out_proj(y)[None]

        self._put(module, delta_net)

    # -- QSA indexer ------------------------------------------------------------------------------------------

    def _block_angles(self, blocks: int, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B, R] of the position at which each block begins."""
        start_B = ratio * torch.arange(blocks, device=self.device)
        rotary = self.trunk.get_decoder().rotary_emb
        like = torch.empty(1, 1, 1, dtype=self._dtype, device=self.device)
        cos, sin = rotary(like, start_B[None])
        return cos[0], sin[0]

    def _all_block_keys(self, module: Any, layer: Any) -> torch.Tensor:
        ratio = module.compress_ratio
        blocks = layer.places // ratio
        if len(self._blocks.get(module.layer_idx, ((),))[0]) != blocks:
            self._blocks[module.layer_idx] = self._block_angles(blocks, ratio)
        raw_BRD = layer.index_keys[0, : blocks * ratio].view(blocks, ratio, -1)
        weights = self._index_weights[module.layer_idx]
        return window_reference.pooled_keys(raw_BRD, weights, *self._blocks[module.layer_idx])

    def _put_in_indexer(self, module: Any) -> None:
        query, key = _norm_kind(module.q_layernorm), _norm_kind(module.k_layernorm)
        if query is None or key is None or query.groups != 1 or key.groups != 1:
            self.why_not = self.why_not or f"{type(module).__name__} has norms of an unknown kind"
            return
        self._index_weights[module.layer_idx] = IndexWeights(
            query_D=module.q_layernorm.weight, key_D=module.k_layernorm.weight,
            query_eps=query.eps, key_eps=key.eps, query_plus_one=query.plus_one, key_plus_one=key.plus_one,
            heads=module.index_n_heads, ratio=module.compress_ratio, top=module.block_topk,
        )  # fmt: skip
        self._indexers.append(module)
        self._put(module, self._indexer)

    def _indexer(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Which places each row may see, bool [1, 1, T, S]: its best blocks, and those after the last whole block."""
        layer, num_rows = cache.layers[module.layer_idx], hidden_states.shape[1]
        cos_TR, sin_TR = (part[0, -num_rows:] for part in position_embeddings)
        mask_TS = self._ops.index_blocks(
            module.index_qk_proj(hidden_states[0]), cos_TR, sin_TR, self._index_weights[module.layer_idx],
            cache.place.begin_2, layer.index_keys[0], layer.block_keys, *self._blocks[module.layer_idx],
        )  # fmt: skip
        return mask_TS[None, None]


class _NormKind(NamedTuple):
    eps: float
    plus_one: bool
    groups: int


def _norm_kind(module: Any) -> _NormKind | None:
    """What a norm computes, found out on random rows; None for one that is not understood."""
    width = module.weight.numel()
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if eps is None or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    groups = width // (getattr(module, "group_size", None) or width)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(module.weight)
    tolerance = 4 * torch.finfo(x.dtype).eps
    theirs = type(module).forward(module, x)
    for plus_one in (True, False):
        ours = window_reference.rms_norm(x, module.weight, eps, plus_one=plus_one, groups=groups)
        if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
            return _NormKind(eps, plus_one, groups)
    return None


def _register_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def _is_indexer(module: Any) -> bool:
    """A QSA indexer that is asked, so not one that answers 'every block' because the context fits its budget."""
    return type(module).__name__.endswith("QSAIndexer") and "forward" not in vars(module)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for a window: query [1, A, T, D], key and value [1, B, S, D], bool mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kernels_run(query.device) and attention_mask is not None:
        from warmset.kernels import window_attention as kernel

        if kernel.why_not(query.shape[-1]) is None and query.shape[-1] == value.shape[-1]:
            mask_TS = attention_mask[0, 0].expand(query.shape[2], key.shape[2])
            return kernel.window_attention(query[0], key[0], value[0], mask_TS, scaling)[None], None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _why_not_delta(module: Any, with_kernels: bool) -> str | None:
    """Why a linear-attention module has no static form, as the end of a sentence, or None."""
    name = type(module).__name__
    split = all(hasattr(module, part) for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
    joined = all(hasattr(module, part) for part in ("in_proj_qkvz", "in_proj_ba"))
    if not (split or joined) or not hasattr(module, "A_log"):
        return f"{name} has projections of an unknown kind"
    if getattr(module, "activation", None) not in ("silu", "swish"):
        return f"{name} has the activation {getattr(module, 'activation', None)}"
    if getattr(module.norm, "activation", None) not in ("silu", "swish", "sigmoid"):
        return f"the norm of {name} has the activation {getattr(module.norm, 'activation', None)}"
    if with_kernels:
        from warmset.kernels import delta_window

        return delta_window.why_not(
            taps=module.conv_kernel_size,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            bias=module.conv1d.bias is not None,
        )
    return None if module.conv_kernel_size == 4 and module.conv1d.bias is None else f"{name} has other taps"


class HostRows(nn.Module):
    """In the place of an embedding whose table stays in pinned host memory: rows are read by address.

    table_ND: on the host, in the compute dtype, contiguous; kept alive here.
    """

    def __init__(self, table_ND: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        assert table_ND.is_contiguous() and table_ND.device.type == "cpu"
        self._table_ND = table_ND
        self.weight = torch.empty(0, dtype=table_ND.dtype, device=device)
        """Only says on which device the answer will be."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "cpu":
            return F.embedding(ids, self._table_ND)
        from warmset.kernels.gather_rows import gather_rows

        flat = ids.reshape(-1).contiguous()
        out_RD = torch.empty(
            len(flat), self._table_ND.shape[1], dtype=self._table_ND.dtype, device=ids.device
        )
        gather_rows(self._table_ND.data_ptr(), flat, out_RD)
        return out_RD.view(*ids.shape, -1)

"""The only file that knows transformers' modelling code: puts our router and experts in, refuses what it missed.

Loading never reads the experts: a subclass of the model's class, under the same name, replaces each `experts`
child by an empty one while the model is built, so `from_pretrained` finds no parameter for the expert tensors
and passes them over. What it passes over must be experts or on the family's own list of known extras; any other
tensor is an error.

A router is not trusted to be of a known kind by its name: it is run once on random rows, and the rule whose
picks and weights agree is taken. A router that no rule explains is refused.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from warmset.checkpoint import Checkpoint, ExpertMap
from warmset.config import MAX_WINDOW_ROWS
from warmset.errors import CheckpointError, first_line
from warmset.experts import ExpertRunner
from warmset.recurrent import delta_rule_by_rows
from warmset.router import MoeLayer, Routing, WarmExperts, WarmRouter
from warmset.routing import RouterRule, selection_scores, weights_of
from warmset.routing.scores import router_pick
from warmset.stages import StageClock

PROBE_ROWS = 32
TRUNK_ALIGN_BYTES = 64


class _NoExperts(nn.Module):
    """Stands where the experts were while the weights load; remembers what they would have been."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.family = type(original).__name__
        self.activation: Callable = getattr(original, "act_fn", F.silu)
        self.unsupported = _unsupported(original)


def _unsupported(original: nn.Module) -> list[str]:
    """What this experts class does that `experts.ExpertRunner` does not."""
    flags = {
        "transposed weights": getattr(original, "is_transposed", False),
        "interleaved gate and up": not getattr(original, "is_concatenated", True),
        "biases": getattr(original, "has_bias", False),
        "no gate": not getattr(original, "has_gate", True),
        "a norm after each expert": getattr(original, "has_post_expert_norm", False),
        "a gate function of its own": type(original).__dict__.get("_apply_gate") is not None
        and getattr(type(original), "_apply_gate").__name__ != "_default_apply_gate",  # noqa: B009
    }
    return [name for name, present in flags.items() if present]


def load_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of the checkpoint; CheckpointError for an unknown or unsupported family."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except Exception as error:  # the configuration classes raise many kinds; each means the same to a user
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} is not usable: {first_line(error)}"
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{checkpoint.folder} is a {config.model_type}, which is no text model.")
    return config


def context_length(config: Any) -> int:
    """The longest sequence that the model was made for, in tokens."""
    length = getattr(config, "max_position_embeddings", None) or 4096
    if not isinstance(length, int) or length < 2:
        raise CheckpointError(f"config.json: max_position_embeddings must be 2 or more. Got {length!r}.")
    return length


def check_experts(config: Any, expert_map: ExpertMap) -> None:
    """Refuse files whose experts are more or fewer than the configuration says: they would be picked in vain."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count != expert_map.num_experts:
            raise CheckpointError(
                f"config.json has {name} {count}, the files hold {expert_map.num_experts} experts a layer."
            )
    layout = expert_map.layout
    for name, held in (("hidden_size", layout.hidden), ("moe_intermediate_size", layout.width)):
        given = getattr(config, name, None)
        if isinstance(given, int) and given != held:
            raise CheckpointError(f"config.json has {name} {given}, the experts in the files have {held}.")


def load_trunk(
    checkpoint: Checkpoint,
    config: Any,
    covered: set[str],
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """The model without its experts, weights loaded by position and not through a memory map of whole shards.

    `covered`: the names of the tensors that the expert map accounts for. Raises CheckpointError when a tensor is
    missing or unused.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    ignored = _ignored(family)
    wanted = [name for name in checkpoint.tensors if name not in covered and not ignored(name)]
    bare = _without_experts(family)
    try:
        with quiet_transformers():
            trunk, info = bare.from_pretrained(
                None,
                state_dict=checkpoint.read(wanted),
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except Exception as error:  # whatever building or loading raises is about these files
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {first_line(error)}") from None
    if info["missing_keys"]:
        raise CheckpointError(f"{checkpoint.folder} lacks the tensor {sorted(info['missing_keys'])[0]}.")
    for name in sorted(info["unexpected_keys"]):
        raise CheckpointError(f"{checkpoint.folder} holds the tensor {name}, which the model does not use.")
    align(trunk)
    return trunk.eval().requires_grad_(False).to(device)


def _without_experts(family: Any) -> Any:
    """A class of the same name whose models have stubs in the experts' places."""

    def init_without_experts(self, config, *args, **kwargs):
        family.__init__(self, config, *args, **kwargs)
        for parent in list(self.modules()):
            if isinstance(getattr(parent, "experts", None), nn.Module):
                parent.experts = _NoExperts(parent.experts)

    members = {"__init__": init_without_experts, "__module__": family.__module__}
    return type(family.__name__, (family,), members)


def bare_decoder(trunk: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A decoder of the trunk's own family built after `config`, weights not loaded and experts left out."""
    family = type(trunk.get_decoder())
    with quiet_transformers():
        return _without_experts(family)._from_config(config, dtype=dtype, attn_implementation="sdpa")


def norm_class(trunk: Any) -> Any:
    """The class of the norms around the attention of this family, made by `norm_class(width, eps=...)`."""
    for layer in reversed(trunk.get_decoder().layers):
        for name, module in layer.named_modules():
            if "norm" in name.rpartition(".")[2] and "Gated" not in type(module).__name__:
                return type(module)
    raise AssertionError("a decoder without norms")


def align(trunk: nn.Module) -> None:
    """Copy weights that loading left at an odd address into memory of their own; tied weights stay tied.

    In float32 a product's bits change with the alignment of the matrix, and the same weights must not give other
    bits because they came out of another file.
    """
    own: dict[int, torch.Tensor] = {}
    for parameter in trunk.parameters():
        address = parameter.data_ptr()
        if address % TRUNK_ALIGN_BYTES:
            parameter.data = own.setdefault(address, parameter.data.clone())


def _ignored(family: Any) -> Callable[[str], bool]:
    """Whether the family passes over a tensor of this name (such as the layers that predict further tokens)."""
    known = [re.compile(pattern) for pattern in family._keys_to_ignore_on_load_unexpected or []]
    return lambda name: any(pattern.search(name) for pattern in known)


def find_layers(trunk: nn.Module, expert_map: ExpertMap) -> list[MoeLayer]:
    """The MoE layers in order, with the rule of each router; refuses what is not understood."""
    found = {path: block for path, block in trunk.named_modules() if _stub_of(block) is not None}
    paths = {f"{path}.experts": path for path in found}
    layers = []
    for index, module in enumerate(expert_map.modules):
        path = paths.pop(module, None) or paths.pop(f"model.{module}", None)
        if path is None:
            raise CheckpointError(f"The checkpoint has experts {module} that the model has no place for.")
        block = found[path]
        stub = _stub_of(block)
        if stub.unsupported:
            raise CheckpointError(f"{stub.family} needs {', '.join(stub.unsupported)}: not supported yet.")
        router = _router_of(block, path)
        if router.weight.shape[0] != expert_map.num_experts:
            raise CheckpointError(
                f"{path}: the router scores {router.weight.shape[0]} experts, the files hold {expert_map.num_experts}."
            )
        layers.append(MoeLayer(index=index, path=path, rule=_probe(router, path)))
    if paths:
        raise CheckpointError(f"The checkpoint has no experts for {sorted(paths)[0]}.")
    return layers


def _stub_of(block: nn.Module) -> Any:
    experts = getattr(block, "experts", None)
    return experts if isinstance(experts, _NoExperts) else None


def _router_name(block: nn.Module, path: str) -> str:
    for name, child in block.named_children():
        if name in ("gate", "router") and hasattr(child, "weight") and hasattr(child, "top_k"):
            return name
    raise CheckpointError(f"{path}: no router beside the experts that Warmset knows.")


def _router_of(block: nn.Module, path: str) -> Any:
    return getattr(block, _router_name(block, path))


def find_routers(model: nn.Module) -> list[tuple[Any, Any, RouterRule]]:
    """(block, router, rule) of each MoE layer of a transformers model that is loaded whole, in order.

    Raises CheckpointError for a router that is not understood.
    """
    found = []
    for path, block in model.named_modules():
        if isinstance(getattr(block, "experts", None), nn.Module):
            router = _router_of(block, path)
            found.append((block, router, _probe(router, path)))
    return found


def _probe(router: Any, path: str) -> RouterRule:
    """The rule that explains this router's answer to random rows."""
    weight_EH = router.weight
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(PROBE_ROWS, weight_EH.shape[1], generator=generator).to(weight_EH)
    RouterRule(top_k=router.top_k).check(num_experts=weight_EH.shape[0])
    refusal = CheckpointError(f"{path}: {type(router).__name__} routes in a way that is not supported yet.")
    try:
        logits_TE, weights_TK, ids_TK = router(x_TH)
    except (TypeError, ValueError):
        raise refusal from None
    if not torch.equal(logits_TE, F.linear(x_TH, weight_EH)):
        raise refusal
    for renormalize in (True, False):
        rule = RouterRule(top_k=ids_TK.shape[1], renormalize=renormalize)
        if _explains(rule, logits_TE, weights_TK, ids_TK):
            return rule
    raise refusal


def _explains(
    rule: RouterRule, logits_TE: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
) -> bool:
    scores_TE = selection_scores(logits_TE, rule)
    own_TK, _ = router_pick(scores_TE, rule.top_k)
    untied_T = scores_TE.sort(dim=1).values.diff(dim=1).gt(0).all(dim=1)
    if not torch.equal(own_TK[untied_T].long(), ids_TK[untied_T].long()):
        return False
    ours_TK = weights_of(ids_TK.int(), logits_TE, rule)
    tolerance = 4 * torch.finfo(weights_TK.dtype).eps
    return torch.allclose(ours_TK, weights_TK.float(), rtol=tolerance, atol=tolerance)


def install(
    trunk: nn.Module, layers: list[MoeLayer], runner: ExpertRunner, routing: Routing, clock: StageClock
) -> None:
    """Put routers and experts in, and the stage clock around the modules it names."""
    for layer in layers:
        block = trunk.get_submodule(layer.path)
        name = _router_name(block, layer.path)
        setattr(block, name, WarmRouter(getattr(block, name), layer, routing))
        block.experts = WarmExperts(layer, runner)
    left = [path for path, block in trunk.named_modules() if _stub_of(block) is not None]
    assert not left, left
    _install_clock(trunk, clock)


def activation_of(trunk: nn.Module, layers: list[MoeLayer]) -> Callable:
    return _stub_of(trunk.get_submodule(layers[0].path)).activation


def _install_clock(trunk: nn.Module, clock: StageClock) -> None:
    if not clock.enabled:
        return
    for path, module in trunk.named_modules():
        stage = _stage_of(path, module)
        if stage is not None:
            module.register_forward_pre_hook(lambda *_, stage=stage: clock.enter(stage))
            module.register_forward_hook(lambda *_: clock.leave(), always_call=True)


_STAGE_BY_NAME = {
    "self_attn": "token mixer",
    "linear_attn": "token mixer",
    "shared_expert": "shared expert",
    "shared_experts": "shared expert",
    "shared_expert_gate": "shared expert",
    "embed_tokens": "embed",
    "ple": "embed",
    "rotary_emb": "embed",
    "lm_head": "head",
    "hyper_connection_mixer": "head",
    "norm": "head",
}


def _stage_of(path: str, module: nn.Module) -> str | None:
    if type(module).__name__.endswith("DecoderLayer"):
        return "hc-read+router"
    stage = _STAGE_BY_NAME.get(path.rpartition(".")[2])
    inside_a_layer = ".layers." in f".{path}"
    return None if stage == "head" and inside_a_layer else stage


CHUNK_RULE = "torch_chunk_gated_delta_rule"


def give_states_of_each_row(trunk: nn.Module) -> str | None:
    """Let the recurrent modules of a trunk give the state after each row of a window, not after the last one only.

    A gated delta net's forward runs as it is written, with another function under the name of the chunk rule: that
    one goes row by row where a window continues a state. Returns what could not be changed, as the end of a
    sentence: then windows of several rows cannot be taken back. None when all is well.
    """
    for path, module in trunk.named_modules():
        if path.rpartition(".")[2] != "linear_attn":
            continue
        forward = inspect.unwrap(type(module).forward)
        if CHUNK_RULE not in forward.__code__.co_names:
            return f"{type(module).__name__} does not run the gated delta rule"
        names = {**forward.__globals__, CHUNK_RULE: _rows_or_chunks(forward.__globals__[CHUNK_RULE])}
        changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
        module.forward = MethodType(changed, module)  # type: ignore[method-assign]
    return None


def _rows_or_chunks(chunk_rule: Callable) -> Callable:
    def rule(query, key, value, *, g, beta, initial_state, **settings):
        if initial_state is None or query.shape[1] > MAX_WINDOW_ROWS:
            return chunk_rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **settings)
        assert settings.get("use_qk_l2norm_in_kernel"), "the rule by rows normalises keys and queries itself"
        return delta_rule_by_rows(query, key, value, g, beta, initial_state)

    return rule


def skip_unused_indexers(trunk: nn.Module, max_model_len: int) -> int:
    """Let QSA indexers answer 'every block' where the whole context fits their budget; how many were replaced.

    Exactly equal: with at most `token_budget` visible tokens an indexer picks every block, so its mask changes
    nothing; it only costs a host loop over every query.
    """
    replaced = 0
    module: Any
    for module in trunk.modules():
        if type(module).__name__.endswith("QSAIndexer") and module.token_budget >= max_model_len:
            module.forward = _every_block
            replaced += 1
    return replaced


def _every_block(
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    cache: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention_mask.device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and warnings off stderr; errors still come as exceptions."""
    from transformers.utils import logging as theirs

    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def quiet_forward() -> Iterator[None]:
    """As `quiet_transformers`, for every forward: it warns at the first use of each of its slow fallbacks.

    Changing a logger's level empties the caches of all loggers, which takes half a millisecond; a handler's does not.
    """
    levels = [(handler, handler.level) for handler in logging.getLogger("transformers").handlers]
    for handler, _ in levels:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)

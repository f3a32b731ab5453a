"""The only file that knows transformers' modelling code: puts our router and experts in, refuses what it missed.

Loading never reads the experts: a subclass of the model's class, under the same name, replaces each `experts`
child by an empty one while the model is built, so `from_pretrained` finds no parameter for the expert tensors
and passes them over. What it passes over must be experts or on the family's own list of known extras; any other
tensor is an error.

A router is not trusted to be of a known kind by its name: it is run once on random rows, and the rule whose
picks and weights agree is taken. A router that no rule explains is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from warmset.checkpoint import Checkpoint, ExpertMap
from warmset.errors import CheckpointError, PolicyError, RowError
from warmset.experts import ExpertRunner
from warmset.kernels import dispatch
from warmset.routing import (
    POLICIES,
    CachePrior,
    Exact,
    Policy,
    PolicyTable,
    RangeMeans,
    RouteContext,
    Routed,
    RouterRule,
    selection_scores,
    weights_of,
)
from warmset.routing.scores import router_pick
from warmset.stages import StageClock

PROBE_ROWS = 32


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


@dataclass(frozen=True, kw_only=True)
class MoeLayer:
    """One MoE layer: its number among the MoE layers, where it sits, and how its router routes."""

    index: int
    path: str
    rule: RouterRule


class Routing:
    """What the routers of a model share: the policy, whether it acts now, and what the last forward did.

    `acts` is False while the prompt is read. `made` holds one Routed a layer of the current forward. The
    policy's numbers lie in `table`, on the device, where they can be changed between windows.
    """

    def __init__(
        self,
        policy: Policy | None,
        rule: RouterRule,
        slot_LE: torch.Tensor,
        max_rows: int,
        form: dispatch.Form = "fused",
    ) -> None:
        self.policy: Policy = Exact() if policy is None else policy
        self._form = form
        self._plain_reason = dispatch.torch_reason(self.policy, rule, slot_LE.shape[1], slot_LE.device, form)
        self.slot_LE = slot_LE
        self.acts = False
        self.made: list[Routed] = []
        self.kept_logits: list[torch.Tensor] | None = None
        self.position_T = torch.zeros(max_rows, dtype=torch.int64, device=slot_LE.device)
        num_layers, device = slot_LE.shape[0], slot_LE.device
        make_table = getattr(self.policy, "table", None)
        self.table: PolicyTable | None = None
        if make_table is not None:
            self.table = make_table(rule, num_layers=num_layers, device=device)
        self.means: RangeMeans | None = None
        if isinstance(self.policy, CachePrior):
            self.means = RangeMeans(num_layers, max_rows, device)

    @property
    def notes(self) -> list[str]:
        """What was capped, and on a GPU why no kernel routes, one sentence each."""
        notes = [] if self.table is None else [f"{note[:1].upper()}{note[1:]}." for note in self.table.notes]
        if self._plain_reason is not None and self.slot_LE.is_cuda:
            notes.append(f"Routing runs in plain torch, which is slower: {self._plain_reason}.")
        return notes

    def begin(self, positions: list[int]) -> None:
        """A decode window with rows at these positions begins: the policy acts, residency is as it is now."""
        self.acts = True
        self.made = []
        self.position_T[: len(positions)] = torch.tensor(positions)

    def route(self, layer: MoeLayer, logits_TE: torch.Tensor) -> Routed:
        num_rows = logits_TE.shape[0]
        if self.kept_logits is not None:
            self.kept_logits.append(logits_TE.clone())
        context = RouteContext(layer=layer.index, table=self.table, position_T=self.position_T[:num_rows])
        if self.means is not None:
            context.mean_range_L = self.means.mean_L
        routed = self._routed(layer, logits_TE, context)
        if self.means is not None:
            if routed.range_T is not None:
                self.means.observe_range(layer.index, routed.range_T)
            else:
                self.means.observe(layer.index, selection_scores(logits_TE, layer.rule))
        self.made.append(routed)
        return routed

    def _routed(self, layer: MoeLayer, logits_TE: torch.Tensor, context: RouteContext) -> Routed:
        slot_E = self.slot_LE[layer.index]
        if type(self.policy) in POLICIES.values():
            return dispatch.route(
                self.policy, logits_TE, slot_E, rule=layer.rule, context=context, form=self._form
            )
        name = type(self.policy).__qualname__
        try:
            routed = self.policy.route(logits_TE, slot_E, rule=layer.rule, context=context)
        except (Exception, SystemExit) as error:
            raise PolicyError(f"policy {name} failed in layer {layer.index}: {_first(error)}") from error
        check_routed(routed, logits_TE, layer.rule.top_k, f"policy {name}, layer {layer.index}")
        return routed

    def commit(self, num_rows: int) -> None:
        """The first `num_rows` rows of the window are kept; what a policy learns from is learned now."""
        if self.means is not None:
            self.means.commit(num_rows)


def check_routed(routed: Any, logits_TE: torch.Tensor, top_k: int, who: str) -> None:
    """Refuse what a user's policy returned if it is no routing of these rows; PolicyError says what is wrong."""
    if not isinstance(routed, Routed):
        raise PolicyError(f"{who} must return a Routed. Got {type(routed).__name__}.")
    num_rows, num_experts = logits_TE.shape
    ids_TK, weights_TK = routed.ids_TK, routed.weights_TK
    for name, value in (("ids_TK", ids_TK), ("weights_TK", weights_TK)):
        if tuple(value.shape) != (num_rows, top_k):
            raise PolicyError(f"{who}: {name} must have shape {(num_rows, top_k)}. Got {tuple(value.shape)}.")
    if ids_TK.dtype not in (torch.int32, torch.int64):
        raise PolicyError(f"{who}: ids_TK must be int32. Got {ids_TK.dtype}.")
    if bool(((ids_TK < -1) | (ids_TK >= num_experts)).any()):
        raise PolicyError(f"{who}: ids must be -1 (no pick) to {num_experts - 1}. Got {ids_TK.tolist()}.")
    picked_TK = ids_TK.sort(dim=1).values
    if bool(((picked_TK[:, 1:] == picked_TK[:, :-1]) & (picked_TK[:, 1:] >= 0)).any()):
        raise PolicyError(f"{who}: an expert may be picked once a row. Got {ids_TK.tolist()}.")
    if not bool(torch.isfinite(weights_TK).all()):
        raise PolicyError(f"{who}: weights must be finite.")


class WarmRouter(nn.Module):
    """In the router's place: its own logits, then the router's own pick or the policy's."""

    def __init__(self, original: nn.Module, layer: MoeLayer, routing: Routing) -> None:
        super().__init__()
        self.original: Any = original
        self.layer = layer
        self._routing = routing

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits [T, E], weights [T, K] in the logits' dtype, ids [T, K] int32), as the original returns."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TE = F.linear(x_TH, self.original.weight)
        if self._routing.acts:
            routed = self._routing.route(self.layer, logits_TE)
            ids_TK, weights_TK, error_T = routed.ids_TK, routed.weights_TK, routed.error_T
        else:
            ids_TK, error_T = router_pick(selection_scores(logits_TE, self.layer.rule), self.layer.rule.top_k)
            weights_TK = weights_of(ids_TK, logits_TE, self.layer.rule)
        if bool(error_T.any()):  # host sync: a row in error ends the window
            row = int(error_T.nonzero()[0])
            raise RowError(
                f"Layer {self.layer.index}, row {row}: fewer than {self.layer.rule.top_k} experts have a score "
                "above -inf, so the window was discarded."
            )
        return logits_TE, weights_TK.to(logits_TE.dtype), ids_TK


class WarmExperts(nn.Module):
    """In the experts' place: runs the picks of its layer through the runner."""

    def __init__(self, layer: MoeLayer, runner: ExpertRunner) -> None:
        super().__init__()
        self.layer = layer
        self._runner = runner

    def forward(
        self, hidden_states: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self._runner.run(self.layer.index, hidden_states, top_k_ids, top_k_weights)


def load_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of the checkpoint; CheckpointError for an unknown or unsupported family."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except Exception as error:  # the configuration classes raise many kinds; each means the same to a user
        raise CheckpointError(f"{checkpoint.folder / 'config.json'} is not usable: {_first(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{checkpoint.folder} is a {config.model_type}, which is no text model.")
    return config


def _first(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


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
    modules: set[str],
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """The model without its experts, weights loaded. Raises CheckpointError when a tensor is missing or unused.

    `covered`: the names of the tensors that the expert map accounts for; `modules`: the experts modules' paths.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def init_without_experts(self, config, *args, **kwargs):
        family.__init__(self, config, *args, **kwargs)
        for parent in list(self.modules()):
            if isinstance(getattr(parent, "experts", None), nn.Module):
                parent.experts = _NoExperts(parent.experts)

    bare = type(
        family.__name__, (family,), {"__init__": init_without_experts, "__module__": family.__module__}
    )
    try:
        with quiet_transformers():
            trunk, info = bare.from_pretrained(  # type: ignore[attr-defined]
                checkpoint.folder,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever building or loading raises is about these files
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {_first(error)}") from None
    if info["missing_keys"]:
        raise CheckpointError(f"{checkpoint.folder} lacks the tensor {sorted(info['missing_keys'])[0]}.")
    _refuse_unused(checkpoint, trunk, set(info["unexpected_keys"]), covered, modules)
    _leave_the_files(trunk)
    return trunk.eval().requires_grad_(False).to(device)


def _leave_the_files(trunk: nn.Module) -> None:
    """Copy weights that still lie on a memory map of their file into memory of their own.

    safetensors aligns to 8 bytes, and in float32 a product's bits change with the alignment of the matrix: the
    same weights must not give other bits because a file's header is longer. Tied weights stay tied.
    """
    own: dict[int, torch.Tensor] = {}
    for parameter in trunk.parameters():
        address = parameter.data_ptr()
        if address not in own:
            own[address] = parameter.data.clone()
        parameter.data = own[address]


def _refuse_unused(
    checkpoint: Checkpoint, trunk: Any, unexpected: set[str], covered: set[str], modules: set[str]
) -> None:
    known = [re.compile(pattern) for pattern in trunk._keys_to_ignore_on_load_unexpected or []]
    for name in sorted(unexpected - covered):
        expert = name.rpartition(".")[0] in modules  # named as the module has it, not as the file has it
        if not expert and not any(pattern.search(name) for pattern in known):
            raise CheckpointError(
                f"{checkpoint.folder} holds the tensor {name}, which the model does not use."
            )


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
    hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: torch.Tensor, cache: Any = None
) -> torch.Tensor:
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention_mask.device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and warnings off stderr; errors still come as exceptions."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

"""What can score given tokens in decode windows with a policy acting: a Warmset engine, or a transformers model.

`Scorer` is all that a measurement needs of a model. `EngineScorer` runs the engine's own windows, whose cold experts
are really cold; with simulated residency all experts are loaded and only the table that policies see says which are
cold. `TransformersScorer` does the same to a model of transformers' own: its experts stay as they are, its routers'
answers are replaced while a window runs. Shape letters: T rows, E experts, K picks a row, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from warmset.config import MAX_WINDOW_ROWS
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.model import find_routers, quiet_transformers
from warmset.router import MoeLayer, Routing, WarmExperts
from warmset.routing import Policy, Routed, raise_for_errors


class Scorer(Protocol):
    """A model that reads a prompt exactly and then scores windows of given tokens."""

    routing: Routing
    max_rows: int
    expert_bytes: int
    """Bytes of one expert as the slow tier delivers them."""

    def use(self, policy: Policy | None) -> None:
        """Let this policy act on the windows that follow; None is off."""

    def residency(self, kind: str) -> AbstractContextManager[None]:
        """Inside, residency is `frozen` as it is, or `live`: as at the engine's start, then led by admission."""

    def start(self) -> Any:
        """A new sequence."""

    def read(self, sequence: Any, ids: list[int]) -> Tensor:
        """Logits [V] after a prompt, by the router's own pick."""

    def score(self, sequence: Any, tokens: list[int]) -> Tensor:
        """Logits [T, V] after each row of one window, all of them kept."""

    def experts_of(self, layer: int) -> nn.Module:
        """The module whose output [T, H] is the weighted sum of a layer's routed experts."""


class EngineScorer:
    """The windows of a loaded engine; `slot_LE`: a simulated residency in place of the engine's own slots."""

    def __init__(self, engine: TokenEngine, slot_LE: Tensor | None = None) -> None:
        self.engine = engine
        self.routing = engine.windows.routing
        self.max_rows = MAX_WINDOW_ROWS if engine.windows.one_row_because is None else 1
        self.expert_bytes = engine.store.layout.payload_bytes
        self._experts = {
            module.layer.index: module
            for module in engine.windows.trunk.modules()
            if isinstance(module, WarmExperts)
        }
        if slot_LE is not None:
            assert slot_LE.shape == self.routing.slot_LE.shape
            self.routing.slot_LE = slot_LE.to(self.routing.slot_LE.device)

    def use(self, policy: Policy | None) -> None:
        self.engine.use_policy(policy)

    def residency(self, kind: str) -> AbstractContextManager[None]:
        if kind == "frozen":
            return self.engine.residency.frozen()
        self.engine.refill()
        return nullcontext()

    def start(self) -> Any:
        return self.engine.windows.start()

    def read(self, sequence: Any, ids: list[int]) -> Tensor:
        return self.engine.windows.read_prompt(sequence, ids)

    def score(self, sequence: Any, tokens: list[int]) -> Tensor:
        with self.engine.clock.window():
            return self.engine.windows.score(sequence, tokens)

    def experts_of(self, layer: int) -> nn.Module:
        return self._experts[layer]


class TransformersScorer:
    """A loaded transformers model whose residency is only said: slot_LE int32 [L, E], -1 where an expert is cold.

    CheckpointError for a router that Warmset does not understand. `close` puts the model back as it was.
    """

    def __init__(self, model: Any, slot_LE: Tensor | None = None) -> None:
        self.model = model
        self.max_rows = MAX_WINDOW_ROWS
        found = find_routers(model)
        if not found:
            raise WarmsetError(f"{type(model).__name__} has no Mixture-of-Experts layers.")
        self._blocks = [block for block, _, _ in found]
        num_layers, num_experts = len(found), found[0][1].weight.shape[0]
        if slot_LE is None:
            slot_LE = torch.zeros(num_layers, num_experts, dtype=torch.int32)
        if tuple(slot_LE.shape) != (num_layers, num_experts):
            shape = (num_layers, num_experts)
            raise WarmsetError(f"slots must have shape {shape} for this model. Got {tuple(slot_LE.shape)}.")
        rule = found[0][2]
        self.routing = Routing(None, rule, slot_LE.to(model.device).int(), max_rows=MAX_WINDOW_ROWS)
        self.expert_bytes = _expert_bytes(self._blocks[0], num_experts)
        self._handles = []
        for index, (_, router, rule) in enumerate(found):
            layer = MoeLayer(index=index, path=f"layer {index}", rule=rule)
            hook = lambda *call, layer=layer: self._reroute(layer, call[2])  # noqa: E731  # one for each layer
            self._handles.append(router.register_forward_hook(hook))

    def close(self) -> None:
        """Take the policy out of the model again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def use(self, policy: Policy | None) -> None:
        self.routing.use(policy)

    def residency(self, kind: str) -> AbstractContextManager[None]:
        assert kind == "frozen", "residency that is only said does not move"
        return nullcontext()

    def start(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def read(self, sequence: Any, ids: list[int]) -> Tensor:
        self.routing.acts = False
        return self._forward(sequence, ids)[-1]

    def score(self, sequence: Any, tokens: list[int]) -> Tensor:
        start = int(sequence.get_seq_length())
        with self.window(list(range(start, start + len(tokens)))):
            return self._forward(sequence, tokens)

    @contextmanager
    def window(self, positions: list[int]) -> Iterator[None]:
        """The policy acts on the forward inside, whose rows are at these positions."""
        self.routing.begin(positions)
        try:
            yield
        finally:
            self.routing.acts = False
        self.routing.commit(len(positions))

    def experts_of(self, layer: int) -> nn.Module:
        return self._blocks[layer].experts

    def _forward(self, sequence: Any, ids: list[int]) -> Tensor:
        with torch.inference_mode(), quiet_transformers():
            tokens = torch.tensor([ids], device=self.model.device)
            return self.model(input_ids=tokens, cache=sequence, use_cache=True).logits[0]

    def _reroute(self, layer: MoeLayer, answer: tuple[Tensor, Tensor, Tensor]) -> Any:
        if not self.routing.acts:
            return None
        logits_TE, weights_TK, ids_TK = answer
        routed = self.routing.route(layer, logits_TE)
        raise_for_errors(routed.error_T, layer.index)
        # A pick that is not there becomes the row's first one with weight 0: experts modules know no padding.
        chosen_TK = torch.where(routed.ids_TK < 0, routed.ids_TK[:, :1].clamp(min=0), routed.ids_TK)
        return logits_TE, routed.weights_TK.to(weights_TK.dtype), chosen_TK.to(ids_TK.dtype)


def _expert_bytes(block: Any, num_experts: int) -> int:
    return sum(parameter.nbytes for parameter in block.experts.parameters()) // num_experts


def slots_of(residents: list[tuple[int, int]], num_layers: int, num_experts: int) -> Tensor:
    """int32 [L, E]: a table in which these (layer, expert) pairs have slots 0, 1, ..."""
    slot_LE = torch.full((num_layers, num_experts), -1, dtype=torch.int32)
    for slot, (layer, expert) in enumerate(residents):
        slot_LE[layer, expert] = slot
    return slot_LE


def routed_ids(made: list[Routed]) -> tuple[Tensor, Tensor]:
    """(final ids, the router's own), int32 [L, T, K] on the host."""
    ids_LTK = torch.stack([routed.ids_TK for routed in made])
    own_LTK = torch.stack([routed.own_ids_TK for routed in made])
    both = torch.stack([ids_LTK, own_LTK]).cpu()  # host sync: one a window
    return both[0].int(), both[1].int()

"""Drafts from the model's own MTP layer (`mtp.*` in the checkpoint), several steps deep.

The layer takes the trunk's last hidden state at row t and the embedding of token t + 1, joins them, runs one decoder
layer and predicts token t + 2 with the trunk's head. Further steps take the layer's own output in the trunk's place.
The layer is built as a model of one layer of the trunk's family, so masks, positions, indexers and residual streams
are transformers' own. Its experts all have slots, in a table of their own: they are never cold, count apart, and no
policy touches them.

    P rows whose hidden states wait for the token after them; H hidden
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from warmset import model
from warmset.checkpoint import Checkpoint, ExpertMap, find_mtp_experts
from warmset.config import MAX_WINDOW_ROWS
from warmset.device_experts import DeviceExperts
from warmset.draft import Guess, Sequence
from warmset.errors import CheckpointError
from warmset.experts import ExpertRunner
from warmset.router import Routing
from warmset.slots import Slots
from warmset.stages import StageClock
from warmset.store import FileStore

MAX_WAITING_ROWS = 512
PREFIX = "mtp."


def has_mtp(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds an MTP layer under the names that Qwen's families use."""
    return f"{PREFIX}fc.weight" in checkpoint.tensors


def mtp_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of the layer with all its experts, in `dtype`."""
    spans = (span for name, span in checkpoint.tensors.items() if name.startswith(PREFIX))
    return sum(span.nbytes // span.dtype.itemsize for span in spans) * dtype.itemsize


class MtpHead(nn.Module):
    """The MTP layer without its experts; embedding and head are the trunk's."""

    def __init__(self, trunk: Any, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, norm = trunk.config.hidden_size, model.norm_class(trunk)
        eps = trunk.config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(hidden, eps=eps).to(dtype)
        self.pre_fc_norm_hidden = norm(hidden, eps=eps).to(dtype)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype)
        self.body = model.bare_decoder(trunk, _one_layer(trunk.config), dtype)
        self.config = self.body.config
        self.norm = nn.Identity() if hasattr(self.body, "norm") else norm(hidden, eps=eps).to(dtype)

    def forward(
        self, embedded_PH: torch.Tensor, hidden_PH: torch.Tensor, cache: Any, **inputs: Any
    ) -> torch.Tensor:
        """The layer's output [P, H] before the head; `inputs`: positions and mask, where they are not the next ones."""
        parts = (self.pre_fc_norm_embedding(embedded_PH), self.pre_fc_norm_hidden(hidden_PH))
        joined_PH = self.fc(torch.cat(parts, dim=-1))
        with model.quiet_forward():
            output = self.body(inputs_embeds=joined_PH[None], cache=cache, use_cache=True, **inputs)
        return self.norm(output.last_hidden_state[0])

    def get_decoder(self) -> nn.Module:
        """As a trunk of transformers' has it."""
        return self.body

    def place_of(self, name: str) -> str:
        """Where a tensor of the file belongs: what is in front of and behind the layer here, the rest in the body."""
        own = ("pre_fc_norm_", "fc.") if hasattr(self.body, "norm") else ("pre_fc_norm_", "fc.", "norm.")
        return name if name.startswith(own) else f"body.{name}"


def _one_layer(config: Any) -> Any:
    """The configuration of a model that is one attention layer of this family, with experts and without PLE."""
    own = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    own.num_hidden_layers, own.vocab_size, own.pad_token_id = 1, 1, None
    changes = {"ple_layer_ids": [], "mlp_only_layers": [], "decoder_sparse_step": 1}
    for name, value in changes.items():
        if hasattr(own, name):
            setattr(own, name, value)
    if kinds is not None:
        own.layer_types = [[kind for kind in kinds if kind != "linear_attention"][-1]]
    if getattr(config, "mtp_layer_types", None):  # a family that says itself what its layer is
        own.layer_types, own.mlp_layer_types = config.mtp_layer_types[:1], ["sparse"]
    return own


def load_head(
    checkpoint: Checkpoint, trunk: Any, dtype: torch.dtype, device: torch.device
) -> tuple[MtpHead, ExpertMap]:
    """The layer with its weights, and where its experts lie; CheckpointError when something is missing or unused."""
    found = find_mtp_experts(checkpoint, trunk.config.model_type)
    if not has_mtp(checkpoint) or found is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds no MTP layer (mtp.*): draft must be none, lookup or model."
        )
    expert_map, covered = found
    if expert_map.num_layers != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: an MTP part of one layer is known. Got {expert_map.num_layers}."
        )
    head = MtpHead(trunk, dtype)
    names = [name for name in checkpoint.tensors if name.startswith(PREFIX) and name not in covered]
    read = checkpoint.read(names)
    weights = {head.place_of(name.removeprefix(PREFIX)): tensor.to(dtype) for name, tensor in read.items()}
    missing, unused = head.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.startswith("body.embed_tokens.")]
    if missing or unused:
        what = f"lacks {missing[0]}" if missing else f"holds {unused[0]}, which the layer does not use"
        raise CheckpointError(f"{checkpoint.folder}: the MTP layer {what}.")
    model.align(head)
    return head.eval().requires_grad_(False).to(device), expert_map


@dataclass
class _Ahead:
    """What the layer keeps for one sequence: its states, and hidden states of rows that it has not read.

    `start`: the first row that it has read; the rows before it are those that it can no longer go back to.
    """

    state: Any
    waiting: list[torch.Tensor] = field(default_factory=list)
    start: int = 0

    @property
    def length(self) -> int:
        """Rows of the sequence that need no reading."""
        return self.start + self.state.length

    @property
    def num_waiting(self) -> int:
        return sum(len(hidden_nH) for hidden_nH in self.waiting)


class MtpDraft:
    """Drafts by the MTP layer; its rows of a sequence are one behind the settled ones."""

    name = "mtp"
    wants_hidden = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        trunk: Any,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        make_kernels: Callable[[Slots, FileStore, Callable, StageClock], DeviceExperts | None],
    ) -> None:
        self.head, expert_map = load_head(checkpoint, trunk, dtype, device)
        self._embed: Any = trunk.get_input_embeddings()
        self._unembed: Any = trunk.get_output_embeddings()
        self._device = device
        body = self.head.body
        model.skip_unused_indexers(body, max_model_len)
        expert_map = ExpertMap(
            modules=tuple(module.removeprefix(PREFIX) for module in expert_map.modules),
            segments=expert_map.segments,
            layout=expert_map.layout,
        )
        layers = model.find_layers(body, expert_map)
        self.slots = Slots(
            num_slots=expert_map.num_experts,
            layout=expert_map.layout.with_dtype(dtype),
            num_layers=1,
            num_experts=expert_map.num_experts,
            device=device,
        )
        self.store = FileStore(expert_map)
        self.slots.fill([(0, expert) for expert in range(expert_map.num_experts)], self.store)
        activation = model.activation_of(body, layers)
        clock = StageClock(device, enabled=False)
        kernels = make_kernels(self.slots, self.store, activation, clock)
        self.has_kernels = kernels is not None
        runner = ExpertRunner(self.slots, self.store, activation, clock, kernels)
        self.routing = Routing(None, layers[0].rule, self.slots.device_table_LE, max_rows=MAX_WINDOW_ROWS)
        model.install(body, layers, runner, self.routing, clock)

    def _ahead(self, sequence: Sequence) -> _Ahead:
        from warmset.states import SequenceState

        if sequence.drafting is None:
            sequence.drafting = _Ahead(SequenceState.new(self.head.body.config))
        return sequence.drafting

    def see(self, sequence: Sequence, hidden_nH: torch.Tensor) -> None:
        ahead = self._ahead(sequence)
        ahead.waiting.append(hidden_nH)
        if ahead.num_waiting > MAX_WAITING_ROWS:  # the last row's next token is not known yet
            self._catch_up(ahead, sequence.ids[ahead.length + 1 :])

    @torch.inference_mode()
    def propose(self, sequence: Sequence, token: int, count: int, guess: Guess) -> list[int]:
        ahead = self._ahead(sequence)
        if count == 0 or ahead.num_waiting == 0:
            return []
        hidden_H = self.catch_up(sequence, token)
        drafts: list[int] = []
        ahead.state.open(count - 1)
        try:
            while True:
                drafts.append(guess(self.logits(hidden_H), len(sequence.ids) + 1 + len(drafts)))
                if len(drafts) == count:
                    return drafts
                hidden_H = self._run(ahead.state, [drafts[-1]], hidden_H[None])[-1]
        finally:
            ahead.state.settle(0)

    def catch_up(self, sequence: Sequence, token: int) -> torch.Tensor:
        """Read every row that waits, the last one with `token` after it: the layer's output [H] after that row."""
        ahead = self._ahead(sequence)
        return self._catch_up(ahead, [*sequence.ids[ahead.length + 1 :], token])

    def wait(self, sequence: Sequence, hidden_H: torch.Tensor) -> None:
        """The layer's states hold every row of `sequence` but the last, which waits with the trunk's `hidden_H`."""
        sequence.hidden_H = hidden_H
        self._ahead(sequence).waiting = [hidden_H[None]]

    def embed(self, token_T: torch.Tensor) -> torch.Tensor:
        """The trunk's embeddings [T, H]."""
        return F.embedding(token_T, self._embed.weight)

    def logits(self, out_TH: torch.Tensor) -> torch.Tensor:
        """The trunk's head over the layer's output: [T, V]."""
        return F.linear(out_TH, self._unembed.weight, self._unembed.bias)

    @torch.inference_mode()
    def _catch_up(self, ahead: _Ahead, following: list[int]) -> torch.Tensor:
        """Read the waiting rows that `following` has the next tokens of; the layer's output [H] after the last."""
        hidden_PH = torch.cat(ahead.waiting)
        rows = len(following)
        ahead.waiting = [hidden_PH[rows:]] if rows < len(hidden_PH) else []
        out_H = hidden_PH[0]
        for start in range(0, rows, MAX_WAITING_ROWS):
            part = slice(start, min(rows, start + MAX_WAITING_ROWS))
            ahead.state.open(part.stop - start)
            out_H = self._run(ahead.state, following[part], hidden_PH[part])[-1]
            ahead.state.settle(part.stop - start)
        return out_H

    def _run(self, state: Any, following: list[int], hidden_PH: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(torch.tensor(following, device=self._device)), hidden_PH, state.cache)

    def go_back(self, sequence: Sequence, hidden_H: torch.Tensor | None) -> None:
        """The layer's rows are cut, and the last settled row, whose next token is open again, waits."""
        from warmset.states import SequenceState

        ahead, length = self._ahead(sequence), len(sequence.ids)
        if ahead.length < length:
            ahead.waiting = [torch.cat(ahead.waiting)[: length - ahead.length]]
            return
        assert hidden_H is not None
        if ahead.start < length and ahead.state.can_go_back():
            ahead.state.cut_to(length - 1 - ahead.start)
        else:  # sliding attention forgets, so the layer begins anew there
            ahead.start, ahead.state = length - 1, SequenceState.new(self.head.body.config)
        ahead.waiting = [hidden_H[None]]

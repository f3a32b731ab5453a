"""`warmset.as_windows`: any forward of a transformers model, run as decode windows with a policy acting.

    with warmset.as_windows(model, rows=4, policy=warmset.MarginSwap(margin=0.25), slots="33%") as replay:
        ...                       # every model(input_ids) inside is scored window by window
    replay.swaps

So a tool that scores whole texts in one forward, such as lm-evaluation-harness, measures what decoding would do. The
first token of each sequence is read exactly, the others follow in windows of `rows`; a batch is replayed sequence by
sequence and padding is left out. A forward with a cache of its own (`model.generate`) runs as it is, and the policy
acts on its steps of up to `rows` rows after the prompt.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warmset import checkpoint as ckpt
from warmset import profile as profiles
from warmset.config import MAX_WINDOW_ROWS, SlotsRequest, require
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.measure.price.scorers import EngineScorer, Scorer, TransformersScorer, slots_of
from warmset.model import find_routers
from warmset.models import BUILTIN, BUILTIN_PROFILES
from warmset.prepare import check_policy
from warmset.routing import Policy
from warmset.text import Engine


class Replay:
    """A model whose forwards run as windows; `swaps`, `dropped` and `windows` count what happened so far."""

    def __init__(self, scorer: Scorer, model: Any, rows: int) -> None:
        self.model = model
        self.swaps = self.dropped = self.windows = 0
        self._scorer, self._rows = scorer, rows
        self._original = model.forward
        self._inside = False

    def forward(self, input_ids: Tensor | None = None, **given: Any) -> Any:
        """In the place of the model's own: logits [B, S, V] of every position, as it would return them."""
        cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
        if self._inside:
            return self._original(input_ids=input_ids, **given)
        if input_ids is None:
            raise WarmsetError("as_windows replays token ids: inputs_embeds cannot be split into windows.")
        if cache is not None:
            return self._step(input_ids, cache, given)
        mask = given.get("attention_mask")
        keep = given.get("logits_to_keep", 0)
        logits_BSV = torch.stack([
            self._sequence(ids_S, None if mask is None else mask[number])
            for number, ids_S in enumerate(input_ids)
        ])  # fmt: skip
        labels = given.get("labels")
        loss = None if labels is None else _loss(logits_BSV, labels)
        if isinstance(keep, Tensor):
            logits_BSV = logits_BSV[:, keep]
        elif keep:
            logits_BSV = logits_BSV[:, -keep:]
        return _output(loss, logits_BSV, given.get("return_dict", True))

    def _sequence(self, ids_S: Tensor, mask_S: Tensor | None) -> Tensor:
        real_S = torch.ones_like(ids_S, dtype=torch.bool) if mask_S is None else mask_S.bool()
        ids = ids_S[real_S].tolist()
        if not ids:
            raise WarmsetError("as_windows needs at least one token in each sequence. Got only padding.")
        self._inside = True
        try:
            sequence = self._scorer.start()
            parts = [self._scorer.read(sequence, ids[:1])[None]]
            for start in range(1, len(ids), self._rows):
                parts.append(self._scorer.score(sequence, ids[start : start + self._rows]))
                self._count()
        finally:
            self._inside = False
        logits_NV = torch.cat(parts)
        logits_SV = logits_NV.new_zeros(len(ids_S), logits_NV.shape[1])
        logits_SV[real_S] = logits_NV
        return logits_SV

    def _step(self, input_ids: Tensor, cache: Any, given: dict[str, Any]) -> Any:
        length, (batch, rows) = int(cache.get_seq_length()), input_ids.shape
        if length == 0 or rows > self._rows:
            self._scorer.routing.acts = False
            return self._original(input_ids=input_ids, **given)
        if batch > 1:
            raise WarmsetError(f"as_windows generates one sequence at a time. Got a batch of {batch}.")
        routing = self._scorer.routing
        routing.begin(list(range(length, length + rows)))
        try:
            output = self._original(input_ids=input_ids, **given)
        finally:
            routing.acts = False
        routing.commit(rows)
        self._count()
        return output

    def _count(self) -> None:
        counters_5 = (
            torch.stack([routed.counters for routed in self._scorer.routing.made]).sum(dim=0).tolist()
        )
        self.swaps += counters_5[1]
        self.dropped += counters_5[4]
        self.windows += 1


def _loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    predicted = logits_BSV[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(predicted, labels_BS[:, 1:].flatten(), ignore_index=-100)


def _output(loss: Tensor | None, logits_BSV: Tensor, as_object: bool) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    if as_object:
        return CausalLMOutputWithPast(loss=loss, logits=logits_BSV)  # type: ignore[arg-type]
    return (logits_BSV,) if loss is None else (loss, logits_BSV)


@contextmanager
def as_windows(
    model: Any,
    rows: int = 4,
    *,
    policy: Policy | None = None,
    slots: str | int | Tensor | None = None,
    profile: str | Path | None = None,
    residency: str = "frozen",
) -> Iterator[Replay]:
    """Run every forward of a model inside the block as decode windows of up to `rows` rows.

    Args:
        model: a transformers model that is loaded whole, or a `warmset.Engine`, whose model is `replay.model`.
        rows: of a window, 1 to 8.
        policy: acts on the windows; an engine keeps its own where none is given.
        slots: for a transformers model: how many experts count as resident (`33%`, a number, `all`), or an int32 table
            [L, E], -1 where an expert is cold. An engine has its own.
        profile: learned profile that says which; without one they are spread evenly.
        residency: `frozen`, or for an engine with admission `live`: experts move between windows.

    Yields:
        a `Replay`: `model` is what to call, `swaps` counts. A warning comes at the end if no pick was changed.

    Raises:
        ValueError: in one sentence, for bad input.
    """
    require(type(rows) is int and 1 <= rows <= MAX_WINDOW_ROWS, "rows", f"1 to {MAX_WINDOW_ROWS}", rows)
    require(residency in ("frozen", "live"), "residency", "frozen or live", residency)
    check_policy(policy)
    if isinstance(model, Engine | TokenEngine):
        if slots is not None or profile is not None:
            raise WarmsetError("slots and profile are for transformers models: an engine has its own.")
        tokens = model.tokens if isinstance(model, Engine) else model
        replay = Replay(engine_scorer := EngineScorer(tokens), tokens.windows.trunk, rows)
        require(rows <= engine_scorer.max_rows, "rows", f"1 to {engine_scorer.max_rows} for this model", rows)
        before = tokens.policy
        if policy is not None:
            tokens.use_policy(policy)
        try:
            with engine_scorer.residency(residency), _in_place(replay):
                yield replay
        finally:
            tokens.use_policy(before)
    else:
        require(residency == "frozen", "residency", "frozen for a transformers model", residency)
        table = resident_table(model, "all" if slots is None else slots, profile)
        scorer = TransformersScorer(model, table)
        scorer.use(policy)
        replay = Replay(scorer, model, rows)
        try:
            with _in_place(replay):
                yield replay
        finally:
            scorer.close()
    if replay.windows and not replay.swaps and not replay.dropped:
        warnings.warn(
            f"as_windows: {replay.windows} windows and not one swap: what was measured says nothing of a policy.",
            stacklevel=3,
        )


@contextmanager
def _in_place(replay: Replay) -> Iterator[None]:
    replay.model.forward = replay.forward
    try:
        yield
    finally:
        del replay.model.forward


def resident_table(model: Any, slots: str | int | Tensor, profile: str | Path | None = None) -> Tensor:
    """int32 [L, E]: which experts of a transformers model count as resident; a table is taken as it is.

    A profile must be of the checkpoint that the model was loaded from; without one, or with one of another model, the
    residents are spread evenly over the layers. `builtin:tiny` has its own.
    """
    if isinstance(slots, Tensor):
        return slots
    found = find_routers(model)
    num_layers, num_experts = len(found), found[0][1].weight.shape[0] if found else 0
    total = num_layers * num_experts
    count = SlotsRequest(text=str(slots)).resolve(experts_total=total, fitting=total, fitting_why="").value
    folder = Path(model.config._name_or_path)
    for name, known in BUILTIN.items():
        if profile is None and folder.is_dir() and folder.samefile(known):
            profile = BUILTIN_PROFILES[name]
    if profile is None:
        return slots_of(profiles.spread_evenly(num_layers, num_experts, count), num_layers, num_experts)
    identity = profiles.Identity(
        model=str(folder),
        num_layers=num_layers,
        num_experts=num_experts,
        fingerprint=ckpt.open_checkpoint(folder).fingerprint(),
    )
    learned, reason = profiles.load_profile(Path(profile), identity)
    if learned is None:
        raise WarmsetError(f"profile {reason}.")
    return slots_of(learned.hottest(count), num_layers, num_experts)

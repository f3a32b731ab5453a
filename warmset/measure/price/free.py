"""Free generation: where a policy's own text parts from the exact one, and what the exact model thinks of it.

Each prompt is answered with the same noise by off, by the policy, and by a null: off, with the routed experts' output
of every row rounded once. Two answers part where the first token differs; after that they are different texts, and what
can still be compared is the loss of each text under the exact model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from warmset.config import SamplingConfig
from warmset.engine import TokenEngine
from warmset.measure.price.bootstrap import Blocks
from warmset.measure.price.controls import round_once
from warmset.measure.price.divergence import losses
from warmset.measure.price.scorers import EngineScorer
from warmset.models import DATA
from warmset.routing import Policy, describe

NUM_PROMPTS, NEW_TOKENS, TEMPERATURE = 20, 100, 0.7


def shipped_prompts(count: int = NUM_PROMPTS) -> list[str]:
    """Prompts of the shipped text, the kinds taking turns."""
    held = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    longest = max(len(prompts) for prompts in held.values())
    turns = [prompts[place] for place in range(longest) for prompts in held.values() if place < len(prompts)]
    return turns[:count]


class FreeText:
    """Answers to the same prompts with off, policies and the null; all sampled with one seed."""

    def __init__(
        self,
        engine: TokenEngine,
        prompts: Sequence[list[int]],
        *,
        seed: int = 0,
        new_tokens: int = NEW_TOKENS,
        temperature: float = TEMPERATURE,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.engine, self.prompts = engine, list(prompts)
        self._sampling = SamplingConfig(max_new_tokens=new_tokens, temperature=temperature, seed=seed)
        self._progress = progress
        self.off = self._answers("off", None)
        self.loss_off = self._losses("off", self.off)

    def policy(self, policy: Policy) -> dict[str, Any]:
        """What becomes of the answers with this policy."""
        name = describe(policy)
        return {"policy": name, **self._beside_off(name, self._answers(name, policy))}

    def null(self) -> dict[str, Any]:
        """What one rounding a row and layer makes of the answers."""
        generator = torch.Generator().manual_seed(self._sampling.seed)

        def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            return round_once(output, generator) if scorer.routing.acts else None

        scorer = EngineScorer(self.engine)
        handles = [
            scorer.experts_of(layer).register_forward_hook(rounded)
            for layer in range(scorer.routing.slot_LE.shape[0])
        ]
        try:
            answers = self._answers("null", None)
        finally:
            for handle in handles:
                handle.remove()
        return {"policy": "null", **self._beside_off("null", answers)}

    def _answers(self, name: str, policy: Policy | None) -> list[list[int]]:
        engine, answers = self.engine, []
        engine.use_policy(policy)
        try:
            for number, ids in enumerate(self.prompts):
                engine.conversation.forget()
                answers.append(list(engine.decode(ids, self._sampling)))
                self._report(f"answers, {name}", number + 1)
        finally:
            engine.use_policy(None)
        return answers

    def _losses(self, name: str, answers: list[list[int]]) -> np.ndarray:
        """Mean loss in nats of each answer under the exact model, read in windows of one row."""
        windows, found = self.engine.windows, []
        for number, (ids, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            sequence = windows.start()
            rows = [windows.read_prompt(sequence, ids)]
            for token in answer[:-1]:
                with self.engine.clock.window() if self.engine.clock.enabled else nullcontext():
                    rows.append(windows.step(sequence, token))
            found.append(float(losses(torch.stack(rows), torch.tensor(answer)).mean()))
            self._report(f"loss of the answers, {name}", number + 1)
        return np.array(found)

    def _beside_off(self, name: str, answers: list[list[int]]) -> dict[str, Any]:
        parted = [_parts_at(one, other) for one, other in zip(self.off, answers, strict=True)]
        loss = self._losses(name, answers)
        blocks = Blocks(np.arange(len(loss)), seed=self._sampling.seed)
        change = blocks.mean(loss - self.loss_off)
        return {
            "prompts": len(parted),
            "same": sum(place is None for place in parted),
            "parts_at_median": float(
                np.median([len(a) if p is None else p for p, a in zip(parted, self.off, strict=True)])
            ),
            "parts_at": parted,
            "loss_off": float(self.loss_off.mean()),
            "loss": float(loss.mean()),
            "loss_change": change.value,
            "loss_change_interval": change.as_list(),
        }

    def _report(self, what: str, done: int) -> None:
        if self._progress is not None:
            self._progress(what, done, len(self.prompts))


def _parts_at(one: list[int], other: list[int]) -> int | None:
    """The first token at which two answers differ; None where they do not."""
    for place, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))

"""What the tests of decode windows share: drafts that are right as often as a test wants, and near-ties."""

from __future__ import annotations

import random

import torch

from warmset.config import SamplingConfig
from warmset.depth import Depth
from warmset.draft import NoDraft
from warmset.engine import TokenEngine

NOISE = 1e-5
"""Of the largest logit: what float32 products may change with the number of rows (measured: under 3e-6)."""


class ScriptedDraft(NoDraft):
    """Knows the text that will be written, and gives a wrong token in its place as often as `wrong` says."""

    name = "scripted"

    def __init__(self, text: list[int], *, wrong: float, vocab_size: int = 8192, seed: int = 0) -> None:
        self.text, self.wrong, self.vocab_size = text, wrong, vocab_size
        self.random = random.Random(seed)

    def propose(self, sequence, token, count, guess):
        start = len(sequence.ids) + 1
        known = self.text[start : start + count]
        return [
            (draft + 1 + self.random.randrange(self.vocab_size - 1)) % self.vocab_size
            if self.random.random() < self.wrong
            else draft
            for draft in known
        ]


def use_draft(engine: TokenEngine, draft, rows: int) -> None:
    """Let the engine's windows have up to `rows` rows with drafts of `draft`, never fewer than there are drafts."""
    engine.draft = draft
    engine.depth = Depth(rows, adapt=False)
    engine.windows.on_rows = draft.see if draft.wants_hidden else None
    engine.conversation.forget()
    engine.conversation._draft = draft


def decode(engine: TokenEngine, ids: list[int], tokens: int, **sampling) -> list[int]:
    """A whole answer as ids, from a prompt that is read anew."""
    engine.conversation.forget()
    return list(engine.decode(ids, SamplingConfig(max_new_tokens=tokens, **sampling)))


def parts_at_a_near_tie(reference: list[int], other: list[int], logits_NV: torch.Tensor) -> bool:
    """Whether two greedy texts part at all; fails where they do so at no near-tie.

    logits_NV: those that chose `reference`, token by token. A near-tie is a gap between the two best logits that is
    smaller than what arithmetic may add to both.
    """
    for number, (expected, got) in enumerate(zip(reference, other, strict=False)):
        if expected != got:
            logits_V = logits_NV[number]
            gap = float(logits_V[expected] - logits_V[got])
            bound = 2 * NOISE * float(logits_V.abs().max())
            assert gap <= bound, f"token {number}: {expected} and {got} are {gap} apart, over {bound}"
            return True
    assert len(reference) == len(other)
    return False


BY_NOISE = {"temperature": 1e6, "seed": 5}
"""So hot that the noise of each position alone decides its token, whatever the model says."""


def foreseen(engine: TokenEngine, tokens: int, *, wrong_every: int = 0) -> tuple[list[int], list[int]]:
    """A prompt in which lookup finds the answer that comes with `BY_NOISE`, and this answer.

    wrong_every: each so many tokens of what it finds is another one (0: all are right).
    """
    text = decode(engine, [7] * (2 * tokens + 2), tokens, **BY_NOISE)
    found = [
        (token + 1) % 8000 if wrong_every and place % wrong_every == wrong_every - 1 else token
        for place, token in enumerate(text)
    ]
    return [9, *found, *range(1, tokens + 1), 9], text

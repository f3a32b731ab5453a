"""What a price is compared with: the rounding null, and swaps to random residents at the same places.

The null answers how much KL the least disturbance of the same rows makes. A pass with routing off, in which the output
of the routed experts (the weighted sum, before a shared expert is added) is rounded once, in those rows and layers in
which the policy changed the picks: in a float32 run to bfloat16 and back, in a bfloat16 or float16 run to a
neighbouring value of that type, up or down in magnitude by a seeded bit for each element.

The random swaps answer whether it matters which resident takes the place. Shape letters: N positions, T rows,
E experts, K picks a row, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from warmset.measure.price.scorers import Scorer
from warmset.routing import RouteContext, Routed, RouterRule, selection_scores, weights_of
from warmset.routing.counters import count_rows
from warmset.routing.rules import swap_at_random
from warmset.routing.scores import router_pick


def round_once(x_TH: Tensor, seed_generator: torch.Generator) -> Tensor:
    """The same tensor rounded once, as this module says; zero stays zero, and no finite value becomes infinite."""
    if x_TH.dtype == torch.float32:
        return x_TH.bfloat16().float()
    bits_TH = x_TH.contiguous().view(torch.int16)
    magnitude_TH = bits_TH & 0x7FFF
    up_TH = torch.randint(0, 2, x_TH.shape, generator=seed_generator, dtype=torch.int16) * 2 - 1
    greatest = torch.tensor(torch.finfo(x_TH.dtype).max, dtype=x_TH.dtype).view(torch.int16)
    moved_TH = (magnitude_TH + up_TH.to(bits_TH.device)).clamp(min=0).clamp(max=int(greatest))
    moved_TH = torch.where((magnitude_TH == 0) | (magnitude_TH > int(greatest)), magnitude_TH, moved_TH)
    return (moved_TH | (bits_TH & -0x8000)).view(x_TH.dtype)


class RoundingNull:
    """Rounds the routed experts' output where `changed_NL` (bool) says, in the pass that it is installed in."""

    def __init__(self, changed_NL: np.ndarray, seed: int = 0) -> None:
        self.changed_NL = torch.from_numpy(changed_NL)
        self.rounded_rows = self.windows = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = slice(0, 0)

    def at(self, first: int, num_rows: int) -> None:
        """The next window has these positions."""
        self._rows = slice(first, first + num_rows)
        self.windows += 1

    @contextmanager
    def installed(self, scorer: Scorer) -> Iterator[None]:
        handles = []
        for layer in range(self.changed_NL.shape[1]):
            hook = lambda *call, layer=layer: self._round(layer, scorer, call[2])  # noqa: E731  # one a layer
            handles.append(scorer.experts_of(layer).register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _round(self, layer: int, scorer: Scorer, out_TH: Tensor) -> Tensor | None:
        changed_T = self.changed_NL[self._rows, layer]
        if not scorer.routing.acts or not bool(changed_T.any()):
            return None
        self.rounded_rows += int(changed_T.sum())
        x_TH = out_TH.reshape(-1, out_TH.shape[-1])
        rounded_TH = round_once(x_TH, self._generator)
        return torch.where(changed_T.to(x_TH.device)[:, None], rounded_TH, x_TH).view_as(out_TH)


class ReplayedRandomSwap:
    """A policy that puts a random resident, not picked yet, where another one took a pick away.

    moved_NLK bool: rows, layers and ranks of those picks; the picks themselves are this pass's own, so every one of
    them is replaced, resident or not. As many swaps at the same places, unless a row has no resident left.
    """

    def __init__(self, moved_NLK: np.ndarray, seed: int = 0) -> None:
        self.moved_NLK = moved_NLK
        self.seed = seed
        self._rows = slice(0, 0)

    def at(self, first: int, num_rows: int) -> None:
        """The next window has these positions."""
        self._rows = slice(first, first + num_rows)

    def route(
        self,
        logits_TE: Tensor,
        slot_E: Tensor,
        *,
        rule: RouterRule,
        bias_E: Tensor | None = None,
        context: RouteContext | None = None,
    ) -> Routed:
        assert context is not None
        scores_TE = selection_scores(logits_TE, rule, bias_E)
        own_TK, error_T = router_pick(scores_TE, rule.top_k)
        moved_TK = torch.from_numpy(self.moved_NLK[self._rows, context.layer]).to(own_TK.device)
        position_T = torch.arange(self._rows.start, self._rows.stop, device=own_TK.device)
        moved_TK = moved_TK & ~error_T[:, None]
        others_TE = scores_TE.scatter(
            1, own_TK.clamp(min=0).long(), -torch.inf
        )  # what was taken away stays away
        ids_TK = swap_at_random(others_TE, own_TK, moved_TK, slot_E, position_T, context.layer, self.seed)
        swaps_T = (ids_TK != own_TK).sum(dim=1)
        return Routed(
            ids_TK=ids_TK,
            weights_TK=weights_of(ids_TK, logits_TE, rule).masked_fill(error_T[:, None], 0.0),
            own_ids_TK=own_TK,
            counters_T5=count_rows(own_TK, ids_TK, slot_E, moved_TK.sum(dim=1), swaps_T),
            error_T=error_T.int(),
        )

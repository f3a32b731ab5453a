"""Between windows: what committed rows picked is learned, and the slots follow it.

    window n decodes -> commit -> after_window: finish what was started a window ago, ask admission, start copies
                                                that run while window n+1 decodes

Heat is the router's own picks of committed rows, so an expert that a policy swapped away is wanted all the same.
What is decided here is decided on integers by `admission`; bytes are moved by `slots`. A learner, or anyone else, may
listen to the same picks. Knows no router and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from warmset.admission import DEFAULT_BUDGET_BYTES, Admission, prior_of
from warmset.profile import Profile
from warmset.slots import Move, Slots
from warmset.store import Store

Listener = Callable[[np.ndarray], None]
"""Given the own picks of a window's committed rows, int32 [L, T, K]."""


class Residency:
    """Who lies in the slots while an engine decodes.

    rule: `off`, `lfu` or `lru`. learned: the profile that filled the slots, if one did. picks_a_row: L * K.
    """

    def __init__(
        self,
        slots: Slots,
        store: Store,
        rule: str,
        *,
        learned: Profile | None,
        picks_a_row: int,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        self.rule = rule
        self.listeners: list[Listener] = []
        self._slots = slots
        self._store = store
        self._frozen = False
        num_layers, num_experts = slots.table_LE.shape
        self._num_experts = num_experts
        self._moved_before = slots.bytes_moved
        self.admission: Admission | None = None
        if rule != "off":
            self.admission = Admission(
                rule,
                num_layers=num_layers,
                num_experts=num_experts,
                owners=self._owners(),
                expert_bytes=store.layout.payload_bytes,
                budget_bytes=budget_bytes,
                prior=None if learned is None else prior_of(learned.counts_LE.ravel().tolist()),
                picks_a_row=picks_a_row,
            )

    @property
    def watches(self) -> bool:
        """Whether `after_window` would look at the picks at all."""
        return bool(self.listeners) or self._decides

    @property
    def _decides(self) -> bool:
        """Where every expert has a slot, or none has, there is nothing to decide."""
        slots = self._slots
        return (
            self.admission is not None and not self._frozen and slots.num_slots > 0 and not slots.all_resident
        )

    def after_window(self, own: list[torch.Tensor], num_rows: int) -> None:
        """A window is committed: `own` holds the router's own picks of each layer, int32 [T, K], T >= num_rows.

        One host sync, and none where nobody looks at them.
        """
        if not self.watches:
            return
        own_LTK = torch.stack([ids_TK[:num_rows] for ids_TK in own]).cpu().numpy()  # host sync
        for listener in self.listeners:
            listener(own_LTK)
        if self.admission is None or not self._decides:
            return
        self._finish()
        arrivals = self.admission.after_window(flat_rows(own_LTK, self._num_experts))
        moves = [Move(arrival.slot, *divmod(arrival.expert, self._num_experts)) for arrival in arrivals]
        self._slots.start(moves, self._store)

    def settle(self) -> None:
        """Wait for copies under way and take the slots as they are then; between windows only."""
        if not self._slots.pending:
            return
        try:
            self._finish()
        finally:
            if self.admission is not None:
                self.admission.follow(self._owners())

    def close(self) -> None:
        """Wait for copies under way: their memory and files are let go next, and nobody wants their result."""
        with suppress(Exception):
            self._slots.finish()

    def resize(self, num_slots: int) -> None:
        """Have `num_slots` slots from now on; the hottest residents stay, new slots fill as experts are wanted."""
        self.settle()
        keep = None
        if self.admission is not None:
            keep = [divmod(expert, self._num_experts) for expert in self.admission.hottest()]
        self._slots.resize(num_slots, self._store, keep)
        if self.admission is not None:
            self.admission.follow(self._owners())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, the slots stay as they are and nothing is learned for them: for measurements."""
        self.settle()
        before, self._frozen = self._frozen, True
        try:
            yield
        finally:
            self._frozen = before

    def reset_counts(self) -> None:
        """Moves are counted from here on."""
        self._moved_before = self._slots.bytes_moved

    def stats(self) -> dict[str, Any]:
        """Rule, experts brought in, and their bytes since the counts were reset."""
        moved_bytes = self._slots.bytes_moved - self._moved_before
        moves = moved_bytes // self._store.layout.payload_bytes
        return {"rule": self.rule, "moves": moves, "bytes": moved_bytes}

    def _finish(self) -> None:
        try:
            self._slots.finish()
        except Exception:
            # Those that failed left their slots free, the others are in the tables.
            if self.admission is not None:
                self.admission.follow(self._owners())
            raise

    def _owners(self) -> list[int | None]:
        return [
            None if owner is None else owner[0] * self._num_experts + owner[1] for owner in self._slots.owner
        ]


def flat_rows(own_LTK: np.ndarray, num_experts: int) -> list[list[int]]:
    """Picks int [L, T, K] -> for each of the T rows its experts as layer * E + expert; padding is left out."""
    num_layers, num_rows, _ = own_LTK.shape
    flat_LTK = own_LTK + np.arange(num_layers)[:, None, None] * num_experts
    real_LTK = (own_LTK >= 0) & (own_LTK < num_experts)
    return [flat_LTK[:, row][real_LTK[:, row]].tolist() for row in range(num_rows)]

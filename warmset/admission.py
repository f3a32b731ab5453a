"""Who is brought into the slots and who leaves: pure Python on integers, so that a replay decides the same.

    committed rows' own picks --heat--> wanted: cold experts that were picked now
                                        coldest: residents with the least heat
    a wanted expert takes the place of the coldest resident where it is hotter by more than a step

`lfu` counts picks with decay, `lru` knows when an expert was picked last. Experts are numbers here, layer * E + expert.
The timing is that of `slots`: what `after_window` asks for is nobody's during the next window and resident after it.
Knows no tensors, no files and no clock.

The heat of `lfu` is kept without touching every expert at every row: the worth of a pick grows by 1/128 a row instead,
so what was picked long ago weighs less by comparison (half as much after 89 rows). With a profile to start from, its
counts are the heat that is there at the start, and its residents are at home: they weigh `HOME_PICKS` more. So slots
that the profile filled well are left alone, and a switch of text wins over it within some hundred rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

DEFAULT_BUDGET_BYTES = 32 << 20
"""Copied in a window at most: 0.6 ms of a PCIe 5 link."""

MEMORY_SHIFT = 7
"""A pick of one row earlier weighs less by one part in 2**7."""

HOME_PICKS = 4
STEP_PICKS = 1
"""In picks of now: what a resident of the profile weighs more, and by how much a newcomer must be hotter."""

FIRST_WORTH = 1 << 16
MOST_WORTH = 1 << 48
_RESCALE_SHIFT = 32


@dataclass(frozen=True)
class Arrival:
    """An expert, layer * E + expert, that is to be brought into a slot."""

    slot: int
    expert: int


class Frequency:
    """Heat of `lfu`: decayed counts. `values[e]` is what expert e was picked, in the worth that a pick has now."""

    def __init__(self, num_experts: int, prior: Sequence[int] | None, picks_a_row: int) -> None:
        """prior: counts of a profile, one integer an expert; they weigh as much as rows of their kind would."""
        self.worth = FIRST_WORTH
        self.values = [0] * num_experts
        total = 0 if prior is None else sum(prior)
        if prior is not None and total > 0:
            mass = picks_a_row * FIRST_WORTH << MEMORY_SHIFT
            self.values = [count * mass // total for count in prior]

    @property
    def step(self) -> int:
        return STEP_PICKS * self.worth

    @property
    def home(self) -> int:
        return HOME_PICKS * self.worth

    def see(self, rows: Iterable[Sequence[int]]) -> bool:
        """Add the picks of rows, the earliest first; True where all values were scaled down."""
        for row in rows:
            self.worth += self.worth >> MEMORY_SHIFT
            for expert in row:
                self.values[expert] += self.worth
        if self.worth < MOST_WORTH:
            return False
        self.worth >>= _RESCALE_SHIFT
        self.values = [value >> _RESCALE_SHIFT for value in self.values]
        return True


class Recency:
    """Heat of `lru`: the number of the window that picked an expert last. Residents of the start are older than any."""

    step = 0
    home = 0

    def __init__(self, num_experts: int, owners: Sequence[int | None]) -> None:
        self.now = 0
        self.values = [-len(owners) - 1] * num_experts
        for slot, owner in enumerate(owners):  # a profile fills the hottest first: the last ones go first
            if owner is not None:
                self.values[owner] = -slot

    def see(self, rows: Iterable[Sequence[int]]) -> bool:
        self.now += 1
        for row in rows:
            for expert in row:
                self.values[expert] = self.now
        return False


class Admission:
    """Mirrors who lies in which slot and says, between windows, what is to be copied where.

    num_layers, num_experts: L and E. owners: the expert in each slot, None where it is free. expert_bytes,
    budget_bytes: size of one, and what may be copied a window on average (experts that are larger come in every
    few windows). prior: a profile's counts [L * E], which also makes the residents of the start at home.
    picks_a_row: L * K.
    """

    def __init__(
        self,
        rule: str,
        *,
        num_layers: int,
        num_experts: int,
        owners: Sequence[int | None],
        expert_bytes: int,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        prior: Sequence[int] | None = None,
        picks_a_row: int,
    ) -> None:
        assert rule in ("lfu", "lru") and expert_bytes > 0 and budget_bytes >= 0
        self.rule = rule
        self.arrivals = 0
        """How many experts were asked for in all."""
        self._num_layers = num_layers
        self._num_experts = num_experts
        total = num_layers * num_experts
        self.heat: Frequency | Recency = (
            Frequency(total, prior, picks_a_row) if rule == "lfu" else Recency(total, owners)
        )
        self._at_home = bytearray(total)
        if rule == "lfu" and prior is not None and any(prior):
            for owner in owners:
                if owner is not None:
                    self._at_home[owner] = 1
        self._expert_bytes = expert_bytes
        self._budget_bytes = budget_bytes
        self._credit_bytes = 0
        self._windows = 0
        self.follow(owners)

    def follow(self, owners: Sequence[int | None]) -> None:
        """Take the slots as they are now, after a resize or a copy that failed; nothing is under way."""
        self.owners = list(owners)
        self._resident = bytearray(self._num_layers * self._num_experts)
        for owner in self.owners:
            if owner is not None:
                self._resident[owner] = 1
        self._free = [slot for slot, owner in enumerate(self.owners) if owner is None]
        heapify(self._free)
        self._slot_of = {owner: slot for slot, owner in enumerate(self.owners) if owner is not None}
        self._pending: list[Arrival] = []
        self._sort()

    def is_resident(self, expert: int) -> bool:
        return bool(self._resident[expert])

    def hottest(self) -> list[int]:
        """The residents, those that would leave last first."""
        residents = [owner for owner in self.owners if owner is not None]
        return sorted(residents, key=lambda expert: (-self._weight(expert), expert))

    def after_window(self, rows: Iterable[Sequence[int]]) -> list[Arrival]:
        """What to copy while the next window runs, given the picks of the rows that were committed in the last.

        What was asked for a window ago is resident from now on; the former owners of the slots asked for are not.
        """
        for arrival in self._pending:
            self.owners[arrival.slot] = arrival.expert
            self._slot_of[arrival.expert] = arrival.slot
            self._resident[arrival.expert] = 1
            self._enter_heap(arrival.expert)
        self._windows += 1
        rows = list(rows)
        if self.heat.see(rows):
            self._sort()
        self._pending = self._choose({expert for row in rows for expert in row if not self._resident[expert]})
        self.arrivals += len(self._pending)
        return self._pending

    def _choose(self, wanted: set[int]) -> list[Arrival]:
        most = max(self._budget_bytes, self._expert_bytes) if self._budget_bytes else 0
        self._credit_bytes = min(most, self._credit_bytes + self._budget_bytes)
        chosen: list[Arrival] = []
        for expert in sorted(wanted, key=self._precedence):
            if self._credit_bytes < self._expert_bytes:
                break
            slot = self._make_room(expert)
            if slot is None:
                break
            self._credit_bytes -= self._expert_bytes
            chosen.append(Arrival(slot, expert))
        return chosen

    def _make_room(self, expert: int) -> int | None:
        """A free slot, or that of the coldest resident where the expert is hotter by more than a step."""
        if self._free:
            return heappop(self._free)
        heap = self._coldest_heap()
        if heap is None:
            return None
        victim = heap[0][1]
        if self._weight(expert) - self._weight(victim) <= self.heat.step:
            return None
        heappop(heap)
        slot = self._slot_of.pop(victim)
        self.owners[slot] = None
        self._resident[victim] = 0
        return slot

    def _weight(self, expert: int) -> int:
        return self.heat.values[expert] + self._at_home[expert] * self.heat.home

    def _precedence(self, expert: int) -> tuple[int, int, int]:
        """The hottest first; among equals layers take turns in being first."""
        layer = expert // self._num_experts
        return -self._weight(expert), (layer - self._windows) % self._num_layers, expert

    # -- the coldest resident: two heaps whose entries are brought up to date when they surface; heat only grows -----

    def _sort(self) -> None:
        self._home_heap: list[tuple[int, int]] = []
        self._away_heap: list[tuple[int, int]] = []
        for owner in self.owners:
            if owner is not None:
                self._heap_of(owner).append((self.heat.values[owner], owner))
        heapify(self._home_heap)
        heapify(self._away_heap)

    def _heap_of(self, expert: int) -> list[tuple[int, int]]:
        return self._home_heap if self._at_home[expert] else self._away_heap

    def _enter_heap(self, expert: int) -> None:
        heappush(self._heap_of(expert), (self.heat.values[expert], expert))

    def _coldest_heap(self) -> list[tuple[int, int]] | None:
        """The heap whose top is the coldest resident, the smaller number among equals; None without residents."""
        found = [heap for heap in (self._home_heap, self._away_heap) if heap]
        for heap in found:
            while heap[0][0] != self.heat.values[heap[0][1]]:
                expert = heap[0][1]
                heapreplace(heap, (self.heat.values[expert], expert))
        return min(found, key=lambda heap: (self._weight(heap[0][1]), heap[0][1])) if found else None


def prior_of(counts: Iterable[float]) -> list[int]:
    """A profile's counts in thousandths, as its file keeps them."""
    return [round(1000 * count) for count in counts]

"""How many slots fit: everything else is planned first, the slots get what is left, and the sum is printed.

    non-expert weights + KV at the longest length + prompt buffers + window buffers and graphs + reserve + slots

so that what fits at the start still fits at the longest prompt that the settings allow. On a GPU the budget is
what is free there, or `--vram`; on a CPU a share of the RAM that is left. Knows sizes, not models: `needs`
says how large each part is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from warmset import memory
from warmset.config import Resolved
from warmset.errors import WarmsetError

GRAPHS_BYTES = 256 << 20
RESERVE_BYTES = 768 << 20
"""Left free on a GPU: the libraries' own workspaces, and what the allocator cannot use between blocks."""

_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_bytes(text: str, name: str) -> int:
    """`12GiB`, `800MiB`, `12GB`, `1.5GiB` -> bytes. Raises WarmsetError in one sentence."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    size = int(float(found.group(1)) * unit) if found and unit else 0
    if size < 1:
        raise WarmsetError(f"{name} must be a size with a unit, such as 12GiB or 800MiB. Got {text!r}.")
    return size


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that are taken before the slots."""

    weights: int
    cache: int
    prompt: int
    window: int
    max_model_len: int

    def parts(self, device: torch.device) -> list[tuple[str, int]]:
        parts = [
            ("non-expert weights", self.weights),
            (f"cache of {self.max_model_len:,} tokens", self.cache),
            ("prompt buffers", self.prompt),
            ("window buffers", self.window),
        ]
        if device.type == "cuda":
            parts += [("graphs", GRAPHS_BYTES), ("reserve", RESERVE_BYTES)]
        return parts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A budget and its parts. `fitting`: the slots that the rest holds, never below 0."""

    budget_bytes: int
    budget_from: str
    parts: list[tuple[str, int]]
    slot_bytes: int

    @property
    def reserved_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def fitting(self) -> int:
        return max(0, (self.budget_bytes - self.reserved_bytes) // self.slot_bytes)

    @property
    def holds_the_rest(self) -> bool:
        return self.reserved_bytes <= self.budget_bytes

    def sentence(self, num_slots: int) -> str:
        """The sum, for people."""
        parts = [f"{gib(size)} {name}" for name, size in self.parts]
        parts.append(f"{gib(num_slots * self.slot_bytes)} for {num_slots:,} slots")
        total = self.reserved_bytes + num_slots * self.slot_bytes
        return f"{self.budget_from} {gib(self.budget_bytes)}; {' + '.join(parts)} = {gib(total)} GiB"


def make_plan(device: torch.device, needs: Needs, slot_bytes: int, vram: int | None = None) -> Plan:
    """Plan one device after the non-expert weights are on it.

    vram: the most that may be used there, weights and all (None: what is free).
    """
    weights = needs.weights
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch holds already counts as free: it is in the sum, and its blocks are used again.
        budget = min(total, free + torch.cuda.memory_reserved(device))
        source = f"VRAM free on {device}"
        if vram is not None and vram < budget:
            budget, source = vram, "VRAM allowed by --vram"
    else:
        budget = int(memory.host_available_bytes() * memory.HOST_SHARE) + weights
        source = f"{memory.HOST_SHARE:.0%} of the RAM left, and the weights,"
    return Plan(budget_bytes=budget, budget_from=source, parts=needs.parts(device), slot_bytes=slot_bytes)


def check_fits(plan: Plan, num_slots: int, device: torch.device) -> None:
    """Refuse, before anything is allocated, what would run out of VRAM later. RAM may be overcommitted."""
    if device.type != "cuda" or (num_slots <= plan.fitting and plan.holds_the_rest):
        return
    raise WarmsetError(f"slots do not fit: {plan.sentence(num_slots)}. At most {plan.fitting:,} slots fit.")


def choose_slow_tier(arena_bytes: int) -> Resolved[str]:
    """`arena` where host RAM holds every expert, else `disk`: then each layer stops for the host to read its cold ones.

    What the system has free at this moment is no limit, since the memory of some virtual machines grows as it is
    used; the cgroup's limit and the RAM there is are.
    """
    limit, source = int(memory.host_total_bytes() * memory.HOST_LIMIT_SHARE), "the RAM there is"
    left = memory.cgroup_left_bytes()
    if left is not None and left < limit:
        limit, source = left, "what the cgroup leaves"
    size = f"all experts are {gib(arena_bytes)} GiB, {source} is {gib(limit)}"
    if arena_bytes <= limit:
        return Resolved(value="arena", why=f"read from host RAM within the window ({size})")
    return Resolved(value="disk", why=f"read from disk, each layer in two segments with a host step ({size})")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"

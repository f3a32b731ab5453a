"""How much host memory there is to plan with, under the cgroup's limit.

MemTotal lies in a container: the limit is the cgroup's (v1 and v2), and what may be used is what is left of it.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
HOST_SHARE = 0.8
HOST_LIMIT_SHARE = 0.9
"""Of the RAM there is: what the system and the trunk need stays free."""


def cgroup_left_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the cgroup still allows, or None without a limit."""
    for limit_name, usage_name, stat_name, key in _CGROUP_FILES:
        try:
            limit = (root / limit_name).read_text().strip()
            usage = int((root / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            usage -= _pages_that_go(root / stat_name, key)
            return max(0, int(limit) - max(0, usage))
    return None


def _pages_that_go(stat: Path, key: str) -> int:
    """File pages that the kernel drops when memory is asked for: reading a checkpoint leaves many of them."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == key), 0)
    except (OSError, ValueError):
        return 0


def host_total_bytes() -> int:
    """The RAM of the system, whatever a cgroup allows."""
    return psutil.virtual_memory().total


def host_available_bytes() -> int:
    """Host RAM that can still be taken: the smaller of what the system and the cgroup leave."""
    available = psutil.virtual_memory().available
    left = cgroup_left_bytes()
    return available if left is None else min(available, left)

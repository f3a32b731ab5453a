"""How much memory there is to plan with: the device's free bytes, and host RAM under the cgroup's limit.

MemTotal lies in a container: the limit is the cgroup's (v1 and v2), and what may be used is what is left of it.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
HOST_SHARE = 0.8
DEVICE_RESERVE_BYTES = 1 << 30


def cgroup_left_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the cgroup still allows, or None without a limit."""
    for limit_name, usage_name in _CGROUP_FILES:
        try:
            limit = (root / limit_name).read_text().strip()
            usage = int((root / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            return max(0, int(limit) - usage)
    return None


def host_available_bytes() -> int:
    """Host RAM that can still be taken: the smaller of what the system and the cgroup leave."""
    available = psutil.virtual_memory().available
    left = cgroup_left_bytes()
    return available if left is None else min(available, left)


def slots_that_fit(device: torch.device, slot_bytes: int, reserved_bytes: int) -> tuple[int, str]:
    """How many slots of `slot_bytes` fit on `device` beside `reserved_bytes`, and the sum as a sentence."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget, name = free - DEVICE_RESERVE_BYTES, "VRAM free less a reserve of 1 GiB"
    else:
        budget, name = int(host_available_bytes() * HOST_SHARE), f"{HOST_SHARE:.0%} of the RAM left"
    fitting = max(0, (budget - reserved_bytes) // slot_bytes)
    why = f"{name} is {_gib(budget)}, less {_gib(reserved_bytes)} for the rest: {fitting} slots fit"
    return fitting, why


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""What this machine is: the figures a bug report and a plan need."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from typing import Any

import psutil

from warmset import memory
from warmset.measure.record import commit, versions


def describe_machine() -> dict[str, Any]:
    """Versions, GPUs, compiler, memory and limits as one flat object; unknown is None. Sizes in bytes."""
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        **versions(),
        "commit": commit(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "ram_total_bytes": psutil.virtual_memory().total,
        "ram_available_bytes": memory.host_available_bytes(),
        "cgroup_left_bytes": memory.cgroup_left_bytes(),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "compiler": _compiler(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
    }


def _compiler() -> str | None:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return answer.splitlines()[0] if answer else name
    return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "vram_total_bytes": total,
                "vram_free_bytes": free,
            }
        )
    return found

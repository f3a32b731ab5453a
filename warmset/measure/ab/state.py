"""A leg's process and the state of its machine: what may differ between two legs although nothing was changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import psutil

from warmset.measure.record import commit, gpu_name, versions

GPU_QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "temperature.gpu": "celsius",
    "power.draw": "watts",
    "utilization.gpu": "busy_percent",
}


def machine_state() -> dict[str, Any]:
    """Load, clocks, temperature and free memory of host and GPUs; None where the machine does not tell."""
    frequency = psutil.cpu_freq()
    return {
        "load_1min": os.getloadavg()[0],
        "cpu_mhz": frequency.current if frequency else None,
        "cpu_celsius": _hottest(),
        "ram_available_bytes": psutil.virtual_memory().available,
        "gpus": _gpus(),
    }


def about_process(on_gpu: bool) -> dict[str, Any]:
    """What runs here: process, commit, versions, threads, and the GPU where it is used."""
    import torch

    return {
        "pid": os.getpid(),
        "commit": commit(),
        "gpu": gpu_name() if on_gpu else None,
        "versions": versions(),
        "torch_threads": torch.get_num_threads(),
    }


def _hottest() -> float | None:
    read = getattr(psutil, "sensors_temperatures", dict)
    found = [sensor.current for sensors in read().values() for sensor in sensors]
    return max(found, default=None)


def _gpus() -> list[dict[str, float | None]]:
    """By `nvidia-smi`, which needs no context on the device; empty where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(GPU_QUERY.values(), map(_number, line.split(",")), strict=False))
        for line in answer.splitlines()
        if line.strip()
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

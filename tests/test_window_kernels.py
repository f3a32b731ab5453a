"""The kernels of a decode window in Triton's interpreter (see window_kernel_cases), and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def test_every_case_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    answer = subprocess.run(
        [*command, str(HERE / "window_kernel_cases.py")],
        env=environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    assert "passed" in answer.stdout and "skipped" not in answer.stdout, answer.stdout[-500:]


@pytest.mark.parametrize(
    "capability", (80, 90, 120, *(pytest.param(number, marks=pytest.mark.slow) for number in (86, 89, 100)))
)
def test_every_kernel_compiles_for(capability, tmp_path):
    """At the shapes of Qwen3-Next and Qwen4-Exp, within the shared memory of a block."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "window_kernel_builds.py"), str(capability)]
    answer = subprocess.run(
        command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.startswith("57 built")

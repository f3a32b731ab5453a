"""The expert kernels in Triton's interpreter, against plain torch; and compiled, for every GPU they are meant for.

The interpreter is chosen when triton is imported, so the cases (`experts_cases`) run in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import experts_cases
import pytest

HERE = Path(__file__).parent
CAPABILITIES = (80, 90, 120, *(pytest.param(number, marks=pytest.mark.slow) for number in (86, 89, 100)))


def run_cases(*names: str) -> dict[str, str | None]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "experts_cases.py"), *names]
    answer = subprocess.run(
        command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers() -> dict[str, str | None]:
    return run_cases(*(case.__name__ for case in experts_cases.QUICK))


@pytest.mark.parametrize("name", [case.__name__ for case in experts_cases.QUICK])
def test_in_the_interpreter(answers, name):
    assert answers[name] is None, answers[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.__name__ for case in experts_cases.SLOW])
def test_in_the_interpreter_for_long(name):
    answer = run_cases(name)[name]
    assert answer is None, answer


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warmset.kernels import experts as window, experts_probe, experts_prompt as prompt, experts_read

POINTERS = dict(
    x_TH="*{t}", ids_TK="*i32", weights_TK="*fp32", slot_LE="*i32", address_LE="*i64", h_PI="*{t}", h_SI="*{t}",
    y_PH="*{y}", arrived_N="*i32", counts_2="*i64", out_TH="*{t}", tiles_N3="*i64", order_S="*i32", out_N="*i32",
    data_N="*i32", out_1="*i32", address="i64", count="i32", layer="i32", num_rows="i32", want_cold="i32",
)


def build(kernel, capability, dtype, y, warps, stages, pdl=False, **constants):
    signature = {n: "constexpr" if n in constants else POINTERS[n].format(t=dtype, y=y) for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, attrs)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=dict(num_warps=warps, num_stages=stages, launch_pdl=pdl))


def window_kernels(tiles, capability, dtype, rows=16, pdl=False):
    sizes = dict(E=512, K=10, H=2048, I=512, ROWS=rows, K_PAD=16, EARLY=tiles.early and capability >= 90)
    yield build(window.gate_up_kernel, capability, dtype, "fp32", tiles.gate_warps, tiles.gate_stages, pdl,
                ACTIVATION=0, BLOCK_I=tiles.block_i, BLOCK_K=tiles.gate_k, **sizes)
    yield build(window.down_sum_kernel, capability, dtype, "fp32", tiles.down_warps, tiles.down_stages, pdl,
                DOWN_OFFSET=2 * 512 * 2048, BLOCK_H=tiles.block_h, BLOCK_K=tiles.down_k, **sizes)


for capability in map(int, sys.argv[1:]):
    for tiles in window.TILES.values() if capability == 90 else [window.DEFAULT_TILES]:
        for built in window_kernels(tiles, capability, "bf16"):
            ptx = built.asm["ptx"]
            weights = ptx.count("cp.async.cg.shared.global") or ptx.count("ld.global.v4")
            assert weights >= 4, (capability, tiles.name, "weights are not read 16 bytes at a time")
            # What the device gives a block: 99 KiB on consumer cards.
            assert built.metadata.shared <= 99 << 10, (capability, tiles.name, built.metadata.shared)
    if capability == 90:
        list(window_kernels(window.DEFAULT_TILES, 90, "fp16"))
        early = window.TILES["wide-early"]
        resident, cold = (list(window_kernels(early, 90, "bf16", pdl=pdl)) for pdl in (True, False))
        for begun, later in zip(resident, cold):
            assert begun.asm["ptx"] == later.asm["ptx"], "a resident launch and a cold one are not the same code"
        assert "griddepcontrol.launch" in resident[0].asm["ptx"] and "griddepcontrol.wait" in resident[1].asm["ptx"]
    sizes = dict(M=64, N=64, BLOCK_K=64)
    build(prompt.gate_up_many_kernel, capability, "bf16", "bf16", 4, 3, K=10, H=2048, I=512, ACTIVATION=0, **sizes)
    build(prompt.down_many_kernel, capability, "bf16", "bf16", 4, 3, H=2048, I=512, DOWN_OFFSET=1 << 21, **sizes)
    build(prompt.sum_ranks_kernel, capability, "bf16", "bf16", 2, 3, E=512, K=10, H=2048, N=256)
    build(experts_probe.copy_from_kernel, capability, "bf16", "bf16", 4, 3, BLOCK=1024)
    build(experts_read.read_only_kernel, capability, "bf16", "bf16", 4, 3, BLOCK=2048, STEPS=4)
print("compiled")
"""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_and_reads_sixteen_bytes_at_a_time(capability, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = tmp_path / "build.py"  # a file: triton reads the source of its kernels, and errors name lines
    script.write_text(COMPILE)
    command = [sys.executable, str(script), str(capability)]
    answer = subprocess.run(
        command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert answer.stdout.strip() == "compiled", answer.stderr[-3000:]

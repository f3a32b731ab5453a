"""The routing kernels without a GPU: edge cases under the interpreter, and machine code for every architecture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warmset.kernels import dispatch
from warmset.routing import AdditiveBias, Exact, FewerPicks, MarginSwap, RouterRule

HERE = Path(__file__).parent
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_edge_cases_on_all_forms():
    done = run_script("kernel_edges.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def constants(kernel, **values):
    """Compile-time constants of a kernel: a plain softmax router but for `values`."""
    usual = {
        "SCALE": 1.0, "E": 128, "K": 4, "BITS": 7, "SIGMOID": False, "HAS_BIAS": False, "RENORM": True,
        "NUM_GROUPS": 1, "TOP_GROUPS": 1, "SUM2": False, "POLICY": 1, "FROM_BF16": False, "WITH_SCORES": False,
    }  # fmt: skip
    return {name: value for name, value in {**usual, **values}.items() if name in kernel.arg_names}


def compile_kernel(kernel, architecture: int, dtype: str = "fp32", **values):
    """The compiled kernel; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from warmset.kernels.common import FP_OPTIONS

    integers = {"own_ptr", "ids_ptr", "ids_in_ptr", "slot_ptr", "lo_ptr", "hi_ptr", "error_ptr"}
    kept = constants(kernel, **values)
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in kept:
            signature[name] = "constexpr"
        elif not name.endswith("_ptr"):
            signature[name] = "i32"
        else:
            element = "i64" if name == "counter_ptr" else "i32" if name in integers else "fp32"
            signature[name] = f"*{dtype if name == 'logits_ptr' else element}"
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=kept, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=FP_OPTIONS)


def kernels():
    from warmset.kernels.route_fused import route_fused_kernel
    from warmset.kernels.swap_serial import swap_serial_kernel
    from warmset.kernels.swap_warp import swap_warp_kernel
    from warmset.kernels.window_joint import window_joint_kernel

    return [swap_serial_kernel, swap_warp_kernel, route_fused_kernel, window_joint_kernel]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture):
    for kernel in kernels():
        assert compile_kernel(kernel, architecture).asm["cubin"]


def disassemble(compiled, folder: Path) -> list[str]:
    """Opcodes of the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("fp32", {"E": 512, "K": 10, "BITS": 9, "POLICY": 0}),
        ("fp32", {"E": 512, "K": 10, "BITS": 9}),
        ("bf16", {"E": 512, "K": 10, "BITS": 9, "FROM_BF16": True}),
        ("fp32", {"E": 256, "K": 8, "BITS": 8, "POLICY": 2, "SIGMOID": True, "HAS_BIAS": True, "SCALE": 2.5,
                  "NUM_GROUPS": 8, "TOP_GROUPS": 4, "SUM2": True}),
        ("fp32", {"E": 257, "K": 6, "BITS": 9, "POLICY": 3, "RENORM": False}),
    ],
)  # fmt: skip
def test_a_row_stays_in_registers(tmp_path, dtype, values):
    """No local memory, no atomics, no shared memory in a round: what makes route_fused fast on sm_90."""
    opcodes = disassemble(compile_kernel(kernels()[2], 90, dtype, **values), tmp_path)
    used = {opcode.split(".")[0] for opcode in opcodes}
    assert "REDUX" in used
    assert not used & {"LDL", "STL", "ATOM", "ATOMG", "RED", "LDS", "STS"}


def test_torch_routes_where_no_kernel_does_and_says_why(monkeypatch):
    rule = RouterRule(top_k=4)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert dispatch.torch_reason(MarginSwap(), rule, 64, cpu) == "device cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than compute capability 8.0" in dispatch.torch_reason(MarginSwap(), rule, 64, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert dispatch.torch_reason(MarginSwap(), rule, 64, cuda) is None
    assert dispatch.torch_reason(MarginSwap(), rule, 64, cuda, "serial") is None
    assert "MarginSwap only" in dispatch.torch_reason(AdditiveBias(beta=1.0), rule, 64, cuda, "warp")
    assert "FewerPicks" in dispatch.torch_reason(FewerPicks(k=2), rule, 64, cuda)
    assert "over 32 picks" in dispatch.torch_reason(Exact(), RouterRule(top_k=33), 64, cuda)

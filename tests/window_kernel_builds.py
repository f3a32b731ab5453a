"""Builds the kernels of a decode window for a GPU that is not there: run by test_window_kernels as a script.

Each launcher is called with tensors of a real model's shapes, and in the place of the launch stands the compiler, so
what is built is what a window would launch. Arguments: compute capabilities, as 90.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from warmset.kernels import delta_window, index_blocks, small_ops, stamp, window_attention
from warmset.kernels.gather_rows import gather_rows
from warmset.kernels.window_state import IndexWeights

OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
NAMES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.uint8: "*u8", torch.int32: "*i32",
}  # fmt: skip
built: list[str] = []


def compile_instead(capability: int):
    """What `JITFunction.run` becomes: the same arguments, but compiled and not launched."""

    def run(self, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS & set(kwargs)}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants, attrs = {}, {}, {}
        for number, parameter in enumerate(self.params):
            value = values[parameter.name]
            if parameter.is_constexpr or (
                type(value) is int and value == 1 and not parameter.do_not_specialize
            ):
                signature[parameter.name], constants[(number,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = NAMES[value.dtype]
                if value.data_ptr() % 16 == 0:
                    attrs[(number,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = (
                    "fp32" if isinstance(value, float) else "i64" if value >> 31 else "i32"
                )
                if type(value) is int and value % 16 == 0:
                    attrs[(number,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, attrs)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.metadata.shared <= 99 << 10, (self.__name__, kernel.metadata.shared)
        built.append(self.__name__)

    return run


def every_kernel(dtype: torch.dtype, rows: int) -> None:
    """The launches of one window of Qwen3-Next and Qwen4-Exp."""
    x, weight = torch.zeros(rows, 2048, dtype=dtype), torch.zeros(2048, dtype=dtype)
    small_ops.rms_norm(x, weight, 1e-6, plus_one=True)
    small_ops.rms_norm(torch.zeros(rows, 8192, dtype=dtype), torch.zeros(8192, dtype=dtype), 1e-6,
                       plus_one=True, groups=4)  # fmt: skip
    heads = torch.zeros(rows, 16, 512, dtype=dtype)[..., :256]
    small_ops.rms_norm(heads, torch.zeros(256, dtype=dtype), 1e-6, plus_one=True)
    small_ops.rms_norm(heads, torch.zeros(256, dtype=dtype), 1e-6, plus_one=False)
    small_ops.silu_mul(torch.zeros(rows, 1024, dtype=dtype))
    small_ops.stream_gates(torch.zeros(rows, 324, dtype=dtype), 320, 4)
    small_ops.stream_gates(torch.zeros(rows, 320, dtype=dtype), 320, 4)
    small_ops.stream_mix(*(torch.zeros(rows, 8192, dtype=dtype) for _ in range(2)), 4)
    out_TNV = torch.zeros(rows, 32, 128, dtype=dtype)
    for sigmoid in (True, False):
        small_ops.gated_norm(out_TNV, torch.zeros(rows, 12288, dtype=dtype), weight[:128], 1e-6,
                             repeat=2, group_stride=768, sigmoid=sigmoid)  # fmt: skip
    state = delta_window.DeltaState.make(
        channels=8192, key_heads=16, value_heads=32, key_dim=128, value_dim=128,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    rows_of = torch.zeros(rows, 12352, dtype=dtype)
    projected = delta_window.Projected(
        query=rows_of, key=rows_of[:, 128:], value=rows_of[:, 256:], b=rows_of[:, 12288:], a=rows_of[:, 12290:],
        key_stride=768, value_stride=768, gate_stride=4,
    )  # fmt: skip
    conv_C4, a_log_N, begin_2 = (
        torch.zeros(8192, 4, dtype=dtype),
        torch.zeros(32, dtype=dtype),
        torch.zeros(2).long(),
    )
    delta_window.delta_window(projected, conv_C4, a_log_N, a_log_N, begin_2, state)
    query = torch.zeros(1, rows, 16, 512, dtype=dtype)[0, ..., :256].transpose(0, 1)
    pages = torch.zeros(2, 6400, 256, dtype=dtype)
    window_attention.window_attention(query, pages, pages, torch.ones(rows, 6400, dtype=torch.bool), 0.0625)
    narrow = torch.zeros(128, dtype=dtype)
    weights = IndexWeights(
        query_D=narrow, key_D=narrow, query_eps=1e-6, key_eps=1e-6, query_plus_one=True, key_plus_one=True,
        heads=4, ratio=32, top=64,
    )  # fmt: skip
    angles = [torch.zeros(lines, 64, dtype=dtype) for lines in (rows, rows, 200, 200)]
    keys_SD, block_keys_BD = torch.zeros(6400, 128, dtype=dtype), torch.zeros(200, 128, dtype=dtype)
    qk_TX = torch.zeros(rows, 640, dtype=dtype)
    index_blocks.index_blocks(qk_TX, *angles[:2], weights, begin_2, keys_SD, block_keys_BD, *angles[2:])
    gather_rows(1 << 45, torch.zeros(16, dtype=torch.int64), torch.zeros(16, 128, dtype=dtype))
    stamp.stamp(torch.zeros(8, dtype=torch.int64), 3)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        JITFunction.run = compile_instead(int(word))  # type: ignore[method-assign]
        for rows in (1, 4, 8):
            every_kernel(torch.bfloat16, rows)
    print(f"{len(built)} built: {', '.join(sorted(set(built)))}")

"""`route_fused` in CUDA C++ (route_fused.cu): what it knows, and its launch. NVRTC compiles it at first use.

Needs the package `cuda-core` and NVRTC (the extra `cuda`), imported with the first call, never with this module.
Arguments, shapes and results as in `route_fused`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warmset.routing import Exact, MarginSwap, Policy, PolicyTable, Routed, RouterRule

from .common import empty_routed

SOURCE = Path(__file__).with_name("route_fused.cu")
MAX_PICKS = 31
"""Lane K holds the first expert that was not picked."""
MAX_EXPERTS = 512
"""Sixteen a lane: the keys stay in registers."""


@cache
def is_installed() -> bool:
    """Whether cuda.core and the NVRTC library can be loaded."""
    try:
        _core()
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def cuda_reason(
    policy: Policy, rule: RouterRule, num_experts: int, device: torch.device, with_scores: bool = False
) -> str | None:
    """Why the Triton form routes; None where this form does."""
    if device.type != "cuda":
        return f"device {device.type}"
    if type(policy) not in (Exact, MarginSwap):
        return f"the policy {type(policy).__name__}"
    if rule.num_groups != 1:
        return "groups of experts"
    if rule.scoring == "softmax" and not rule.renormalize:
        return "weights that need a sum over all experts: another order of adding would give other bits"
    if with_scores:
        return "scores for the kernels that swap after the router"
    if rule.top_k > MAX_PICKS or num_experts > MAX_EXPERTS:
        return f"over {MAX_PICKS} picks or {MAX_EXPERTS} experts"
    if not is_installed():
        return "cuda-core or NVRTC is not installed"
    return None


def source(
    rule: RouterRule,
    num_experts: int,
    *,
    swap: bool,
    has_bias: bool,
    bf16: bool,
    wide: bool,
    text: str | None = None,
) -> str:
    """The kernel for one router. wide: four experts a load. text: another body than the package's."""
    constants = {
        "E": num_experts,
        "K": rule.top_k,
        "VEC": 4 if wide else 1,
        "LOGIT": "unsigned short" if bf16 else "float",
        "SIGMOID": int(rule.scoring == "sigmoid"),
        "HAS_BIAS": int(has_bias),
        "RENORM": int(rule.renormalize),
        "SCALE": f"{float(np.float32(rule.scale))!r}f",
        "SWAP": int(swap),
    }
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join([*lines, SOURCE.read_text() if text is None else text])


def compile_source(text: str, architecture: str) -> Any:
    """Machine code (cuda.core.ObjectCode) for an architecture such as sm_90; needs no GPU."""
    core = _core()
    options = core.ProgramOptions(
        arch=architecture, std="c++17", fma=False
    )  # contraction would round differently
    return core.Program(text, "c++", options).compile("cubin")


def _core() -> Any:
    import cuda.core

    if hasattr(cuda.core, "Program"):
        return cuda.core
    import cuda.core.experimental  # where the package kept these names before its version 1

    return cuda.core.experimental


@cache
def _kernel(device: int, text: str | None, **constants: Any) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    code = compile_source(source(**constants, text=text), f"sm_{major}{minor}")
    return code.get_kernel("route_fused")


@cache
def _grid(num_rows: int) -> Any:
    return _core().LaunchConfig(grid=num_rows, block=32)


def _current_stream() -> Any:
    return _core().Stream.from_handle(
        torch.cuda.current_stream().cuda_stream or 1
    )  # 1 names the default stream


def is_wide(logits_TE: Tensor, slot_E: Tensor) -> bool:
    """Whether four experts can be read at once: addresses and rows are whole loads."""
    num_experts = logits_TE.shape[1]
    size = 4 * logits_TE.element_size()
    return (
        num_experts >= 128
        and num_experts % 4 == 0
        and logits_TE.data_ptr() % size == 0
        and slot_E.data_ptr() % 16 == 0
    )


def launch_cuda(
    logits_TE: Tensor,
    slot_E: Tensor,
    rule: RouterRule,
    bias_E: Tensor | None,
    table: PolicyTable | None,
    layer: int,
    text: str | None = None,
) -> Routed:
    """One launch; `table` is None for Exact. text: another body than the package's, for tests."""
    num_rows, num_experts = logits_TE.shape
    routed = empty_routed(num_rows, rule.top_k, logits_TE.device)
    if num_rows == 0:
        return routed
    with torch.cuda.device(logits_TE.device):
        kernel = _kernel(
            torch.cuda.current_device(),
            text,
            rule=rule,
            num_experts=num_experts,
            swap=table is not None,
            has_bias=bias_E is not None,
            bf16=logits_TE.dtype == torch.bfloat16,
            wide=is_wide(logits_TE, slot_E),
        )
        numbers = (None, None, None) if table is None else (table.value_L, table.lo_L, table.hi_L)
        tensors = (
            logits_TE, bias_E, slot_E, *numbers,
            routed.own_ids_TK, routed.ids_TK, routed.weights_TK, routed.counters_T5, routed.error_T,
        )  # fmt: skip
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        _core().launch(_current_stream(), _grid(num_rows), kernel, *addresses, np.int32(layer))
    return routed

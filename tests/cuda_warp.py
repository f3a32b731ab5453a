"""`route_fused` in CUDA C++ on a CPU: g++ compiles it with an emulated warp (warp_emulator.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warmset.kernels import route_cuda
from warmset.kernels.common import empty_routed
from warmset.measure.parity_cases import MARGIN_SWAP, make_batch
from warmset.routing import Exact, PolicyTable, RouteContext, Routed, RouterRule
from warmset.routing.scores import clean

HEADER = Path(__file__).with_name("warp_emulator.h")
MUTANTS = {
    "< for <=": ("gap <= margin", "gap < margin"),
    "tie to the larger index": (
        "(LAST_INDEX - ((key >> 1) & LAST_INDEX))", "((key >> 1) & LAST_INDEX)",
        "(LAST_INDEX - e) * 2 + 1", "e * 2 + 1",
    ),
    "picked set not updated": ("__shfl_sync(ALL, substitute, from & 31)", "__shfl_sync(ALL, substitute, 0)"),
    "hi off by one": ("lane <= hi", "lane < hi"),
    "-0.0 below 0.0": ("__float_as_uint(x + 0.0f)", "__float_as_uint(x)"),
    "NaN on top": ("fminf(fmaxf(x, -INF), FLOAT_MAX)", "(x != x ? FLOAT_MAX : fminf(x, FLOAT_MAX))"),
    "a tie of keys taken for one of scores": ("score != score_before", "false"),
    "the end of the span taken for an order": ("(key >> SHIFT) == 0", "false"),
    "a lane's list taken for all it has": ("PER > 3 ? SPENT : 0", "0"),
    "the picks after a spent list not looked for": ("if (best == SPENT) {", "if (false) {"),
    "an infinite span": ("!finite ||", ""),
}  # fmt: skip
"""One deliberate fault each: pairs of old and new text."""


def mutant(name: str) -> str:
    text = route_cuda.SOURCE.read_text()
    edits = MUTANTS[name]
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert text.count(old) == 1, f"route_fused.cu has {text.count(old)} of {old!r}"
        text = text.replace(old, new)
    return text


class EmulatedWarp:
    """Compiles the kernel for each router it meets. text: another body than the package's."""

    def __init__(self, folder: Path, text: str | None = None):
        self.folder, self.text = folder, text
        self.known: dict[str, Any] = {}

    @staticmethod
    def compiler() -> str | None:
        return shutil.which("g++")

    def _library(self, source: str) -> Any:
        if source not in self.known:
            kernel = self.folder / f"kernel_{len(self.known)}.cu"
            kernel.write_text(source)
            built = kernel.with_suffix(".so")
            subprocess.run(
                [str(self.compiler()), "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-frounding-math", "-shared",
                 "-fPIC", f'-DKERNEL="{kernel}"', "-x", "c++", str(HEADER), "-o", str(built)], check=True,
            )  # fmt: skip
            self.known[source] = ctypes.CDLL(str(built))
        return self.known[source]

    def route(
        self,
        policy: Any,
        logits_TE: Tensor,
        slot_E: Tensor,
        *,
        rule: RouterRule,
        bias_E: Tensor | None,
        table: PolicyTable,
    ) -> Routed:
        num_rows, num_experts = logits_TE.shape
        swap = not isinstance(policy, Exact)
        source = route_cuda.source(
            rule, num_experts, swap=swap, has_bias=bias_E is not None, bf16=logits_TE.dtype == torch.bfloat16,
            wide=route_cuda.is_wide(logits_TE, slot_E), text=self.text,
        )  # fmt: skip
        routed = empty_routed(num_rows, rule.top_k, logits_TE.device)
        numbers = (table.value_L, table.lo_L, table.hi_L) if swap else (None, None, None)
        tensors = (
            logits_TE, bias_E, slot_E, *numbers,
            routed.own_ids_TK, routed.ids_TK, routed.weights_TK, routed.counters_T5, routed.error_T,
        )  # fmt: skip
        for tensor in tensors[6:]:
            tensor.fill_(-77)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._library(source).emulate(num_rows, (ctypes.c_int64 * 12)(*addresses, 0))
        return routed


def scores_of(logits_TE: Tensor, rule: RouterRule, bias_E: Tensor | None) -> Tensor:
    """Selection scores with the emulated warp's own exponential."""
    x_TE = logits_TE.float()
    if rule.scoring == "sigmoid":
        exponent = (x_TE * -np.float32(1.4426950408889634)).numpy().astype(np.float64)
        x_TE = 1.0 / (1.0 + torch.from_numpy(np.exp2(exponent).astype(np.float32)))
        x_TE = x_TE if bias_E is None else x_TE + bias_E
    return clean(x_TE)


def hard_rows() -> Iterator[tuple[Tensor, Tensor, RouterRule]]:
    """(logits_TE, slot_E, rule) of rows for which keys of 32 bits do not do."""
    generator = torch.Generator().manual_seed(1)
    slot_E = torch.where(torch.rand(512, generator=generator) < 0.33, 3, -1).int()
    close_TE = 1.0 + torch.randint(0, 2**12, (8, 512), generator=generator) * 2.0**-23
    close_TE[:, 0], close_TE[:, 1::7] = 1e9, -1e9  # a wide span: scores that differ get one key
    yield close_TE, slot_E, RouterRule(top_k=10)
    pairs_TE = torch.zeros(1, 64)
    pairs_TE[0, :16] = 1.0 + torch.arange(16) * 2.0**-23  # two of them to a key, the greater one behind
    yield pairs_TE, slot_E[:64].contiguous(), RouterRule(top_k=10)
    end_TE = torch.cat([torch.full((1, 32), -1.0), torch.zeros(1, 32)], dim=1)
    end_TE[0, 40:45] = torch.tensor(
        [9.0, 8, 7, 6, 5]
    )  # the least of the lanes' greatest is 0: -1 gets its key
    yield end_TE, slot_E[:64].contiguous(), RouterRule(top_k=10)
    wide_TE = torch.full((1, 64), -1e38)
    wide_TE[0, :20] = torch.arange(20.0) * 1e37
    wide_TE[0, 20] = 3e38  # the span is no finite float32
    yield wide_TE, slot_E[:64].contiguous(), RouterRule(top_k=10)
    lane_TE = torch.randn(4, 512, generator=generator)
    lane_TE[:, 128:132] = torch.tensor([9.0, 8, 7, 6])  # in one lane
    yield lane_TE, slot_E, RouterRule(top_k=10)


def first_difference(route: Callable[..., Routed], device: str = "cpu", num_batches: int = 120) -> str | None:
    """Where `route(policy, logits_TE, slot_E, rule=, bias_E=, table=)` first departs from the reference, or None."""
    cases = []
    for logits_TE, slot_E, rule in hard_rows():
        table = PolicyTable.full(1, 1.0, 0, rule.top_k - 1, top_k=rule.top_k, device=torch.device("cpu"))
        cases.append(("hard", logits_TE, slot_E, rule, None, table))
    for number in range(num_batches):
        batch = make_batch(0, number, gpu=True)
        plain = batch.rule.scoring == "sigmoid" or batch.rule.renormalize
        if batch.free_TK is None and plain and batch.rule.num_groups == 1 and batch.rule.top_k < 32:
            table = batch.table(torch.device("cpu"))
            cases.append((f"batch {number}", batch.logits_TE, batch.slot_E, batch.rule, batch.bias_E, table))
    for name, logits_TE, slot_E, rule, bias_E, table in cases:
        scores_TE = scores_of(logits_TE, rule, bias_E)
        moved = PolicyTable.full(
            1, float(table.value_L[0]), int(table.lo_L[0]), int(table.hi_L[0]), top_k=rule.top_k,
            device=torch.device(device),
        )  # fmt: skip
        for policy in (MARGIN_SWAP, Exact()):
            found = route(
                policy, logits_TE.to(device), slot_E.to(device), rule=rule,
                bias_E=None if bias_E is None else bias_E.to(device), table=moved,
            )  # fmt: skip
            context = RouteContext(table=table)
            expected = policy.route_scores(scores_TE, logits_TE, slot_E, rule=rule, context=context)
            for what in ("own_ids_TK", "ids_TK", "counters_T5", "error_T"):
                if not torch.equal(getattr(found, what).cpu(), getattr(expected, what)):
                    return f"{name}: {type(policy).__name__}: {what}"
            if not torch.allclose(found.weights_TK.cpu(), expected.weights_TK, rtol=1e-5, atol=1e-7):
                return f"{name}: {type(policy).__name__}: weights"
    return None

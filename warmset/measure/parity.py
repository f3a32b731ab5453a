"""The parity harness: every form of the routing kernels against each other and against the reference.

From the same scores all forms give the same ids and counters as the reference on the CPU, and the same raw bits
of weights among themselves; weights agree with the reference to rounding. Without a GPU the kernels run under
Triton's interpreter, in a process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import warmset
from warmset.errors import WarmsetError
from warmset.measure.interpreter import quicken_interpreter
from warmset.measure.parity_cases import EXPERTS, MARGIN_SWAP, Batch, make_batch
from warmset.routing import Exact, RouteContext, Routed, WindowJoint, selection_scores

WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-7
"""Kernels and reference take exp and quotients from different libraries; 32 of them add up."""
SCORE_ATOL = 1e-6


@dataclass(kw_only=True)
class ParityReport:
    """What a run found. mismatches: rows that differ, by kind. first: the first failing case as a small input.

    cuda_rows: rows that the CUDA C++ form of `route_fused` routed as well: on a GPU, where cuda-core is installed.
    """

    device: str
    seed: int
    cases: int = 0
    rows: int = 0
    cuda_rows: int = 0
    swaps: int = 0
    error_rows: int = 0
    seconds: float = 0.0
    mismatches: dict[str, int] = field(default_factory=dict)
    first: str | None = None

    @property
    def ok(self) -> bool:
        return not self.mismatches

    @property
    def exit_status(self) -> int:
        return 0 if self.ok else 1

    def lines(self) -> list[str]:
        """For the terminal."""
        found = [
            f"{self.cases} cases, {self.rows} rows on {self.device} in {self.seconds:.1f} s: {self.swaps} swaps, "
            f"{self.error_rows} rows in error, {sum(self.mismatches.values())} mismatches"
        ]
        if self.cuda_rows:
            found.append(f"{self.cuda_rows} of the rows in CUDA C++ too")
        found += [f"  {kind}: {rows} rows" for kind, rows in sorted(self.mismatches.items())]
        if self.first is not None:
            found += ["first failing case:", self.first]
        return found


def run(cases: int = 400, seed: int = 0, device: str = "cpu") -> ParityReport:
    """Compares all forms on `cases` seeded random cases; on a CPU in a process of its own."""
    if cases < 1:
        raise WarmsetError(f"`cases` must be at least 1. Got {cases}.")
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise WarmsetError(f"`device` {device} is not there: torch sees no CUDA device.")
        return run_here(cases, seed, device)
    command = [sys.executable, "-m", "warmset.measure.parity", "--cases", str(cases), "--seed", str(seed)]
    root = str(Path(warmset.__file__).parent.parent)  # where the package was not installed, it is found there
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    # The child looks for its parent after each batch, so that one killed outright leaves nothing running.
    done = subprocess.run([*command, "--parent", str(os.getpid())], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the parity process failed:\n{done.stderr[-2000:]}")
    return ParityReport(**json.loads(done.stdout.splitlines()[-1]))


def run_here(
    cases: int,
    seed: int,
    device: str = "cpu",
    *,
    forms: Any = None,
    experts: tuple[int, ...] = EXPERTS,
    stop_at_first: bool = False,
    parent: int | None = None,
) -> ParityReport:
    """`run` in this process. forms: other launchers than the package's (`kernel_forms`), for tests of the harness."""
    forms = forms or kernel_forms()
    report = ParityReport(device=device, seed=seed)
    start, number = time.perf_counter(), 0
    while report.cases < cases:
        if parent is not None and os.getppid() != parent:
            raise SystemExit(1)
        batch = make_batch(seed, number, experts=experts, gpu=device != "cpu")
        number += 1
        found = check_batch(batch, forms, torch.device(device), report)
        report.cases += batch.num_cases
        report.rows += batch.logits_TE.shape[0]
        for kind, wrong_T in found.items():
            report.mismatches[kind] = report.mismatches.get(kind, 0) + int(wrong_T.sum())
        if found and report.first is None and not stop_at_first:
            report.first = _smallest(batch, found, forms, torch.device(device))
        if found and stop_at_first:
            break
    report.seconds = time.perf_counter() - start
    return report


def kernel_forms() -> SimpleNamespace:
    """The package's launchers. Imports Triton."""
    from functools import partial

    from warmset.kernels.route_fused import Handed, route_fused
    from warmset.kernels.swap_serial import swap_serial
    from warmset.kernels.swap_warp import swap_warp
    from warmset.kernels.window_joint import window_joint

    return SimpleNamespace(
        swap_serial=swap_serial,
        swap_warp=swap_warp,
        route_fused=partial(route_fused, form="triton"),
        route_cuda=partial(route_fused, form="cuda"),
        router=partial(route_fused, form="triton"),
        window_joint=window_joint,
        Handed=Handed,
    )


def check_batch(
    batch: Batch, forms: Any, device: torch.device, report: ParityReport | None = None
) -> dict[str, Tensor]:
    """Rows that differ, by kind: {kind: bool [T]}; empty where all agree."""
    wrong: dict[str, Tensor] = {}
    on_device = batch.to(device)
    if batch.free_TK is not None:
        _check_free(batch, on_device, forms, wrong, report)
    else:
        _check_routed(batch, on_device, forms, wrong, report)
    return {kind: rows_T for kind, rows_T in wrong.items() if bool(rows_T.any())}


def _check_free(batch: Batch, on_device: Batch, forms: Any, wrong: dict, report: ParityReport | None) -> None:
    """Ids of any origin: the two swap kernels and the reference."""
    from warmset.kernels import reference

    def run_form(swap: Any, at: Batch, device: torch.device) -> Routed:
        return swap(
            at.logits_TE,
            at.logits_TE,
            at.slot_E,
            at.free_TK,
            at.weights_TK,
            rule=at.rule,
            table=at.table(device),
        )

    expected = run_form(reference.swap_serial, batch, torch.device("cpu"))
    outcomes = {}
    for name in ("swap_serial", "swap_warp"):
        outcomes[name] = _to_cpu(run_form(getattr(forms, name), on_device, on_device.slot_E.device))
        _compare(name, outcomes[name], expected, wrong)
    _compare_bits("swap_warp", outcomes["swap_warp"], outcomes["swap_serial"], wrong)
    if report is not None:
        report.swaps += int(expected.counters_T5[:, 1].sum())


def _check_routed(
    batch: Batch, on_device: Batch, forms: Any, wrong: dict, report: ParityReport | None
) -> None:
    """Ids from the router: all three forms, the reference from the same scores, and the other fused policies."""
    from warmset.kernels.route_cuda import cuda_reason

    device = on_device.slot_E.device
    rule, bias_E = batch.rule, on_device.bias_E
    logits_TE, slot_E, table = on_device.logits_TE, on_device.slot_E, on_device.table(device)
    handed = forms.Handed()
    own = forms.router(Exact(), logits_TE, slot_E, rule=rule, bias_E=bias_E, handed=handed)
    scores_TE = handed.scores_TE.cpu()

    def expect(policy: Any, context: RouteContext) -> Routed:
        return policy.route_scores(scores_TE, batch.logits_TE, batch.slot_E, rule=rule, context=context)

    far_TE = (scores_TE - selection_scores(batch.logits_TE, rule, batch.bias_E)).abs() > SCORE_ATOL
    if rule.num_groups == 1:  # a rounding more or less can choose another group
        wrong["router scores"] = far_TE.any(dim=1)
    _compare("router", _to_cpu(own), expect(Exact(), RouteContext()), wrong)
    cpu = torch.device("cpu")
    expected = expect(MARGIN_SWAP, RouteContext(table=batch.table(cpu)))
    context = RouteContext(table=table)
    fused = _to_cpu(
        forms.route_fused(MARGIN_SWAP, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)
    )
    _compare("route_fused", fused, expected, wrong)
    if cuda_reason(MARGIN_SWAP, rule, logits_TE.shape[1], device) is None:
        for policy, wanted, bits in ((Exact(), own, own), (MARGIN_SWAP, expected, fused)):
            routed = forms.route_cuda(policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=context)
            name = f"route_cuda {type(policy).__name__}"
            _compare(name, _to_cpu(routed), _to_cpu(wanted), wrong)
            _compare_bits(name, _to_cpu(routed), _to_cpu(bits), wrong)
        if report is not None:
            report.cuda_rows += logits_TE.shape[0]
    for name in ("swap_serial", "swap_warp"):
        swapped = getattr(forms, name)(
            handed.scores_TE, logits_TE, slot_E, own.ids_TK, own.weights_TK, rule=rule, table=table,
            norm_T2=handed.norm_T2,
        )  # fmt: skip
        swapped = _to_cpu(swapped)
        _compare(name, swapped, expected, wrong, errors=False)
        _compare_bits(name, swapped, fused, wrong)
    if batch.policy is not None:
        route = forms.window_joint if isinstance(batch.policy, WindowJoint) else forms.route_fused
        routed = route(
            batch.policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, context=on_device.context(device)
        )
        name = type(batch.policy).__name__
        _compare(name, _to_cpu(routed), expect(batch.policy, batch.context(cpu)), wrong)
    if report is not None:
        report.swaps += int(expected.counters_T5[:, 1].sum())
        report.error_rows += int(expected.error_T.sum())


def _to_cpu(routed: Routed) -> Routed:
    return Routed(**{n: v.cpu() if isinstance(v, Tensor) else v for n, v in vars(routed).items()})


def _compare(name: str, found: Routed, expected: Routed, wrong: dict, errors: bool = True) -> None:
    """Ids, own ids, counters and errors exactly; weights to rounding."""
    for what in ("ids_TK", "own_ids_TK", "counters_T5"):
        wrong[f"{name} {what[:-3]}"] = (getattr(found, what) != getattr(expected, what)).any(dim=1)
    if errors:
        wrong[f"{name} error"] = found.error_T != expected.error_T
    close_TK = torch.isclose(found.weights_TK, expected.weights_TK, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL)
    wrong[f"{name} weights"] = ~close_TK.all(dim=1)


def _compare_bits(name: str, found: Routed, other: Routed, wrong: dict) -> None:
    """Raw bits of weights between two forms of one device."""
    bits_TK, other_TK = found.weights_TK.view(torch.int32), other.weights_TK.view(torch.int32)
    wrong[f"{name} weight bits"] = (bits_TK != other_TK).any(dim=1)


def _smallest(batch: Batch, found: dict[str, Tensor], forms: Any, device: torch.device) -> str:
    """The first failing row alone, if it fails alone, as text that can be pasted into a test."""
    kind, wrong_T = next(iter(found.items()))
    row = int(wrong_T.nonzero()[0])
    small = batch.row(row)
    if kind not in check_batch(small, forms, device):
        small = batch  # the rows of its window matter
    shown = {
        "kind": kind,
        "batch": batch.number,
        "row": row,
        "rule": vars(small.rule),
        "policy": repr(small.policy),
        "margin": small.margin,
        "ranks": (small.lo, small.hi),
        "logits": small.logits_TE.float().tolist(),
        "dtype": str(small.logits_TE.dtype),
        "resident": (small.slot_E >= 0).nonzero()[:, 0].tolist(),
        "bias": None if small.bias_E is None else small.bias_E.tolist(),
        "ids": None if small.free_TK is None else small.free_TK.tolist(),
    }
    return "\n".join(f"  {key} = {value}" for key, value in shown.items())


def main() -> None:
    """The process that `run` starts; prints one JSON line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parent", type=int, help="end when this process is gone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for rows of NaN and infinities
    quicken_interpreter()
    print(json.dumps(vars(run_here(given.cases, given.seed, parent=given.parent))))


if __name__ == "__main__":
    main()

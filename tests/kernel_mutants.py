"""One deliberate fault in a copy of each form of the kernels: the parity cases of `make test` must find it.

`python tests/kernel_mutants.py CASES` runs under Triton's interpreter, prints a line for each mutant that lived,
and exits 1 if one did.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

import warmset.kernels
from warmset.measure import parity
from warmset.measure.interpreter import quicken_interpreter

FILES = (
    "__init__",
    "common",
    "packed",
    "route_cuda",
    "route_fused",
    "swap_serial",
    "swap_warp",
    "window_joint",
)
FORMS = {"serial": "swap_serial", "warp": "swap_warp", "fused": "route_fused"}

NAN_ON_TOP = ("common", 'tl.maximum(x, float("-inf"))', "tl.where(x != x, FLOAT_MAX, x)")
MINUS_ZERO_BELOW = ("common", "0 - bits, bits ^ 0x80000000", "bits ^ 0xFFFFFFFF, bits ^ 0x80000000")
SERIAL_LOAD = "score = tl.load(score_ptr + f).to(tl.float32)"
WARP_BEST = "best, found = tl.max(key, 0, return_indices=True)"
WARP_LAST = "best = tl.max(key, 0); found = tl.max(tl.where(key == best, expert, -1), 0)"
OWN_IDS = "tl.load(ids_in_ptr + at, mask=lane < K, other=-1)"

MUTANTS = {
    "< for <=": {
        "serial": [("swap_serial", "- best <= margin", "- best < margin")],
        "warp": [("swap_warp", "gap <= margin", "gap < margin")],
        "fused": [("route_fused", "- found_score <= margin", "- found_score < margin")],
    },
    "tie to the larger index": {
        "serial": [("swap_serial", "score > best", "score >= best")],
        "warp": [("swap_warp", WARP_BEST, WARP_LAST)],
        "fused": [
            ("packed", "((1 << BITS) - 1 - expert).to(tl.uint32) * 2", "expert.to(tl.uint32) * 2"),
            ("packed", "return (1 << BITS) - 1 - ((key >> 1)", "return ((key >> 1)"),
        ],
    },
    "picked set not updated": {
        "serial": [("swap_serial", "(ids == f)", f"({OWN_IDS} == f)")],
        "warp": [("swap_warp", "key = tl.where(expert == found, 0, key)", "key = key")],
        "fused": [("route_fused", "found = after\n", "found = found\n")],
    },
    "hi off by one": {
        "serial": [("swap_serial", "tl.minimum(hi, K - 1) + 1", "tl.minimum(hi, K - 1)")],
        "warp": [("swap_warp", "(lane <= hi)", "(lane < hi)")],
        "fused": [("route_fused", "(lane <= hi)", "(lane < hi)")],
    },
    "weights always recomputed": {
        "serial": [("swap_serial", "if swaps != 0:", "if swaps >= 0:")],
        "warp": [("swap_warp", "if swaps != 0:", "if swaps >= 0:")],
    },
    "-0.0 below 0.0": {
        "serial": [
            ("swap_serial", SERIAL_LOAD,
             f"{SERIAL_LOAD}; score = tl.where(score.to(tl.int32, bitcast=True) == -(2**31), -1e-45, score)"),
        ],
        "warp": [MINUS_ZERO_BELOW],
        "fused": [MINUS_ZERO_BELOW],
    },
    "NaN on top": {
        "serial": [("swap_serial", SERIAL_LOAD, f"{SERIAL_LOAD}; score = tl.where(score != score, FLOAT_MAX, score)")],
        "warp": [NAN_ON_TOP],
        "fused": [NAN_ON_TOP],
    },
}  # fmt: skip


def make_mutant(folder: Path, name: str, edits: list[tuple[str, str, str]]) -> None:
    """A copy of the kernels as package `name`, with the edits made."""
    source = Path(warmset.kernels.__file__).parent
    (folder / name).mkdir()
    for file in FILES:
        shutil.copy(source / f"{file}.py", folder / name)
    for file, old, new in edits:
        path = folder / name / f"{file}.py"
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new))


def fingerprint(value: Any) -> str:
    """The same text for the same input."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha1(raw).hexdigest()}"
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return "".join(f"{key}={fingerprint(part)};" for key, part in sorted(value.items()))
    return "".join(map(fingerprint, value)) if isinstance(value, tuple) else repr(value)


def remembered(launch: Any) -> Any:
    """The launcher, which does not run again for the same input: mutants share the forms that are right."""
    known: dict[str, Any] = {}

    def again(*args: Any, handed: Any = None, **settings: Any) -> Any:
        key = fingerprint((args, settings))
        if key not in known:
            extra = {} if handed is None else {"handed": handed}
            known[key] = launch(*args, **settings, **extra), handed
        routed, filled = known[key]
        if handed is not None:
            vars(handed).update(vars(filled))
        return routed

    return again


def survivors(num_cases: int, folder: Path) -> list[str]:
    """Mutants that the cases do not find, and one line if the unchanged copy fails."""
    sys.path.insert(0, str(folder))
    alive = []
    todo = [("unchanged", "fused", [])]
    todo += [(fault, form, edits) for fault, forms in MUTANTS.items() for form, edits in forms.items()]
    right = {
        name: remembered(launch) for name, launch in vars(parity.kernel_forms()).items() if name != "Handed"
    }
    for number, (fault, form, edits) in enumerate(todo):
        name = f"mutant_{number}"
        make_mutant(folder, name, edits)
        forms = SimpleNamespace(Handed=parity.kernel_forms().Handed, **right)
        module = importlib.import_module(f"{name}.{FORMS[form]}")
        setattr(forms, FORMS[form], getattr(module, FORMS[form]))
        cases = 3 if fault == "unchanged" else num_cases
        report = parity.run_here(cases, 0, forms=forms, stop_at_first=True)
        if report.ok != (fault == "unchanged"):
            alive.append(f"{form}: {fault}")
        print(f"{form}: {fault}: {report.cases} cases, {list(report.mismatches)}", file=sys.stderr)
    return alive


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    quicken_interpreter()
    with tempfile.TemporaryDirectory() as temporary:
        found = survivors(int(sys.argv[1]), Path(temporary))
    print("\n".join(found))
    sys.exit(bool(found))

"""Arms of `bench window`: one leg of the window bench over a routing trace, checked before the first leg."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmset.config import EngineConfig
from warmset.errors import WarmsetError

from .ab_parse import given_options, one_of_rows

if TYPE_CHECKING:
    import torch

    from warmset.measure.whole_request import Request

ROWS = 4
REHEARSED = ("tiny", "tiny-exp")
SAME = {"shape": "--shape", "rows": "--rows", "trace_sha256": "--trace"}
"""What both arms of an experiment must have alike: else they would run other windows."""


def window_request(name: str, words: Sequence[str]) -> tuple[Request, torch.device]:
    """What an arm measures, and on what; WarmsetError on what no arm can be."""
    from warmset.measure.ab.windows import ALL_WINDOWS
    from warmset.measure.whole_request import Request
    from warmset.prepare import resolve_device

    params, _ = given_options(name, words)
    if params["trace"] is None:
        raise WarmsetError(f"--{name}: an arm of bench window needs --trace FILE, whose windows it runs.")
    try:
        request = Request(
            shape=params["shape"],
            rows=[one_of_rows("--rows", params["rows"], ROWS)],
            colds=[],
            trace=Path(params["trace"]),  # some typer versions leave it a str here
            slots=params["slots"],
            trace_windows=ALL_WINDOWS,
            margin=params["margin"],
            route_kernel=params["route_kernel"] or EngineConfig().route_kernel,
        )
        device = resolve_device(params["device"])
    except WarmsetError as error:
        raise WarmsetError(f"--{name}: {error}") from None
    rehearses = os.environ.get("TRITON_INTERPRET") == "1" and request.shape in REHEARSED
    if device.type == "cpu" and not rehearses:
        raise WarmsetError(
            f"--{name}: bench window needs a CUDA device: on a CPU it only rehearses, with TRITON_INTERPRET=1 and "
            "--shape tiny."
        )
    return request, device


def describe_windows(name: str, words: list[str]) -> dict[str, Any]:
    """The fields of an `Arm` of bench window; the trace is read, and must have such windows."""
    from warmset.measure.ab.plan import sha256_of
    from warmset.measure.whole_input import WHOLE_SHAPES, learned_counts, read_trace, tile_trace
    from warmset.routing import describe

    request, device = window_request(name, words)
    whole = WHOLE_SHAPES[request.shape]
    assert request.trace is not None and request.slots is not None
    try:
        trace, marks = read_trace(request.trace)
        counts_LE = learned_counts(trace)
        tiled = tile_trace(trace, whole.experts, request.rows[0], request.slots, 1, counts_LE, marks=marks)
    except WarmsetError as error:
        raise WarmsetError(f"--{name}: {error}") from None
    ((policy, form),) = request.legs().values()
    trace_sha256 = sha256_of(request.trace)
    dtype = str(whole.experts.dtype).removeprefix("torch.")
    work = ["bench window", request.shape, request.rows[0], trace_sha256, str(device), dtype]
    return {
        "words": words,
        "config": {
            "shape": request.shape,
            "rows": request.rows[0],
            "slots": len(tiled.resident),
            "resident_from": tiled.why,
            "trace": request.trace.name,
            "trace_sha256": trace_sha256,
            "policy": "off" if policy is None else describe(policy),
            "route_kernel": form,
            "past_tokens": whole.past_tokens,
            "device": str(device),
            "dtype": dtype,
        },
        "exact_work": work if policy is None else None,
        "files": {},
    }


def check_same_windows(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Refuse two arms, by their configurations, that would run different windows."""
    for key, flag in SAME.items():
        if a[key] != b[key]:
            raise WarmsetError(
                f"--a and --b must run the same windows: {flag} is {a[key]} in A and {b[key]} in B."
            )

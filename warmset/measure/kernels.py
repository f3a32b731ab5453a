"""Speed of the routing kernels: microseconds a layer as replays of one graph of many layers, beside the floor.

Parity is run first, on the same device; where it is red no speed is measured. Every layer has buffers of its
own, so a replay reads what the last one did not leave in a register or a cache line of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warmset.errors import WarmsetError
from warmset.kernels import dispatch
from warmset.measure import parity
from warmset.measure.kernels_input import Layers, made_layers, trace_layers
from warmset.measure.record import write_record
from warmset.measure.trace import Trace
from warmset.measure.whole_input import read_trace
from warmset.routing import Exact, MarginSwap, RouteContext, RouterRule

NUM_EXPERTS, TOP_K, RANKS = 512, 10, (6, 9)
MARGIN = 1.0
"""Wide, so that nearly every cold tail pick is swapped: the dear case. The record says how many were."""
ROWS = (1, 4, 8)
COLD = (0, 1, 2, 3, 4)
NUM_LAYERS = 192
FUSED = ("triton", "triton_exact", "cuda", "cuda_exact")
"""Both forms of `route_fused`, each with the swap and with the swap compiled out."""
SAMPLES, WARMUP = 15, 3


@dataclass(frozen=True)
class Timing:
    """Microseconds a layer: median, least and greatest of the samples."""

    us: float
    low: float
    high: float


def run_bench(
    device: str = "cuda", trace: Trace | str | Path | None = None, parity_cases: int = 20_000, seed: int = 0
) -> dict[str, Any]:
    """Parity, then speed: {"config": ..., "results": {flat keys: numbers}, "tests": "green" or "red"}.

    trace: a routing trace or its file; its windows of 8 rows are timed too. Raises WarmsetError without a GPU.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise WarmsetError(f"the kernel bench needs a CUDA device. Got {device}.")
    from warmset.kernels.route_fused import FORM

    report = parity.run(parity_cases, seed, device)
    results: dict[str, Any] = {
        "parity_cases": report.cases,
        "parity_rows": report.rows,
        "parity_cuda_rows": report.cuda_rows,
        "parity_swaps": report.swaps,
        "parity_mismatches": sum(report.mismatches.values()),
        "parity_sec": round(report.seconds, 1),
    }
    config = {
        "experts": NUM_EXPERTS, "top_k": TOP_K, "ranks": list(RANKS), "margin": MARGIN, "layers": NUM_LAYERS,
        "samples": SAMPLES, "seed": seed, "dtype": "float32", "resident": "1/3",
        "route_fused": FORM,
        "trace": None if trace is None else _loaded(trace).fingerprint,
    }  # fmt: skip
    if not report.ok:
        return {"config": config, "results": results, "tests": "red", "mismatches": report.lines()}
    with torch.inference_mode():
        results.update(_speeds(torch.device(device), seed))
        if trace is not None:
            results.update(_trace_speeds(_loaded(trace), torch.device(device)))
    return {"config": config, "results": results, "tests": "green"}


def _loaded(trace: Trace | str | Path) -> Trace:
    """A file's committed rows, one after the other: windows of any size are cut from them."""
    if isinstance(trace, Trace):
        return trace
    read, marks = read_trace(Path(trace))
    if marks is None:
        return read
    kept_N = torch.from_numpy(marks.committed_N.astype(bool))
    return replace(read, scores_NLE=read.scores_NLE[kept_N], kind_N=read.kind_N[kept_N])


def record_bench(path: str | Path, *, name: str = "routing-kernels", **options: Any) -> dict[str, Any]:
    """`run_bench`, written as a record; WarmsetError, and no record, where parity is red."""
    measured = run_bench(**options)
    if measured["tests"] == "red":
        raise WarmsetError("\n".join(["parity is red, so no speed was measured:", *measured["mismatches"]]))
    return write_record(
        path, name=name, config=measured["config"], results=measured["results"], tests=measured["tests"]
    )


def _speeds(device: torch.device, seed: int) -> dict[str, Any]:
    """All forms x rows x cold tail picks, and what follows from them."""
    rule = RouterRule(top_k=TOP_K)
    results: dict[str, Any] = {}
    warm_up(device)
    for num_rows in ROWS:
        for num_cold in COLD:
            made = made_layers(NUM_LAYERS, num_rows, rule, NUM_EXPERTS, RANKS, num_cold, seed)
            layers = made.to(device)
            case = f"t{num_rows}_cold{num_cold}"
            results.update(_time_forms(layers, rule, case, MARGIN))
            if num_rows == 8 and num_cold == 2:
                bf16 = made.to(device, torch.bfloat16)
                results.update(_time_forms(bf16, rule, f"bf16_{case}", MARGIN, forms=FUSED))
        others = {"empty": empty_work(num_rows, device), "torch": torch_work(layers, TOP_K)}
        for name, timing in measure(others, NUM_LAYERS).items():
            _keep(results, f"{name}_t{num_rows}", timing)
    results["empty_us"] = results["empty_t8_us"]
    for num_cold in COLD:
        case = f"t8_cold{num_cold}"
        results[f"swap_cost_{case}_us"] = round(results[f"fused_{case}_us"] - results[f"exact_{case}_us"], 3)
    results["torch_over_fused_t8_cold2"] = round(results["torch_t8_us"] / results["fused_t8_cold2_us"], 2)
    return results


def _trace_speeds(trace: Trace, device: torch.device) -> dict[str, Any]:
    """The same on recorded rows, with the shipped margin."""
    rule = RouterRule(top_k=trace.top_k, renormalize=trace.renormalize)
    layers = trace_layers(trace, NUM_LAYERS, 8).to(device)
    return _time_forms(layers, rule, "trace_t8", 0.25)


def _time_forms(
    layers: Layers,
    rule: RouterRule,
    case: str,
    margin: float,
    forms: tuple[str, ...] = (*FUSED, "warp", "serial"),
) -> dict[str, Any]:
    """Every form on one input, and the cold tail picks and swaps a row that really came up.

    "fused" and "exact" are those of the form that `route_fused` runs by itself.
    """
    from warmset.kernels.route_cuda import cuda_reason
    from warmset.kernels.route_fused import FORM

    results: dict[str, Any] = {}
    why_not = cuda_reason(MarginSwap(), rule, layers.logits_LTE.shape[2], layers.logits_LTE.device)
    can_cuda = why_not is None
    forms = tuple(form for form in forms if can_cuda or not form.startswith("cuda"))
    num_layers, num_rows = layers.logits_LTE.shape[:2]
    policy = MarginSwap(margin=margin, ranks=RANKS if rule.top_k == TOP_K else None)
    made = {form: form_work(form, layers, rule, policy) for form in forms}
    works = {form: work for form, (work, _) in made.items()}
    own = "cuda" if can_cuda and FORM == "cuda" else "triton"
    for form, timing in measure(works, num_layers).items():
        _keep(results, f"{form}_{case}", timing)
        if form.partition("_")[0] == own:
            _keep(results, f"{'exact' if form.endswith('exact') else 'fused'}_{case}", timing)
    counted = torch.stack([counters_T5.sum(dim=0) for counters_T5 in made[own][1]]).sum(dim=0)
    tail_cold, swaps, *_ = (counted.double() / (num_layers * num_rows)).tolist()
    results[f"tail_cold_a_row_{case}"] = round(tail_cold, 3)
    results[f"swaps_a_row_{case}"] = round(swaps, 3)
    return results


def form_work(
    form: str, layers: Layers, rule: RouterRule, policy: MarginSwap
) -> tuple[Callable[[], object], list[Tensor]]:
    """(what to capture, the counters it fills): one launch a layer.

    triton, cuda: everything in one launch; with _exact: the same kernel, the swap compiled out; warp, serial: the
    swap alone, after a router that ran before.
    """
    from warmset.kernels import route_fused

    device = layers.logits_LTE.device
    num_layers = layers.logits_LTE.shape[0]
    table = policy.table(rule, num_layers=num_layers, device=device)
    counters: list[Tensor] = []
    if form in FUSED:
        chosen: Any = Exact() if form.endswith("_exact") else policy
        written_in: Any = form.partition("_")[0]

        def routed() -> object:
            made = [
                route_fused.route_fused(
                    chosen,
                    logits_TE,
                    slot_E,
                    rule=rule,
                    context=RouteContext(layer=layer, table=table),
                    form=written_in,
                )
                for layer, (logits_TE, slot_E) in enumerate(
                    zip(layers.logits_LTE, layers.slot_LE, strict=True)
                )
            ]
            counters[:] = [one.counters_T5 for one in made]
            return made

        return routed, counters
    before = []
    for logits_TE, slot_E in zip(layers.logits_LTE, layers.slot_LE, strict=True):
        handed = route_fused.Handed()
        own = route_fused.route_fused(Exact(), logits_TE, slot_E, rule=rule, handed=handed)
        before.append((own, handed, logits_TE, slot_E))

    def swapped() -> object:
        made = [
            dispatch.swap_after(*one, rule=rule, table=table, layer=layer, form=form)
            for layer, one in enumerate(before)
        ]
        counters[:] = [one.counters_T5 for one in made]
        return made

    return swapped, counters


def empty_work(num_rows: int, device: torch.device) -> Callable[[], object]:
    """One empty launch a layer, of as many programs as rows."""
    from warmset.kernels.empty import empty

    x = torch.zeros(1, device=device)

    def work() -> object:
        for _ in range(NUM_LAYERS):
            empty(x, num_rows)
        return x

    return work


def torch_work(layers: Layers, top_k: int) -> Callable[[], object]:
    """What a model without kernels does: softmax, top-k, renormalise."""

    def work() -> object:
        kept = []
        for logits_TE in layers.logits_LTE:
            weights_TK, ids_TK = torch.softmax(logits_TE, dim=-1).topk(top_k, dim=-1)
            kept.append((weights_TK / weights_TK.sum(dim=-1, keepdim=True), ids_TK))
        return kept

    return work


def measure(works: dict[str, Callable[[], object]], num_layers: int) -> dict[str, Timing]:
    """Captures each work once and times replays of all in turn, each between two events."""
    graphs, kept, times = {}, {}, {name: [] for name in works}  # type: ignore[var-annotated]
    for name, work in works.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # compiles
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            kept[name] = work()
    for sample in range(WARMUP + SAMPLES):
        for name, graph in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()  # the events must have happened
            if sample >= WARMUP:
                times[name].append(1e3 * first.elapsed_time(last) / num_layers)
    return {name: Timing(us=statistics.median(us), low=min(us), high=max(us)) for name, us in times.items()}


def warm_up(device: torch.device, seconds: float = 0.3) -> None:
    """Brings the clocks up from idle."""
    x = torch.randn(2048, 2048, device=device)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()  # or the queue would outlast the clock


def _keep(results: dict[str, Any], key: str, timing: Timing) -> None:
    results[f"{key}_us"] = round(timing.us, 3)
    results[f"{key}_us_low"] = round(timing.low, 3)
    results[f"{key}_us_high"] = round(timing.high, 3)


def main() -> None:
    """Parity and speed on this machine's GPU; writes a record and prints both tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", required=True, help="where the record goes")
    parser.add_argument("--trace", help="a routing trace to time as well")
    parser.add_argument("--cases", type=int, default=20_000, help="parity cases")
    parser.add_argument(
        "--form", choices=("triton", "cuda"), help="what route_fused runs; default: the package's"
    )
    parser.add_argument(
        "--without-cuda", action="store_true", help="leave the form in CUDA C++ out, of parity too"
    )
    given = parser.parse_args()
    from warmset.kernels import route_cuda, route_fused

    if given.without_cuda:
        route_cuda.is_installed = lambda: False  # type: ignore[assignment]
    route_fused.FORM = given.form or route_fused.FORM
    from warmset.measure.kernels_table import markdown, table

    record = record_bench(given.record, trace=given.trace, parity_cases=given.cases)
    print("\n".join([*table(record["results"]), "", *markdown(record["results"])]))


if __name__ == "__main__":
    main()

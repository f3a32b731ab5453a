"""The record of the routing bench as tables: for a terminal, and for the docs."""

from __future__ import annotations

from typing import Any

from warmset.measure.kernels import COLD, NUM_EXPERTS, RANKS, ROWS, TOP_K

REFERENCE_US = {"serial": 57.0, "warp": 6.9}
"""The reference document's machine: 2.75 and 0.33 ms a window of 48 layers."""


def table(results: dict[str, Any]) -> list[str]:
    """The record's figures as lines for a terminal."""
    lines = [
        f"parity: {results['parity_cases']} cases, {results['parity_mismatches']} mismatches, "
        f"{results['parity_sec']} s; rows in CUDA C++ too: {results.get('parity_cuda_rows', 0)}",
    ]
    if "empty_us" not in results:
        return lines
    lines.append(f"us a layer, {NUM_EXPERTS} experts, top-{TOP_K}, ranks {RANKS[0]}-{RANKS[1]}, float32")
    head = ("rows", "cold", "swaps", "floor", "exact", "fused", "spread", "swap", "warp", "serial", "torch")
    lines.append("".join(f"{word:>9}" for word in head))
    for num_rows in ROWS:
        for num_cold in COLD:
            case = f"t{num_rows}_cold{num_cold}"
            fused, exact = results[f"fused_{case}_us"], results[f"exact_{case}_us"]
            spread = results[f"fused_{case}_us_high"] - results[f"fused_{case}_us_low"]
            figures = (
                results[f"tail_cold_a_row_{case}"], results[f"swaps_a_row_{case}"], results[f"empty_t{num_rows}_us"],
                exact, fused, spread, fused - exact, results[f"warp_{case}_us"], results[f"serial_{case}_us"],
                results[f"torch_t{num_rows}_us"],
            )  # fmt: skip
            lines.append(f"{num_rows:>9}" + "".join(f"{figure:>9.2f}" for figure in figures))
    for case in (*(f"t8_cold{num_cold}" for num_cold in COLD), "bf16_t8_cold2", "trace_t8"):
        for form in ("triton", "cuda"):
            if f"{form}_{case}_us" in results:
                lines.append(
                    f"{case}, route_fused in {form}: {results[f'{form}_{case}_us']:.2f}, the swap compiled out "
                    f"{results[f'{form}_exact_{case}_us']:.2f}"
                )
    for case in ("bf16_t8_cold2", "trace_t8"):
        if f"fused_{case}_us" in results:
            lines.append(
                f"{case}: exact {results[f'exact_{case}_us']:.2f}, fused {results[f'fused_{case}_us']:.2f}, "
                f"{results[f'tail_cold_a_row_{case}']:.2f} cold tail picks and "
                f"{results[f'swaps_a_row_{case}']:.2f} swaps a row"
            )
    return lines


def markdown(results: dict[str, Any]) -> list[str]:
    """The figures at 8 rows beside the reference document's, as a table for the docs."""
    lines = [
        "| cold tail picks a row | " + " | ".join(str(c) for c in COLD) + " |",
        "|---|" + "---|" * len(COLD),
    ]
    rows = (
        ("swaps a row", "swaps_a_row_{}", ""),
        ("`route_fused`, us", "fused_{}_us", ""),
        ("the same, swap compiled out", "exact_{}_us", ""),
        *(
            row
            for form, name in (("triton", "Triton"), ("cuda", "CUDA C++"))
            for row in (
                (f"in {name}, us", form + "_{}_us", ""),
                (f"in {name}, swap compiled out", form + "_exact_{}_us", ""),
            )
            if f"{form}_t8_cold0_us" in results
        ),
        ("`swap_warp`, us", "warp_{}_us", f" (reference document: {REFERENCE_US['warp']})"),
        ("`swap_serial`, us", "serial_{}_us", f" (reference document: {REFERENCE_US['serial']:.0f})"),
    )
    for label, key, note in rows:
        figures = [f"{results[key.format(f't8_cold{c}')]:.2f}" for c in COLD]
        lines.append(f"| {label}{note} | " + " | ".join(figures) + " |")
    lines.append("")
    lines.append(
        f"Floor, an empty kernel in the same graph: {results['empty_us']:.2f} us. torch's softmax, topk and "
        f"renormalise: {results['torch_t8_us']:.2f} us. Parity before it: {results['parity_cases']} cases, "
        f"{results['parity_mismatches']} mismatches."
    )
    return lines

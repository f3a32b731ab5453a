"""The routing bench without a GPU: its input is what it says, its tables hold its figures, it refuses a CPU."""

from __future__ import annotations

import pytest
import torch

from warmset.errors import WarmsetError
from warmset.measure import kernels
from warmset.measure.kernels_input import made_layers, trace_layers
from warmset.measure.kernels_table import markdown, table
from warmset.measure.trace import Trace
from warmset.routing import MarginSwap, RouterRule

RULE = RouterRule(top_k=10)
FIGURES = (
    ("exact", 2.25), ("fused", 2.5), ("warp", 3.5), ("serial", 99.5),
    ("triton", 2.5), ("triton_exact", 2.25), ("cuda", 2.4), ("cuda_exact", 2.15),
)  # fmt: skip


@pytest.mark.parametrize("num_cold", kernels.COLD)
@pytest.mark.parametrize("num_rows", kernels.ROWS)
def test_every_row_has_the_cold_tail_picks_asked_for(num_rows, num_cold):
    layers = made_layers(6, num_rows, RULE, 512, (6, 9), num_cold, seed=0)
    for logits_TE, slot_E in zip(layers.logits_LTE, layers.slot_LE, strict=True):
        routed = MarginSwap(margin=kernels.MARGIN, ranks=(6, 9)).route(logits_TE, slot_E, rule=RULE)
        assert routed.counters_T5[:, 0].tolist() == [num_cold] * num_rows
        assert abs(float((slot_E >= 0).float().mean()) - 1 / 3) < 0.1


def test_windows_of_a_trace():
    scores_NLE = torch.randn(40, 3, 64).half()
    scores_NLE[:, :, :16] += 4  # the experts that are picked
    trace = Trace(
        scores_NLE=scores_NLE, kind_N=torch.zeros(40, dtype=torch.uint8), kinds=("prose",), top_k=8,
        renormalize=True, model="tiny", fingerprint="f",
    )  # fmt: skip
    layers = trace_layers(trace, 5, 4)
    assert layers.logits_LTE.shape == (5, 4, 64) and layers.slot_LE.shape == (5, 64)
    assert ((layers.slot_LE >= 0).sum(dim=1) == 21).all()
    assert (layers.slot_LE[:, :16] >= 0).all()
    assert torch.equal(layers.logits_LTE[0], scores_NLE[20:24, 0].float())


def results() -> dict[str, float]:
    found: dict[str, float] = {
        "parity_cases": 20_000,
        "parity_mismatches": 0,
        "parity_sec": 50.0,
        "empty_us": 1.0,
    }
    for num_rows in kernels.ROWS:
        found[f"empty_t{num_rows}_us"], found[f"torch_t{num_rows}_us"] = 1.0, 18.0
        for num_cold in kernels.COLD:
            case = f"t{num_rows}_cold{num_cold}"
            found[f"tail_cold_a_row_{case}"] = found[f"swaps_a_row_{case}"] = num_cold
            for form, us in FIGURES:
                found |= {f"{form}_{case}_us{end}": us for end in ("", "_low", "_high")}
    return found


def test_tables():
    lines = table(results())
    sweep = 3 + len(kernels.ROWS) * len(kernels.COLD)
    assert len(lines) == sweep + 2 * len(kernels.COLD)
    assert lines[-1] == "t8_cold4, route_fused in cuda: 2.40, the swap compiled out 2.15"
    assert all(
        figure in lines[sweep - 1] for figure in ("1.00", "2.25", "2.50", "0.25", "3.50", "99.50", "18.00")
    )
    text = "\n".join(markdown(results()))
    assert "`swap_warp`, us (reference document: 6.9) | 3.50 |" in text
    assert "| in CUDA C++, swap compiled out | 2.15 |" in text
    assert "20000 cases, 0 mismatches" in text
    assert len(table({"parity_cases": 9, "parity_mismatches": 2, "parity_sec": 1.0})) == 1


def test_no_speed_without_parity(monkeypatch, tmp_path):
    red = kernels.parity.ParityReport(device="cuda", seed=0, cases=5, mismatches={"swap_warp ids": 1})
    monkeypatch.setattr(kernels.parity, "run", lambda *a, **k: red)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "_speeds", lambda *a: pytest.fail("timed on a red parity"))
    measured = kernels.run_bench(parity_cases=5)
    assert measured["tests"] == "red" and "fused_t8_cold2_us" not in measured["results"]
    with pytest.raises(WarmsetError, match="parity is red"):
        kernels.record_bench(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_a_cpu_is_refused():
    with pytest.raises(WarmsetError, match=r"the kernel bench needs a CUDA device\. Got cpu\."):
        kernels.run_bench(device="cpu")

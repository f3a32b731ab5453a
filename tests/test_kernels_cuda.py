"""`route_fused` in CUDA C++ without a GPU: in an emulated warp, its mutants, machine code."""

from __future__ import annotations

import pytest
import torch
from cuda_warp import MUTANTS, EmulatedWarp, first_difference, mutant
from test_kernels_routing import ARCHITECTURES

from warmset.kernels import route_cuda
from warmset.routing import AdditiveBias, Exact, MarginSwap, RouterRule

needs_gpp = pytest.mark.skipif(EmulatedWarp.compiler() is None, reason="g++ is not installed")
needs_nvrtc = pytest.mark.skipif(not route_cuda.is_installed(), reason="cuda-core or NVRTC is not installed")


@needs_gpp
def test_an_emulated_warp_equals_the_reference(tmp_path):
    assert first_difference(EmulatedWarp(tmp_path).route, num_batches=300) is None


@needs_gpp
def test_a_sigmoid_router_with_and_without_bias(tmp_path):
    from cuda_warp import scores_of

    from warmset.measure.parity_cases import make_batch
    from warmset.routing import RouteContext

    warp = EmulatedWarp(tmp_path)
    for bias_E in (None, torch.randn(128, generator=torch.Generator().manual_seed(0)) / 5):
        rule = RouterRule(top_k=6, scoring="sigmoid", scale=2.5, renormalize=bias_E is not None)
        batches = [make_batch(1, number, experts=(128,)) for number in range(40)]
        for batch in batches:
            table = batch.table(torch.device("cpu"))
            table.set_ranks((2, 5))
            logits_TE, slot_E = batch.logits_TE.float(), batch.slot_E
            found = warp.route(MarginSwap(), logits_TE, slot_E, rule=rule, bias_E=bias_E, table=table)
            expected = MarginSwap().route_scores(
                scores_of(logits_TE, rule, bias_E),
                logits_TE,
                slot_E,
                rule=rule,
                context=RouteContext(table=table),
            )
            assert torch.equal(found.ids_TK, expected.ids_TK)
            assert torch.equal(found.counters_T5, expected.counters_T5)
            torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7)


@needs_gpp
@pytest.mark.parametrize("fault", MUTANTS)
def test_the_cases_find_every_mutant(tmp_path, fault):
    assert first_difference(EmulatedWarp(tmp_path, mutant(fault)).route) is not None


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles(architecture):
    for rule, num_experts, wide in (
        (RouterRule(top_k=10), 512, True),
        (RouterRule(top_k=8, scoring="sigmoid", scale=2.5), 257, False),
    ):
        for swap in (True, False):
            text = route_cuda.source(rule, num_experts, swap=swap, has_bias=not wide, bf16=wide, wide=wide)
            assert route_cuda.compile_source(text, f"sm_{architecture}").code


def test_what_it_does_not_know(monkeypatch):
    monkeypatch.setattr(route_cuda, "is_installed", lambda: True)
    cuda = torch.device("cuda")
    rule = RouterRule(top_k=8)
    assert route_cuda.cuda_reason(MarginSwap(), rule, 512, cuda) is None
    assert route_cuda.cuda_reason(Exact(), rule, 512, cuda) is None
    assert route_cuda.cuda_reason(Exact(), rule, 512, torch.device("cpu")) == "device cpu"
    assert "AdditiveBias" in route_cuda.cuda_reason(AdditiveBias(beta=1.0), rule, 512, cuda)
    assert "31 picks" in route_cuda.cuda_reason(Exact(), RouterRule(top_k=32), 64, cuda)
    assert "512 experts" in route_cuda.cuda_reason(Exact(), rule, 513, cuda)
    assert "order of adding" in route_cuda.cuda_reason(
        Exact(), RouterRule(top_k=8, renormalize=False), 64, cuda
    )
    grouped = RouterRule(top_k=8, num_groups=8, top_groups=4)
    assert "groups" in route_cuda.cuda_reason(Exact(), grouped, 64, cuda)
    assert "scores" in route_cuda.cuda_reason(Exact(), rule, 64, cuda, with_scores=True)
    monkeypatch.setattr(route_cuda, "is_installed", lambda: False)
    assert "not installed" in route_cuda.cuda_reason(Exact(), rule, 64, cuda)

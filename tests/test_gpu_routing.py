"""The routing kernels on a GPU: parity, edge cases, captured graphs that follow changes, no wait for the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_warp
import pytest
import torch

from warmset.kernels import dispatch, route_cuda, route_fused
from warmset.measure import parity
from warmset.route_rows import route
from warmset.routing import CachePrior, Exact, MarginSwap, RouteContext, RouterRule, WindowJoint, own_pick

pytestmark = pytest.mark.gpu

RULE = RouterRule(top_k=10)
POLICIES = (MarginSwap(margin=0.5), CachePrior(strength=0.1), WindowJoint(margin=0.5))


@pytest.fixture(autouse=True)
def needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


def window(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_rows, 512, generator=generator)
    slot_E = torch.where(torch.rand(512, generator=generator) < 0.33, 3, -1).int()
    return logits_TE.cuda(), slot_E.cuda()


def test_parity():
    report = parity.run(cases=2000, seed=3, device="cuda")
    assert report.ok, "\n".join(report.lines())
    assert report.swaps > 1000 and report.error_rows > 0


def test_edge_cases():
    code = "import sys, kernel_edges; f = kernel_edges.run('cuda'); print('\\n'.join(f)); sys.exit(bool(f))"
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    done = subprocess.run(  # a process of its own: the cases poison what kernels write into
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


WRITTEN_IN = ("triton", "cuda")
"""Forms of `route_fused`."""


@pytest.fixture(params=WRITTEN_IN)
def written_in(request, monkeypatch):
    """`route_fused` runs this form."""
    if request.param == "cuda" and not route_cuda.is_installed():
        pytest.skip("cuda-core or NVRTC is not installed")
    monkeypatch.setattr(route_fused, "FORM", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_equal_the_reference(dtype, written_in):
    logits_TE, slot_E = window(4000)
    logits_TE = logits_TE.to(dtype)
    policy = MarginSwap(margin=0.5)
    routed = dispatch.route(policy, logits_TE, slot_E, rule=RULE)
    expected = policy.route(logits_TE.cpu(), slot_E.cpu(), rule=RULE)
    for name in ("ids_TK", "own_ids_TK", "counters_T5", "error_T"):
        assert torch.equal(getattr(routed, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(routed.weights_TK.cpu(), expected.weights_TK, rtol=1e-5, atol=1e-7)


def test_scores_that_32_bit_keys_cannot_tell_apart(written_in):
    """Rows that are routed again with 64-bit keys."""
    _, slot_E = window(64)
    close_TE = 1.0 + torch.randint(0, 2**12, (64, 512), generator=torch.Generator().manual_seed(1)) * 2.0**-23
    close_TE = close_TE.cuda()
    close_TE[:, 0] = 1e9  # a wide span, so that low bits are lost
    close_TE[:, 1::7] = -1e9
    routed = dispatch.route(MarginSwap(margin=1.0), close_TE, slot_E, rule=RULE)
    expected = MarginSwap(margin=1.0).route(close_TE.cpu(), slot_E.cpu(), rule=RULE)
    assert torch.equal(routed.ids_TK.cpu(), expected.ids_TK)
    assert torch.equal(routed.own_ids_TK.cpu(), own_pick(close_TE.cpu(), 10))


@pytest.mark.parametrize("form", dispatch.FORMS)
def test_a_graph_follows_margins_ranks_and_residency(form, written_in):
    logits_TE, slot_E = window(8)
    policy = MarginSwap(margin=0.5)
    table = policy.table(RULE, num_layers=3, device="cuda")
    context = RouteContext(layer=2, table=table)

    def work():
        return dispatch.route(policy, logits_TE, slot_E, rule=RULE, context=context, form=form)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = work()

    def check():
        graph.replay()
        numbers = MarginSwap(margin=float(table.margin_L[2]), ranks=(int(table.lo_L[2]), int(table.hi_L[2])))
        expected = numbers.route(logits_TE.cpu(), slot_E.cpu(), rule=RULE)
        assert torch.equal(routed.ids_TK.cpu(), expected.ids_TK)
        assert torch.equal(routed.counters_T5.cpu(), expected.counters_T5)
        return int(expected.counters[1])

    swaps = check()
    table.set_value(-10.0, layer=2)
    assert check() == 0
    table.set_value(0.5)
    table.set_ranks((8, 99))
    assert check() < swaps
    table.set_ranks((6, 9))
    slot_E.copy_(window(8, seed=5)[1])
    assert check() > 0
    logits_TE.copy_(window(8, seed=6)[0])
    check()


@pytest.mark.parametrize("policy", POLICIES)
def test_routing_does_not_wait_for_the_device(policy, written_in):
    logits_TE, slot_E = window(8)
    table = policy.table(RULE, num_layers=1, device="cuda")
    context = RouteContext(table=table, mean_range_L=torch.tensor([5.0], device="cuda"))
    dispatch.route(policy, logits_TE, slot_E, rule=RULE, context=context)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatch.route(policy, logits_TE, slot_E, rule=RULE, context=context)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_and_runs_do_not_change_bits(written_in):
    logits_TE, slot_E = window(8)
    policy = MarginSwap(margin=0.5)
    first = dispatch.route(policy, logits_TE, slot_E, rule=RULE)
    again = dispatch.route(policy, logits_TE, slot_E, rule=RULE)
    assert torch.equal(first.weights_TK, again.weights_TK)
    for row in range(8):
        alone = dispatch.route(policy, logits_TE[row : row + 1], slot_E, rule=RULE)
        assert torch.equal(alone.ids_TK[0], first.ids_TK[row])
        assert torch.equal(alone.weights_TK[0], first.weights_TK[row])


def test_a_view_that_cannot_be_read_four_at_a_time(written_in):
    logits_TE, slot_E = window(3)
    flat = torch.empty(1 + logits_TE.numel(), device="cuda")
    shifted_TE = flat[1:].view_as(logits_TE).copy_(logits_TE)
    policy = MarginSwap(margin=0.5)
    routed = dispatch.route(policy, shifted_TE, slot_E, rule=RULE)
    expected = dispatch.route(policy, logits_TE, slot_E, rule=RULE)
    assert torch.equal(routed.ids_TK, expected.ids_TK)
    assert torch.equal(routed.weights_TK, expected.weights_TK)


ROUTERS = {
    "softmax": (RULE, 512, torch.float32, False),
    "bf16": (RULE, 512, torch.bfloat16, False),
    "257 experts": (RouterRule(top_k=8), 257, torch.float32, False),
    "sigmoid and bias": (RouterRule(top_k=8, scoring="sigmoid", scale=2.5), 256, torch.float32, True),
    "sigmoid alone": (RouterRule(top_k=6, scoring="sigmoid", renormalize=False), 64, torch.float32, False),
    "31 picks": (RouterRule(top_k=31), 384, torch.float32, False),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", [MarginSwap(margin=0.5), MarginSwap(margin=0.1, ranks=(0, 31)), Exact()])
def test_both_forms_give_the_same_bits(router, policy):
    if not route_cuda.is_installed():
        pytest.skip("cuda-core or NVRTC is not installed")
    rule, num_experts, dtype, has_bias = ROUTERS[router]
    generator = torch.Generator().manual_seed(2)
    logits_TE = torch.randn(3000, num_experts, generator=generator).cuda().to(dtype)
    bias_E = torch.randn(num_experts, generator=generator).cuda() / 5 if has_bias else None
    for share in (0.33, 0.05, 0.0):
        slot_E = torch.where(torch.rand(num_experts, generator=generator) < share, 3, -1).int().cuda()
        assert route_cuda.cuda_reason(policy, rule, num_experts, logits_TE.device) is None
        by_triton, by_cuda = (
            route_fused.route_fused(policy, logits_TE, slot_E, rule=rule, bias_E=bias_E, form=form)
            for form in WRITTEN_IN
        )
        for name in ("ids_TK", "own_ids_TK", "counters_T5", "error_T"):
            assert torch.equal(getattr(by_triton, name), getattr(by_cuda, name)), name
        assert torch.equal(by_triton.weights_TK.view(torch.int32), by_cuda.weights_TK.view(torch.int32))


@pytest.mark.parametrize("fault", [None, *cuda_warp.MUTANTS])
def test_cases_find_every_mutant_of_the_cuda_form(fault):
    if not route_cuda.is_installed():
        pytest.skip("cuda-core or NVRTC is not installed")
    text = None if fault is None else cuda_warp.mutant(fault)

    def launch(policy, logits_TE, slot_E, *, rule, bias_E, table):
        table = table if isinstance(policy, MarginSwap) else None
        return route_cuda.launch_cuda(logits_TE, slot_E, rule, bias_E, table, 0, text=text)

    found = cuda_warp.first_difference(launch, device="cuda")
    assert found is None if fault is None else found is not None, found


def test_the_public_call():
    logits_TE, slot_E = window(5)
    for kernel in dispatch.FORMS:
        ids, weights, counters = route(
            logits_TE, slot_E, topk=10, policy=MarginSwap(margin=0.5), kernel=kernel
        )
        assert ids.is_cuda and weights.shape == (5, 10) and int(counters[1]) > 0
    with pytest.raises(ValueError, match="`slots` must be on cuda:0, like scores"):
        route(logits_TE, slot_E.cpu(), topk=10)

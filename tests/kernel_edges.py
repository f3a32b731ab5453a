"""Edge shapes and values for every form of the routing kernels, each with the reason why it is here.

`python tests/kernel_edges.py` runs them under Triton's interpreter; the GPU tests run the same list on a GPU.
Prints one line a failure and exits 1 if there is any.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from warmset.kernels import common, dispatch, reference, route_cuda, route_fused, swap_serial, swap_warp
from warmset.measure.interpreter import quicken_interpreter
from warmset.routing import (
    AdditiveBias,
    CachePrior,
    Exact,
    MarginSwap,
    PolicyTable,
    RouteContext,
    Routed,
    RouterRule,
    WindowJoint,
)

NAN, INF = float("nan"), float("inf")
COMPARED = ("ids_TK", "own_ids_TK", "counters_T5", "error_T")


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One window. ids: what MarginSwap must pick, where the case names it."""

    why: str
    logits: Any
    rule: RouterRule
    resident: Any = ()
    margin: float = 0.0
    ranks: tuple[int, int] = (0, 31)
    bias: Any = None
    dtype: torch.dtype = torch.float32
    ids: Any = None


def spread(num_experts: int, winners) -> list[float]:
    row = [0.0] * num_experts
    for n, e in enumerate(winners):
        row[e] = 20.0 - n / 2
    return row


def noise(num_rows: int, num_experts: int, seed: int = 0, step: float = 0.0) -> torch.Tensor:
    rows = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(seed))
    return (rows / step).round() * step if step else rows


K2, K4, K8 = (RouterRule(top_k=k) for k in (2, 4, 8))
DOWN = [[7.0, 6, 5, 4, 3, 2, 1, 0]]
CLOSE = [[1 + (e * 37 % 64) * 2.0**-23 for e in range(64)]]
WINNERS = [*range(300, 309), 511]

EDGES = [
    Edge(why="C01 NaN only, NaN inside, +inf, plain", rule=K2, ids=[[-1, -1], [7, 6], [2, 7], [1, 2]],
         logits=[[NAN] * 8, [0, 1, 2, NAN, 4, 5, 6, 7], [0, 1, INF, 3, 4, 5, 6, 7], [1, 3, 2, 0, 0, 0, 0, 0]]),
    Edge(why="C01 fewer than K above -inf beside exactly K", rule=K4, margin=9.0, resident=(4, 5),
         logits=[[1, 2, 3, -INF, NAN, -INF, -INF, NAN], [1, 2, 3, -INF, 4, -INF, NAN, NAN]],
         ids=[[-1] * 4, [4, 2, 1, 0]]),
    Edge(why="an expert at -inf is no substitute", logits=[[3, 2, -INF, 1, -INF]], rule=K2, resident=(2, 4),
         margin=1e30, ids=[[0, 1]]),
    Edge(why="C02 three equal", logits=[[1, 1, 1, 0]], rule=K2, ids=[[0, 1]]),
    Edge(why="C02 64 equal", logits=[[0.5] * 64], rule=K8, ids=[list(range(8))]),
    Edge(why="C02 -0.0 equals 0.0", logits=[[-0.0, 0.0, -0.0, -1, 0.0, -2]], rule=K2, ids=[[0, 1]]),
    Edge(why="C02 gap equal to the margin", logits=[[3.0, 2, 1.5, 0]], rule=K2, resident=(0, 2), margin=0.5,
         ids=[[0, 2]]),
    Edge(why="gap a rounding over the margin", logits=[[3.0, 2, 1.5, 0]], rule=K2, resident=(0, 2),
         margin=0.4999999, ids=[[0, 1]]),
    Edge(why="margin 0 moves nothing untied", logits=noise(4, 64), rule=K8, resident=range(0, 64, 2)),
    Edge(why="a negative margin is legal", logits=DOWN, rule=K4, resident=(4, 5), margin=-0.5, ids=[[0, 1, 2, 3]]),
    Edge(why="tied substitutes: the smaller index", logits=[[5, 4, 1, 1, 1, 1]], rule=K2, resident=(3, 4),
         margin=9.0, ids=[[3, 4]]),
    Edge(why="C03 bias in float32", logits=[[0.0, 0, 0, 0]], rule=RouterRule(top_k=2, scoring="sigmoid"),
         bias=[7.0, 7.01, 7.0049, 6.9951], ids=[[1, 2]]),
    Edge(why="C04 groups by the two best", logits=[[0.0, 0, 0, 0]], bias=[-1.0, -1.0, -2.1, -2.1], ids=[[0, 1]],
         rule=RouterRule(top_k=2, scoring="sigmoid", num_groups=2, top_groups=1, group_score="sum2")),
    Edge(why="C04 sum of two", logits=[[0.9, 0.1, 0.6, 0.6]], ids=[[2, 3]],
         rule=RouterRule(top_k=2, num_groups=2, top_groups=1, group_score="sum2")),
    Edge(why="C04 maximum", logits=[[0.9, 0.1, 0.6, 0.6]], ids=[[0, 1]],
         rule=RouterRule(top_k=2, num_groups=2, top_groups=1)),
    Edge(why="C04 equal groups: the smaller", logits=[[1, 0, 1, 0]], ids=[[0, 1]],
         rule=RouterRule(top_k=2, num_groups=2, top_groups=1)),
    Edge(why="C04 a substitute stays in its groups", logits=[[5.0, 4, 3, -9, 4.9, 4.8, 4.7, 4.6]], margin=100.0,
         rule=RouterRule(top_k=2, num_groups=2, top_groups=1), ranks=(1, 1), resident=(0, 3, 4, 5, 6, 7),
         ids=[[0, 3]]),
    Edge(why="groups that do not divide the block: 160 experts", logits=noise(3, 160), margin=0.5,
         resident=range(0, 160, 3),
         rule=RouterRule(top_k=6, renormalize=False, num_groups=8, top_groups=3, scale=16.0)),
    Edge(why="C05 softmax over all", logits=[[2.0, 1, 0, -1]],
         rule=RouterRule(top_k=2, renormalize=False, scale=2.5), ids=[[0, 1]]),
    Edge(why="C05 sigmoid", logits=[[2.0, 1, 0, -1]], rule=RouterRule(top_k=2, scoring="sigmoid"), ids=[[0, 1]]),
    Edge(why="C05 sigmoid and bias", logits=[[2.0, 1, 0, -1]], rule=RouterRule(top_k=2, scoring="sigmoid"),
         bias=[0.0, 0, 0.4, 0], ids=[[2, 0]]),
    Edge(why="C06 512 experts, winners past 256", logits=[spread(512, WINNERS)], rule=RouterRule(top_k=10),
         ids=[WINNERS]),
    Edge(why="C06 257 experts: one in the last block", logits=noise(2, 257, 3), rule=K8, margin=0.5,
         resident=range(100, 257)),
    Edge(why="C06 384 experts", logits=[spread(384, [383, *range(290, 297)])], rule=K8, margin=9.0,
         resident=(0, 383)),
    Edge(why="C07 K = E", logits=[[3, 1, 2, 0, 5, 4, 7]], rule=RouterRule(top_k=7), margin=9.0, resident=(1, 2)),
    Edge(why="C07 K = E = 32, as many as lanes", logits=noise(1, 32), rule=RouterRule(top_k=32), margin=1.0,
         resident=range(5)),
    Edge(why="C08 margin too small", logits=DOWN, rule=K4, resident=(5, 6, 7), margin=1.0, ranks=(3, 3),
         ids=[[0, 1, 2, 3]]),
    Edge(why="C08 one swap", logits=DOWN, rule=K4, resident=(5, 6, 7), margin=2.5, ranks=(3, 3), ids=[[0, 1, 2, 5]]),
    Edge(why="C08 one resident for two ranks", logits=DOWN, rule=K4, resident=(5,), margin=9.0, ranks=(2, 3),
         ids=[[0, 1, 5, 3]]),
    Edge(why="C49 one expert", logits=[[2.0]], rule=RouterRule(top_k=1), margin=1.0, ids=[[0]]),
    Edge(why="C49 7 experts", logits=noise(3, 7), rule=K4, margin=1.0, resident=(0, 3, 5)),
    Edge(why="C49 no row", logits=torch.empty(0, 16), rule=K4, margin=1.0, resident=(1,)),
    Edge(why="all resident", logits=noise(2, 16), rule=K4, margin=9.0, resident=range(16)),
    Edge(why="none resident", logits=noise(2, 16), rule=K4, margin=9.0),
    Edge(why="lo past hi: no rank", logits=noise(2, 16), rule=K4, margin=9.0, resident=range(8), ranks=(3, 1)),
    Edge(why="all ranks cold, all swap: more rounds than the tail", logits=noise(1, 64), rule=K8, margin=9.0,
         resident=range(32, 64)),
    Edge(why="scores that differ in their last bits only", logits=CLOSE, rule=K8, margin=1.0,
         resident=range(0, 64, 5)),
    Edge(why="a huge span: high bits decide", logits=[[3e38, -3e38, 1e-38, 2e-38, -1e-38, 0, 1, 1.0000001]], rule=K4,
         margin=1e38, resident=(2, 3, 4)),
    Edge(why="denormals", logits=[[1e-45, 3e-45, -1e-45, 2.8e-45, 0.0, -0.0, 4.2e-45, 1e-45]], rule=K4,
         margin=1e-44, resident=(0, 7)),
    Edge(why="bf16, untied", logits=noise(3, 64, 5), rule=K8, margin=0.25, resident=range(0, 64, 2),
         dtype=torch.bfloat16),
    Edge(why="bf16, tied everywhere", logits=noise(3, 128, 6, step=0.5), rule=K8, margin=0.0,
         resident=range(0, 128, 2), dtype=torch.bfloat16),
    Edge(why="ties and swaps together", logits=noise(3, 64, 7, step=0.5), rule=K8, margin=0.5,
         resident=range(0, 64, 2)),
]  # fmt: skip


def poison() -> None:
    """Fills what kernels write with values that no right answer has."""
    plain = common.empty_routed

    def poisoned(num_rows: int, top_k: int, device: torch.device) -> Routed:
        routed = plain(num_rows, top_k, device)
        routed.weights_TK.fill_(NAN)
        for values in (routed.ids_TK, routed.own_ids_TK, routed.counters_T5, routed.error_T):
            values.fill_(-77)
        return routed

    common.empty_routed = route_fused.empty_routed = route_cuda.empty_routed = poisoned


def shape_of(edge: Edge) -> tuple[Any, ...]:
    """What is compiled for an edge."""
    return torch.as_tensor(edge.logits).shape[1], edge.rule, edge.dtype, edge.bias is None


def quick_edges() -> list[Edge]:
    """Edges whose shape serves at least three of them: on a GPU every shape is compiled for every form."""
    shapes = [shape_of(edge) for edge in EDGES]
    return [edge for edge in EDGES if shapes.count(shape_of(edge)) >= 3]


def check_edge(edge: Edge, device: str) -> None:
    """All forms and the other fused policies against the reference."""
    logits_TE = torch.as_tensor(edge.logits, dtype=torch.float32).to(edge.dtype)
    slot_E = torch.full((logits_TE.shape[1],), -1, dtype=torch.int32)
    slot_E[list(edge.resident)] = 7
    bias_E = None if edge.bias is None else torch.tensor(edge.bias)
    policy = MarginSwap(margin=edge.margin, ranks=edge.ranks)

    def by_kernel(policy: Any, form: str, context: RouteContext) -> Routed:
        moved = None if bias_E is None else bias_E.to(device)
        routed = dispatch.route_by_kernel(
            policy, logits_TE.to(device), slot_E.to(device), rule=edge.rule, bias_E=moved, context=context, form=form
        )  # fmt: skip
        return replace(routed, **{n: getattr(routed, n).cpu() for n in (*COMPARED, "weights_TK")})

    expected = policy.route(logits_TE, slot_E, rule=edge.rule, bias_E=bias_E)
    if edge.ids is not None:
        assert expected.ids_TK.tolist() == edge.ids, f"reference: {expected.ids_TK.tolist()}"
    bits = None
    for form in dispatch.FORMS:
        routed = by_kernel(policy, form, RouteContext())
        same(form, routed, expected)
        bits = routed.weights_TK.view(torch.int32) if bits is None else bits
        assert torch.equal(bits, routed.weights_TK.view(torch.int32)), f"{form}: weight bits"
    if device != "cpu" and logits_TE.shape[1] != 64:  # compiled for one shape there
        return
    means = torch.tensor([4.0])
    others = [Exact(), AdditiveBias(beta=edge.margin, protect=1), CachePrior(strength=0.1, protect=0)]
    for other in [*others, WindowJoint(margin=edge.margin, ranks=edge.ranks)]:
        context = RouteContext(mean_range_L=means)
        expected = other.route(logits_TE, slot_E, rule=edge.rule, bias_E=bias_E, context=context)
        routed = by_kernel(other, "fused", RouteContext(mean_range_L=means.to(device)))
        same(type(other).__name__, routed, expected)


def check_cuda(edge: Edge, device: str) -> None:
    """`route_fused` in CUDA C++, where it knows the router, against the reference."""
    logits_TE = torch.as_tensor(edge.logits, dtype=torch.float32).to(edge.dtype)
    slot_E = torch.full((logits_TE.shape[1],), -1, dtype=torch.int32)
    slot_E[list(edge.resident)] = 7
    bias_E = None if edge.bias is None else torch.tensor(edge.bias)
    for policy in (MarginSwap(margin=edge.margin, ranks=edge.ranks), Exact()):
        if route_cuda.cuda_reason(policy, edge.rule, logits_TE.shape[1], torch.device(device)) is not None:
            continue
        routed = route_fused.route_fused(
            policy, logits_TE.to(device), slot_E.to(device), rule=edge.rule,
            bias_E=None if bias_E is None else bias_E.to(device), form="cuda",
        )  # fmt: skip
        routed = replace(routed, **{n: getattr(routed, n).cpu() for n in (*COMPARED, "weights_TK")})
        same(
            f"CUDA C++ {type(policy).__name__}",
            routed,
            policy.route(logits_TE, slot_E, rule=edge.rule, bias_E=bias_E),
        )


def same(name: str, routed: Routed, expected: Routed) -> None:
    for what in COMPARED:
        found, wanted = getattr(routed, what), getattr(expected, what)
        assert torch.equal(found, wanted), f"{name}: {what} {found.tolist()}, not {wanted.tolist()}"
    torch.testing.assert_close(
        routed.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7, msg=f"{name}: weights"
    )


def check_padding(device: str) -> None:
    """C07: ids -1 and E, and repeats: passed over, weight 0, counted nowhere."""
    logits_TE = torch.tensor(DOWN)
    slot_E = torch.tensor([-1, -1, -1, -1, -1, 0, 1, -1], dtype=torch.int32)
    ids_TK = torch.tensor([[-1, 3, 8, 3]], dtype=torch.int32)
    weights_TK = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    for name, swap in (("serial", swap_serial.swap_serial), ("warp", swap_warp.swap_warp)):
        for margin, ids in ((9.0, [[-1, 5, 8, 6]]), (1.0, [[-1, 3, 8, 3]])):
            table = PolicyTable.full(1, margin, 0, 3, top_k=4, device=device)
            arguments = [x.to(device) for x in (logits_TE, logits_TE, slot_E, ids_TK, weights_TK)]
            routed = swap(*arguments, rule=K4, table=table)
            assert routed.ids_TK.tolist() == ids, f"{name}: {routed.ids_TK.tolist()}"
            swaps = 2 if margin == 9.0 else 0
            assert routed.counters_T5.tolist() == [[2, swaps, 2, 2 - swaps, 0]], f"{name}: counters"
            kept = routed.weights_TK.cpu()
            assert kept[0, 0] == kept[0, 2] == 0, f"{name}: padding has weight"
            wanted = reference.swap_warp(
                logits_TE,
                logits_TE,
                slot_E,
                ids_TK,
                weights_TK,
                rule=K4,
                table=PolicyTable.full(1, margin, 0, 3, top_k=4),
            )
            torch.testing.assert_close(kept, wanted.weights_TK)


def check_alone(device: str) -> None:
    """C01: a row's bits do not depend on the rows beside it."""
    logits_TE = torch.cat([torch.full((1, 64), NAN), noise(4, 64)]).to(device)
    slot_E = torch.where(torch.arange(64) % 3 == 0, 1, -1).int().to(device)
    for form in dispatch.FORMS:
        policy = MarginSwap(margin=0.5)
        together = dispatch.route_by_kernel(policy, logits_TE, slot_E, rule=K8, form=form)
        alone = dispatch.route_by_kernel(policy, logits_TE[3:4], slot_E, rule=K8, form=form)
        assert torch.equal(together.ids_TK[3], alone.ids_TK[0]), form
        assert torch.equal(together.weights_TK[3], alone.weights_TK[0]), form


def run(device: str) -> list[str]:
    """Every failure as a line."""
    poison()
    failures = []
    edges = EDGES if device == "cpu" else quick_edges()
    checks = [(edge.why, lambda edge=edge: check_edge(edge, device)) for edge in edges]
    if device != "cpu":  # every shape: this form compiles fast
        checks += [(edge.why, lambda edge=edge: check_cuda(edge, device)) for edge in EDGES]
    checks += [
        (str(check.__doc__), lambda check=check: check(device)) for check in (check_padding, check_alone)
    ]
    for why, check in checks:
        try:
            check()
        except AssertionError as error:
            failures.append(f"{why}: {error}")
    return failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for rows of NaN and infinities
    quicken_interpreter()
    found = run("cpu")
    print("\n".join(found))
    sys.exit(bool(found))

"""Scores, ties, weights and the router's own pick: CASES C01 to C08 on the plain form, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from warmset.errors import PolicyError, RowError
from warmset.routing import (
    Exact,
    MarginSwap,
    RangeMeans,
    RouterRule,
    as_dict,
    auto_margin,
    own_pick,
    raise_for_errors,
    selection_scores,
    weights_of,
)

NAN, INF = math.nan, math.inf


def slots(num_experts: int, resident=()) -> torch.Tensor:
    return torch.tensor([e if e in resident else -1 for e in range(num_experts)], dtype=torch.int32)


def exact(rows, rule, bias=None):
    logits_TE = torch.tensor(rows, dtype=torch.float32)
    bias_E = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    return Exact().route(logits_TE, slots(logits_TE.shape[1]), rule=rule, bias_E=bias_E)


def test_c01_nan_and_infinities():
    rows = [
        [NAN] * 8,
        [0, 1, 2, NAN, 4, 5, 6, 7],
        [0, 1, INF, 3, 4, 5, 6, 7],
        [1, 3, 2, 0, 0, 0, 0, 0],
    ]
    routed = exact(rows, RouterRule(top_k=2))
    assert routed.error_T.tolist() == [1, 0, 0, 0]
    assert routed.ids_TK.tolist() == [[-1, -1], [7, 6], [2, 7], [1, 2]]
    torch.testing.assert_close(routed.weights_TK[1], torch.tensor([0.7311, 0.2689]), atol=1e-4, rtol=0)
    assert torch.isfinite(routed.weights_TK).all()
    assert routed.weights_TK[0].tolist() == [0, 0]
    alone = exact(rows[3:], RouterRule(top_k=2))
    assert torch.equal(alone.weights_TK[0], routed.weights_TK[3])
    with pytest.raises(RowError, match=r"Layer 5, row 0"):
        raise_for_errors(routed.error_T, first_layer=5)
    raise_for_errors(routed.error_T[1:])


def test_c02_ties_go_to_the_smaller_index():
    assert exact([[1, 1, 1, 0]], RouterRule(top_k=2)).ids_TK.tolist() == [[0, 1]]
    assert exact([[0.5] * 64], RouterRule(top_k=8)).ids_TK.tolist() == [list(range(8))]
    assert exact([[-0.0, 0.0, -0.0, 1]], RouterRule(top_k=3)).ids_TK.tolist() == [[3, 0, 1]]


@pytest.mark.parametrize("resident", [(), range(8), (1, 5, 6, 7)])
def test_c02_margin_0_is_plain_top_k_for_any_residency(resident):
    logits_TE = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1, 0], [0, 0.5, 0.25, 4, -3, 2, -1, 9]])
    rule = RouterRule(top_k=4)
    routed = MarginSwap(margin=0.0, ranks=(0, 3)).route(logits_TE, slots(8, resident), rule=rule)
    plain = Exact().route(logits_TE, slots(8), rule=rule)
    assert torch.equal(routed.ids_TK, plain.ids_TK)
    assert torch.equal(routed.weights_TK, plain.weights_TK)


def test_c02_bf16_swaps_at_margin_0_have_a_gap_of_0():
    logits_TE = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    slot_E = slots(128, range(0, 128, 2))
    routed = MarginSwap(margin=0.0, ranks=(0, 7)).route(logits_TE, slot_E, rule=RouterRule(top_k=8))
    scores = logits_TE.float()
    before = scores.gather(1, routed.own_ids_TK.long())
    after = scores.gather(1, routed.ids_TK.long())
    assert int(routed.counters[1]) > 0
    assert torch.equal(before, after)


def test_c02_a_gap_equal_to_the_margin_swaps():
    logits_TE = torch.tensor([[3.0, 2, 1.5, 0]])
    rule = RouterRule(top_k=2)
    just = MarginSwap(margin=0.5, ranks=(1, 1)).route(logits_TE, slots(4, (0, 2)), rule=rule)
    under = MarginSwap(margin=0.4999999, ranks=(1, 1)).route(logits_TE, slots(4, (0, 2)), rule=rule)
    assert just.ids_TK.tolist() == [[0, 2]]
    assert under.ids_TK.tolist() == [[0, 1]]


def test_c03_the_correction_bias_stays_float32_and_out_of_the_weights():
    rule = RouterRule(top_k=2, scoring="sigmoid")
    routed = exact([[0, 0, 0, 0]], rule, bias=[7.0, 7.01, 7.0049, 6.9951])
    assert set(routed.ids_TK[0].tolist()) == {1, 2}
    assert routed.weights_TK.tolist() == [[0.5, 0.5]]


def test_c04_groups():
    rule = RouterRule(top_k=2, scoring="sigmoid", num_groups=2, top_groups=1, group_score="sum2")
    routed = exact([[0, 0, 0, 0]], rule, bias=[-1.0, -1.0, -2.1, -2.1])
    assert routed.ids_TK.tolist() == [[0, 1]]
    scores = [[0.9, 0.1, 0.6, 0.6]]
    for score, kept in (("sum2", [2, 3]), ("max", [0, 1])):
        rule = RouterRule(top_k=2, num_groups=2, top_groups=1, group_score=score)
        assert exact(scores, rule).ids_TK.tolist() == [kept]
    equal = RouterRule(top_k=2, num_groups=2, top_groups=1)
    assert exact([[1, 0, 1, 0]], equal).ids_TK.tolist() == [[0, 1]]


def test_c04_a_substitute_stays_inside_the_kept_groups():
    rule = RouterRule(top_k=2, num_groups=2, top_groups=1)
    logits_TE = torch.tensor([[5.0, 4, 3, -9, 4.9, 4.8, 4.7, 4.6]])
    routed = MarginSwap(margin=100.0, ranks=(1, 1)).route(logits_TE, slots(8, (0, 3, 4, 5, 6, 7)), rule=rule)
    assert routed.ids_TK.tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (RouterRule(top_k=2, renormalize=False), [0.6439, 0.2369]),
        (RouterRule(top_k=2, renormalize=False, scale=2.5), [1.6098, 0.5922]),
        (RouterRule(top_k=2), [0.7311, 0.2689]),
        (RouterRule(top_k=2, scoring="sigmoid"), [0.5464, 0.4536]),
    ],
)
def test_c05_weights(rule, expected):
    routed = exact([[2, 1, 0, -1]], rule)
    torch.testing.assert_close(routed.weights_TK[0], torch.tensor(expected), atol=1e-4, rtol=0)


def test_c05_a_bias_changes_the_picks():
    assert exact(
        [[2, 1, 0, -1]], RouterRule(top_k=2, scoring="sigmoid"), bias=[0, 0, 0.4, 0]
    ).ids_TK.tolist() == [[2, 0]]


@pytest.mark.parametrize("num_experts", [257, 384, 512])
def test_c06_more_than_256_experts(num_experts):
    last = num_experts - 1
    first = last - 212 if num_experts > 257 else 240
    logits = [0.0] * num_experts
    for n, e in enumerate([*range(first, first + 9), last]):
        logits[e] = 10.0 - n / 4
    routed = exact([logits], RouterRule(top_k=10))
    assert routed.ids_TK.tolist() == [[*range(first, first + 9), last]]
    assert routed.ids_TK.dtype == torch.int32


def test_c07_k_against_e():
    assert sorted(exact([[3, 1, 2]], RouterRule(top_k=3)).ids_TK[0].tolist()) == [0, 1, 2]
    with pytest.raises(PolicyError, match=r"`top_k` must be at most the 3 experts\. Got 4"):
        RouterRule(top_k=4).check(3)
    weights_TK = weights_of(torch.tensor([[1, -1, 4]]), torch.tensor([[1.0, 2, 3, 4]]), RouterRule(top_k=3))
    assert weights_TK.tolist() == [[1, 0, 0]]


def test_c08_swap_edges():
    logits_TE = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1, 0]])
    rule = RouterRule(top_k=4)

    def swap(margin, ranks, resident):
        return MarginSwap(margin=margin, ranks=ranks).route(logits_TE, slots(8, resident), rule=rule)

    assert swap(1.0, (3, 3), (5, 6, 7)).ids_TK.tolist() == [[0, 1, 2, 3]]
    routed = swap(2.5, (3, 3), (5, 6, 7))
    assert routed.ids_TK.tolist() == [[0, 1, 2, 5]]
    expected = torch.tensor([0.6623, 0.2436, 0.0896, 0.0045])
    torch.testing.assert_close(routed.weights_TK[0], expected, atol=1e-4, rtol=0)
    assert as_dict(routed.counters) == {
        "tail_cold": 1, "swaps": 1, "cold_before": 4, "cold_after": 3, "dropped": 0,
    }  # fmt: skip
    assert swap(9.0, (2, 3), (5,)).ids_TK.tolist() == [[0, 1, 5, 3]]


def test_everything_resident_or_nothing_swaps_nothing():
    logits_TE = torch.randn(5, 16)
    for resident in ((), range(16)):
        routed = MarginSwap(margin=9.0, ranks=(0, 3)).route(
            logits_TE, slots(16, resident), rule=RouterRule(top_k=4)
        )
        assert int(routed.counters[1]) == 0


def test_own_pick_matches_topk_where_nothing_ties():
    scores_TE = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(own_pick(scores_TE, 9).long(), scores_TE.topk(9).indices)


def test_rows_do_not_depend_on_each_other():
    logits_TE = torch.randn(8, 64)
    rule = RouterRule(top_k=6, renormalize=False)
    slot_E = slots(64, range(0, 64, 3))
    together = MarginSwap(margin=0.5).route(logits_TE, slot_E, rule=rule)
    for t in range(8):
        alone = MarginSwap(margin=0.5).route(logits_TE[t : t + 1], slot_E, rule=rule)
        assert torch.equal(alone.ids_TK[0], together.ids_TK[t])
        assert torch.equal(alone.weights_TK[0], together.weights_TK[t])


def test_no_rows():
    routed = MarginSwap().route(torch.empty(0, 16), slots(16, (1,)), rule=RouterRule(top_k=4))
    assert routed.ids_TK.shape == (0, 4)
    assert routed.counters.tolist() == [0] * 5


def test_a_bias_without_sigmoid_is_refused():
    with pytest.raises(PolicyError, match="sigmoid"):
        selection_scores(torch.zeros(1, 4), RouterRule(top_k=1), torch.zeros(4))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"top_k": 0}, "`top_k` must be a whole number of at least 1. Got 0."),
        ({"top_k": 2.0}, "`top_k` must be a whole number"),
        ({"top_k": 2, "scoring": "relu"}, "`scoring` must be 'softmax' or 'sigmoid'. Got 'relu'."),
        ({"top_k": 2, "scale": NAN}, "`scale` must be a finite number. Got nan."),
        ({"top_k": 2, "num_groups": 0}, "`num_groups` must be a whole number"),
        (
            {"top_k": 2, "num_groups": 4, "top_groups": 5},
            r"`top_groups` must be 1 to `num_groups` \(4\). Got 5.",
        ),
        ({"top_k": 2, "group_score": "mean"}, "`group_score` must be 'max' or 'sum2'. Got 'mean'."),
    ],
)
def test_a_rule_that_cannot_be_is_refused(values, sentence):
    with pytest.raises(PolicyError, match=sentence):
        RouterRule(**values)


def test_a_rule_that_does_not_fit_the_experts_is_refused():
    with pytest.raises(PolicyError, match="must divide the 10 experts"):
        RouterRule(top_k=1, num_groups=4).check(10)
    with pytest.raises(PolicyError, match="at most the 2 experts of the kept groups"):
        RouterRule(top_k=3, num_groups=4, top_groups=1).check(8)
    RouterRule(top_k=2, num_groups=4, top_groups=1).check(8)


def test_auto_margin_is_a_quarter_of_the_median_gap():
    scores_NE = torch.tensor([[4.0, 2, 0, -INF], [9, 8, 5, 0], [1, 1, 1, 1]])
    assert auto_margin(scores_NE, 3) == 1.0  # gaps 4, 4, 0
    with pytest.raises(PolicyError, match="calibration"):
        auto_margin(torch.full((2, 4), -INF), 3)


def test_range_means_never_see_the_window_in_flight():
    means = RangeMeans(2, max_rows=4)
    means.observe(0, torch.tensor([[0.0, 3, -INF], [1, 1, 1]]))
    means.observe(1, torch.tensor([[0.0, 5, -INF], [1, 2, 1]]))
    assert means.mean_L.tolist() == [0, 0]
    means.commit(1)  # the second row was rejected
    assert means.mean_L.tolist() == [3, 5]
    means.observe(0, torch.tensor([[0.0, 1, 0]]))
    means.observe(1, torch.tensor([[0.0, 1, 0]]))
    means.commit([0])
    assert means.mean_L.tolist() == [2, 3]
    means.commit(0)
    assert means.mean_L.tolist() == [2, 3]


@pytest.mark.parametrize("module", ["warmset.routing", "warmset.route_rows"])
def test_import_pulls_neither_transformers_nor_triton(module):
    code = f"import sys, {module}; print([m for m in ('transformers', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

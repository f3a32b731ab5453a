"""`warmset.route`: right answers from the docstring, one sentence for each mistake."""

from __future__ import annotations

import doctest

import pytest
import torch

from warmset import route_rows
from warmset.errors import WarmsetError
from warmset.route_rows import route
from warmset.routing import MarginSwap

SCORES = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1, 0]])
SLOTS = torch.tensor([-1, -1, -1, -1, -1, 0, 1, 2], dtype=torch.int32)
BIAS = torch.zeros(8)


def test_the_example_in_the_docstring():
    names = {"torch": torch, "route": route, "MarginSwap": MarginSwap}
    test = doctest.DocTestParser().get_doctest(route.__doc__, names, "route", None, None)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert test.examples and runner.failures == 0


def test_any_number_of_rows():
    for num_rows in (0, 1, 3, 1000):
        ids, weights, counters = route(torch.randn(num_rows, 8), SLOTS, topk=4)
        assert ids.shape == weights.shape == (num_rows, 4)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert counters.shape == (5,) and counters.dtype == torch.int64


def test_the_names_of_other_engines():
    ids, weights, _ = route(
        torch.tensor([[2.0, 1, 0, -1]]),
        torch.zeros(4, dtype=torch.int32),
        topk=2,
        renormalize=False,
        scoring_func="softmax",
        routed_scaling_factor=2.5,
    )
    torch.testing.assert_close(weights, torch.tensor([[1.6098, 0.5922]]), atol=1e-4, rtol=0)
    ids, _, _ = route(
        torch.zeros(1, 4),
        torch.zeros(4, dtype=torch.int32),
        topk=2,
        scoring_func="sigmoid",
        e_score_correction_bias=torch.tensor([-1.0, -1.0, -2.1, -2.1]),
        num_expert_group=2,
        topk_group=1,
    )
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores(dtype):
    ids, _, _ = route(SCORES.to(dtype), SLOTS, topk=4, policy=MarginSwap(margin=2.5, ranks=(3, 3)))
    assert ids.tolist() == [[0, 1, 2, 5]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scores": [[1.0, 2.0]]}, "`scores` must be a tensor [T, E]. Got list."),
        ({"scores": SCORES[0]}, "`scores` must have shape [T, E]. Got [8]."),
        ({"scores": SCORES.double()}, "`scores` must be float32, bfloat16, float16. Got float64."),
        ({"scores": torch.randn(8, 2).t()}, "`scores` must be contiguous. Got strides [1, 2]."),
        ({"slots": SLOTS[:7]}, "`slots` must have shape [8]. Got [7]."),
        ({"slots": SLOTS[None]}, "`slots` must have shape [8]. Got [1, 8]."),
        ({"slots": SLOTS.long()}, "`slots` must be int32. Got int64."),
        ({"slots": SLOTS.to("meta")}, "`slots` must be on cpu, like scores. Got meta."),
        ({"slots": torch.zeros(16, dtype=torch.int32)[::2]}, "`slots` must be contiguous. Got strides [2]."),
        ({"topk": 9}, "`topk` must be at most the 8 experts. Got 9."),
        ({"topk": 0}, "`topk` must be a whole number of at least 1. Got 0."),
        ({"scoring_func": "tanh"}, "`scoring_func` must be 'softmax' or 'sigmoid'. Got 'tanh'."),
        (
            {"e_score_correction_bias": BIAS},
            "`e_score_correction_bias` is for scoring_func='sigmoid'. Got 'softmax'.",
        ),
        (
            {"e_score_correction_bias": BIAS.bfloat16(), "scoring_func": "sigmoid"},
            "`e_score_correction_bias` must be float32. Got bfloat16.",
        ),
        (
            {"e_score_correction_bias": BIAS[:3], "scoring_func": "sigmoid"},
            "`e_score_correction_bias` must have shape [8]. Got [3].",
        ),
        ({"num_expert_group": 3}, "`num_expert_group` must divide the 8 experts. Got 3."),
        (
            {"num_expert_group": 4, "topk_group": 5},
            "`topk_group` must be 1 to `num_expert_group` (4). Got 5.",
        ),
        (
            {"num_expert_group": 4, "topk_group": 1},
            "`topk` must be at most the 2 experts of the kept groups. Got 4.",
        ),
        ({"routed_scaling_factor": "2"}, "`routed_scaling_factor` must be a finite number. Got '2'."),
        (
            {"routed_scaling_factor": float("inf")},
            "`routed_scaling_factor` must be a finite number. Got inf.",
        ),
        ({"policy": "margin"}, "`policy` must be an object with a method `route`, or None. Got 'margin'."),
        ({"policy": MarginSwap}, "`policy` must be an object with a method `route`, or None."),
        ({"kernel": "magic"}, "the route kernel must be one of serial, warp, fused. Got 'magic'."),
    ],
)
def test_bad_input_is_one_sentence(change, sentence):
    given = {"scores": SCORES, "slots": SLOTS, "topk": 4, **change}
    with pytest.raises(ValueError) as raised:
        route(given.pop("scores"), given.pop("slots"), **given)
    assert str(raised.value).startswith(sentence)
    assert isinstance(raised.value, WarmsetError)
    assert "\n" not in str(raised.value)


def test_the_module_says_what_it_imports():
    assert "neither transformers nor" in (route_rows.__doc__ or "")

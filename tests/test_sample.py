"""Sampling: greedy, seeded by position alone, and distributed as the logits say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from warmset.config import SamplingConfig
from warmset.sample import sample_token

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draw(config: SamplingConfig, count: int) -> np.ndarray:
    return np.bincount([sample_token(LOGITS, config, position) for position in range(count)], minlength=5)


def test_greedy_takes_the_smallest_id_among_equals():
    assert sample_token(torch.tensor([1.0, 3.0, 3.0]), SamplingConfig(), 0) == 1


def test_the_same_seed_and_position_draw_the_same_token():
    config = SamplingConfig(temperature=1.0, seed=3)
    once = [sample_token(LOGITS, config, position) for position in range(50)]
    assert once == [sample_token(LOGITS, config, position) for position in range(50)]
    other = SamplingConfig(temperature=1.0, seed=4)
    assert once != [sample_token(LOGITS, other, position) for position in range(50)]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    count = 6000
    expected = torch.softmax(LOGITS / temperature, 0).numpy() * count
    seen = draw(SamplingConfig(temperature=temperature, seed=11), count)
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 18.47  # p = 0.001 at 4 degrees of freedom


def test_filters_leave_the_most_likely_token_in():
    assert draw(SamplingConfig(temperature=1.0, top_k=2), 300)[2:].sum() == 0
    assert draw(SamplingConfig(temperature=1.0, top_p=1e-9), 50)[1:].sum() == 0
    assert draw(SamplingConfig(temperature=1.0, min_p=0.3), 300)[2:].sum() == 0
    half = draw(SamplingConfig(temperature=1.0, top_p=0.6), 300)
    assert half[0] > 0 and half[1] > 0 and half[2:].sum() == 0


def test_a_nan_logit_is_an_error_and_no_token():
    with pytest.raises(ValueError, match="position 7"):
        sample_token(torch.tensor([1.0, float("nan")]), SamplingConfig(), 7)

"""The noise of a draw: the same bits in numpy and torch, the right distribution, a logarithm that is one."""

from __future__ import annotations

import numpy as np
import torch

from warmset.noise import _log, gumbel, gumbel_numpy, signed


def test_numpy_and_torch_agree_bit_for_bit():
    token_V = torch.arange(3001)
    for seed in (0, 1, 2**63 - 1):
        position_T = torch.tensor([0, 1, 77, 262_143])
        both_TV = gumbel(torch.tensor(signed(seed)), position_T[:, None], token_V)
        for row_V, position in zip(both_TV, position_T.tolist(), strict=True):
            assert np.array_equal(row_V.numpy(), gumbel_numpy(seed, position, 3001))


def test_noise_depends_on_seed_position_and_token_alone():
    first = gumbel_numpy(3, 9, 100)
    assert np.array_equal(first, gumbel_numpy(3, 9, 200)[:100])
    for other in (gumbel_numpy(4, 9, 100), gumbel_numpy(3, 10, 100), np.roll(first, 1)):
        assert not np.isclose(first, other).any()


def test_the_distribution_is_gumbels():
    sample = np.concatenate(
        [gumbel_numpy(seed, position, 500) for seed in range(10) for position in range(20)]
    )
    assert abs(sample.mean() - 0.5772) < 0.02 and abs(sample.var() - np.pi**2 / 6) < 0.04
    ordered = np.sort(sample)
    expected = np.exp(-np.exp(-ordered))
    assert (
        np.abs(expected - (np.arange(len(ordered)) + 0.5) / len(ordered)).max() < 1.63 / len(ordered) ** 0.5
    )
    rows = np.stack([gumbel_numpy(3, position, 4096) for position in range(100)])
    assert np.abs(np.corrcoef(rows) - np.eye(100)).max() < 0.09


def test_the_logarithm_is_right_to_a_few_ulp():
    random = np.random.default_rng(0).random(50_000)
    edges = np.concatenate(
        [2.0 ** -np.arange(1, 60), 1 - 2.0 ** -np.arange(2, 53), [36.7, 1.41421356, 1.4142136]]
    )
    values = np.concatenate([random, edges])
    exact = np.log(values)
    assert np.abs((_log(values) - exact) / exact).max() < 8e-16

"""The kernels of a decode window against plain torch: run by test_window_kernels in Triton's interpreter.

The interpreter is chosen when triton is imported, so the caller sets TRITON_INTERPRET=1 for a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from warmset.kernels import delta_window as delta
from warmset.kernels import index_blocks, small_ops, window_attention
from warmset.kernels import window_reference as reference
from warmset.kernels.gather_rows import gather_rows
from warmset.kernels.window_state import IndexWeights

DTYPES = [torch.float32, torch.bfloat16]


def close(got, expected, ulps=2):
    tolerance = ulps * torch.finfo(expected.dtype).eps
    assert got.dtype == expected.dtype and got.shape == expected.shape
    bound = tolerance * max(1.0, float(expected.float().abs().max()))
    assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=bound)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [True, False])
def test_rms_norm(dtype, plus_one):
    x, weight = randn(3, 40, dtype=dtype), randn(40, dtype=dtype, seed=1)
    for groups in (1, 4):
        got = small_ops.rms_norm(x, weight, 1e-6, plus_one=plus_one, groups=groups)
        close(got, reference.rms_norm(x, weight, 1e-6, plus_one=plus_one, groups=groups))
    wide = randn(2, 3, 80, dtype=dtype)[..., :40]  # rows of a wider tensor, as a query beside its gate
    close(
        small_ops.rms_norm(wide, weight, 1e-6, plus_one=plus_one),
        reference.rms_norm(wide, weight, 1e-6, plus_one=plus_one),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gated_norm(dtype, sigmoid):
    x, mixed = randn(3, 4, 8, dtype=dtype), randn(3, 100, dtype=dtype, seed=2)
    gate = mixed[:, 7:]
    settings = {"repeat": 2, "group_stride": 40, "sigmoid": sigmoid}
    weight = randn(8, dtype=dtype, seed=3)
    got = small_ops.gated_norm(x, gate, weight, 1e-6, **settings)
    close(got, reference.gated_norm(x, gate, weight, 1e-6, **settings), ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_streams(dtype):
    x = randn(5, 14, dtype=dtype)
    close(small_ops.silu_mul(x), reference.silu_mul(x))
    low = randn(2, 11, dtype=dtype)
    for got, expected in zip(
        small_ops.stream_gates(low, 8, 3), reference.stream_gates(low, 8, 3), strict=True
    ):
        close(got, expected)
    close(small_ops.stream_gates(low, 11, 3)[0], reference.stream_gates(low, 11, 3)[0])
    mix, normed = randn(2, 21, dtype=dtype), randn(2, 21, dtype=dtype, seed=1)
    close(small_ops.stream_mix(mix, normed, 3), reference.stream_mix(mix, normed, 3))


@pytest.mark.parametrize("rows, places, seen", [(1, 70, 70), (4, 200, 33), (3, 129, 1), (8, 256, 250)])
def test_attention(rows, places, seen):
    """A tile that no row sees, a tail tile, one place only; two query heads for each key head.

    In float32: the interpreter takes the bits of bf16 for integers in a product.
    """
    dtype = torch.float32
    query = randn(rows, 4, 16, dtype=dtype).transpose(0, 1)
    keys, values = randn(2, places, 16, dtype=dtype, seed=1), randn(2, places, 16, dtype=dtype, seed=2)
    keys[:, seen:], values[:, seen:] = float("nan"), float("nan")
    mask = torch.arange(places)[None] <= torch.arange(seen - rows, seen)[:, None].clamp(min=0)
    mask[-1, : places // 3] &= torch.arange(places // 3) % 3 == 0  # blocks that an indexer left out
    mask[:, 0] = True
    got = window_attention.window_attention(query, keys.nan_to_num(9.0), values.nan_to_num(9.0), mask, 0.25)
    clean = [part.clone().nan_to_num(0.0) for part in (keys, values)]
    close(got, reference.window_attention(query, *clean, mask, 0.25), ulps=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio, top", [(4, 3), (6, 2), (4, 40)])
def test_index_blocks_over_windows_that_are_cut(dtype, ratio, top):
    """Windows of all sizes from a cache of 37 places on, past the budget, each kept up to another row."""
    heads, width, places = (
        12,
        24,
        118,
    )  # so many heads that no score is 0: the CPU's topk has its own way with ties
    blocks = places // ratio
    weights = IndexWeights(
        query_D=randn(width, dtype=dtype, seed=1), key_D=randn(width, dtype=dtype, seed=2), query_eps=1e-6,
        key_eps=1e-5, query_plus_one=True, key_plus_one=False, heads=heads, ratio=ratio, top=top,
    )  # fmt: skip
    angle = torch.arange(places)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    cos_SR, sin_SR = angle.cos().to(dtype), angle.sin().to(dtype)
    block_angles = [part[::ratio][:blocks].contiguous() for part in (cos_SR, sin_SR)]
    keys_SD = randn(places, width, dtype=dtype, seed=3)
    keys_SD[37:] = float("nan")
    block_keys_BD = reference.pooled_keys(
        keys_SD[: blocks * ratio].view(blocks, ratio, width), weights, *block_angles
    )
    ours, theirs = ([keys_SD.clone(), block_keys_BD.clone()] for _ in range(2))
    start = 37
    for number, (rows, kept) in enumerate([(1, 1), (4, 2), (8, 8), (3, 1), (8, 5), (2, 2), (8, 8)]):
        begin_2 = torch.tensor([start, start])
        wide = randn(rows, heads * width + width + 5, dtype=dtype, seed=100 + number)
        qk_TX = wide[:, : heads * width + width]
        angles = (cos_SR[start : start + rows], sin_SR[start : start + rows])
        got = index_blocks.index_blocks(qk_TX, *angles, weights, begin_2, *ours, *block_angles)
        expected = reference.index_blocks(qk_TX, *angles, weights, begin_2, *theirs, *block_angles)
        whole = (start + rows) // ratio
        close(ours[0][: start + rows], theirs[0][: start + rows], ulps=0)
        close(ours[1][:whole], theirs[1][:whole], ulps=2)
        if dtype == torch.float32:
            assert torch.equal(got, expected)
        count_T = got[:, : whole * ratio].sum(1)
        assert (count_T <= top * ratio + ratio - 1 + rows).all() and got.dtype == torch.bool
        start += kept


def test_of_equal_scores_the_first_block_is_picked():
    """Keys of zero: every score is 0, and a row sees the first blocks and the open one."""
    weights = IndexWeights(
        query_D=torch.ones(8), key_D=torch.ones(8), query_eps=1e-6, key_eps=1e-6, query_plus_one=False,
        key_plus_one=False, heads=1, ratio=4, top=2,
    )  # fmt: skip
    keys_SD, block_keys_BD, angles = (
        torch.zeros(32, 8),
        torch.zeros(8, 8),
        [torch.ones(1, 4), torch.zeros(1, 4)],
    )
    block_angles = [torch.ones(8, 4), torch.zeros(8, 4)]
    got = index_blocks.index_blocks(
        torch.zeros(1, 16), *angles, weights, torch.tensor([21, 21]), keys_SD, block_keys_BD, *block_angles
    )
    assert got[0].nonzero().flatten().tolist() == [*range(8), *range(20, 32)]


def make_delta(dtype, rows, *, interleaved, seed=0, heads=4, key_heads=2, key_dim=8, value_dim=16):
    """Projections in one of the two layouts of the families: by key head, or all queries, all keys, ..."""
    repeat = heads // key_heads
    if interleaved:
        group = 2 * key_dim + 2 * repeat * value_dim
        x = randn(rows, key_heads * group, dtype=dtype, seed=seed)
        gates = randn(rows, 2 * heads, dtype=dtype, seed=seed + 1)
        return delta.Projected(
            query=x, key=x[:, key_dim:], value=x[:, 2 * key_dim :], b=gates, a=gates[:, repeat:],
            key_stride=group, value_stride=group, gate_stride=2 * repeat,
        )  # fmt: skip
    x = randn(rows, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype, seed=seed)
    b, a = randn(rows, heads, dtype=dtype, seed=seed + 1), randn(rows, heads, dtype=dtype, seed=seed + 2)
    width = key_heads * key_dim
    return delta.Projected(
        query=x, key=x[:, width:], value=x[:, 2 * width :], b=b, a=a,
        key_stride=key_dim, value_stride=repeat * value_dim, gate_stride=repeat,
    )  # fmt: skip


def new_state(dtype):
    state = delta.DeltaState.make(
        channels=2 * 2 * 8 + 4 * 16, key_heads=2, value_heads=4, key_dim=8, value_dim=16,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    for number, part in enumerate(state.tensors()):
        part.copy_(randn(*part.shape, seed=40 + number) * 0.3)
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_delta_rule_over_windows_that_are_cut(dtype, interleaved):
    """Kernel and plain torch agree over windows of all sizes, each kept up to another row."""
    ours, theirs = new_state(dtype), new_state(dtype)
    conv, a_log, dt_bias = randn(96, 4, dtype=dtype, seed=9), randn(4, seed=10) * 0.3, randn(4, seed=11)
    begin = torch.tensor([5, 5])
    for number, (rows, kept) in enumerate([(1, 1), (4, 2), (8, 8), (3, 1), (8, 5), (2, 2)]):
        projected = make_delta(dtype, rows, interleaved=interleaved, seed=100 * number)
        got = delta.delta_window(projected, conv, a_log, dt_bias, begin, ours)
        close(got, reference.delta_window(projected, conv, a_log, dt_bias, begin, theirs), ulps=8)
        begin = torch.stack([begin[1], begin[1] + kept])
    for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        close(mine.to(dtype), other.to(dtype), ulps=32 if dtype == torch.float32 else 4)


def test_a_row_of_the_delta_rule_has_its_bits_whatever_the_window():
    """The same eight rows one by one, and as windows of 3 and 5 of which 3 were rejected first."""
    conv, a_log, dt_bias = randn(96, 4, seed=9), randn(4, seed=10) * 0.3, randn(4, seed=11)
    whole = make_delta(torch.float32, 8, interleaved=False)

    def part(first, end):
        cut = {name: getattr(whole, name)[first:end] for name in ("query", "key", "value", "b", "a")}
        strides = {name: getattr(whole, name) for name in ("key_stride", "value_stride", "gate_stride")}
        return delta.Projected(**cut, **strides)

    runs = []
    for cuts in ([(n, n + 1, 1) for n in range(8)], [(0, 6, 3), (3, 8, 5)]):
        state, begin, out = new_state(torch.float32), torch.tensor([0, 0]), []
        for first, end, kept in cuts:
            got = delta.delta_window(part(first, end), conv, a_log, dt_bias, begin, state)
            out.append(got[:kept])
            begin = torch.stack([begin[1], begin[1] + kept])
        delta.delta_window(
            part(0, 1), conv, a_log, dt_bias, begin, state
        )  # settles what the last window kept
        runs.append((torch.cat(out), state.state_NDV))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_gather_rows_reads_host_memory_by_address():
    table = randn(50, 6, dtype=torch.bfloat16)
    ids = torch.tensor([49, 0, 7, 7])
    out = torch.full((4, 6), float("nan"), dtype=torch.bfloat16)
    gather_rows(table.data_ptr(), ids, out)
    assert torch.equal(out, table[ids])
    reference.gather_rows(table.data_ptr(), ids.flip(0), out)
    assert torch.equal(out, table[ids.flip(0)])

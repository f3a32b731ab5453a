"""The gated delta rule over the rows of a window, with everything in place by position.

    projected rows --conv, silu--> q, k, v --norm--> rule, row by row --> outputs

Every row's part of the state is kept in a ring by its position, so nothing has to be taken back: a row that was
rejected is overwritten by the next row at its position. The state matrix itself lags one window behind: the launch
first adds the rows that the last window kept (their keys, changes and decays are in the rings), stores the state, then
runs the new rows without storing what they lead to. A row's arithmetic is the same whatever the rest of the window is.

Shape letters: T rows, N value heads, M key heads, D width of a key, V width of a value, C channels of the convolution,
R places of a ring.

    query, key, value, b, a   projected, not yet convolved; see `window_state.Projected`
    conv_C4     [C, 4]     dtype    taps of the convolution; channels are queries, keys, values
    begin_2     [2]        int64    positions: the state holds rows before the first; the window begins at the second
    ring_x_RC   [R, C]     dtype    projected rows
    ring_k_RMD  [R, M, D]  float32  normalised keys
    ring_d_RNV  [R, N, V]  float32  changes
    ring_g_RN   [R, N]     float32  decays
    state_NDV   [N, D, V]  float32
    out_TNV     [T, N, V]  dtype
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .window_state import RING, TAPS, DeltaState, Projected


@triton.jit
def _tap(conv_C4, channel, which: tl.constexpr):
    return tl.load(conv_C4 + channel * 4 + which).to(tl.float32)


@triton.jit
def _convolved(x0, x1, x2, x3, conv_C4, channel, dtype: tl.constexpr):
    """silu(convolution) of one row, rounded after each step as the modules do."""
    total = x0.to(tl.float32) * _tap(conv_C4, channel, 0)
    total += x1.to(tl.float32) * _tap(conv_C4, channel, 1)
    total += x2.to(tl.float32) * _tap(conv_C4, channel, 2)
    total += x3.to(tl.float32) * _tap(conv_C4, channel, 3)
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)


@triton.jit
def _before(ring_x_RC, start, back: tl.constexpr, channel, C: tl.constexpr, R: tl.constexpr):
    """The projected row `back` positions before the window; zeros before the sequence."""
    at = start - back
    x = tl.load(ring_x_RC + (tl.maximum(at, 0) % R) * C + channel)
    return tl.where(at >= 0, x, tl.zeros_like(x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where exp(x) is lost beside 1."""
    small = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + small
    log1p = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def delta_window_kernel(
    query_ptr, key_ptr, value_ptr, b_ptr, a_ptr, row_q, row_k, row_v, row_b, row_a,
    key_stride, value_stride, gate_stride,
    conv_C4, a_log_N, dt_bias_N, begin_2, ring_x_RC, ring_k_RMD, ring_d_RNV, ring_g_RN, state_NDV, out_TNV, scale,
    T: tl.constexpr, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    block = tl.program_id(1)
    REPEAT: tl.constexpr = N // M
    C: tl.constexpr = 2 * M * D + N * V
    dtype: tl.constexpr = out_TNV.dtype.element_ty
    key_head = head // REPEAT
    d = tl.arange(0, D)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    first = (head % REPEAT == 0) & (block == 0)
    settled = tl.load(begin_2)
    start = tl.load(begin_2 + 1)
    state_at = state_NDV + head * D * V + d[:, None] * V + v[None, :]
    state_DV = tl.load(state_at)
    for position in range(settled, start):
        place = position % R
        decay = tl.load(ring_g_RN + place * N + head)
        key_D = tl.load(ring_k_RMD + (place * M + key_head) * D + d)
        change_V = tl.load(ring_d_RNV + (place * N + head) * V + v)
        state_DV = state_DV * decay + key_D[:, None] * change_V[None, :]
    tl.store(state_at, state_DV)

    q_channel = key_head * D + d
    k_channel = M * D + q_channel
    v_channel = 2 * M * D + head * V + v
    q0 = _before(ring_x_RC, start, 3, q_channel, C, R)
    q1 = _before(ring_x_RC, start, 2, q_channel, C, R)
    q2 = _before(ring_x_RC, start, 1, q_channel, C, R)
    k0 = _before(ring_x_RC, start, 3, k_channel, C, R)
    k1 = _before(ring_x_RC, start, 2, k_channel, C, R)
    k2 = _before(ring_x_RC, start, 1, k_channel, C, R)
    v0 = _before(ring_x_RC, start, 3, v_channel, C, R)
    v1 = _before(ring_x_RC, start, 2, v_channel, C, R)
    v2 = _before(ring_x_RC, start, 1, v_channel, C, R)
    a_log = tl.load(a_log_N + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_N + head).to(tl.float32)
    group_at = (head // REPEAT) * value_stride + (head % REPEAT) * V
    gate_at = (head // REPEAT) * gate_stride + head % REPEAT
    for row in range(T):
        place = (start + row) % R
        q3 = tl.load(query_ptr + row * row_q + key_head * key_stride + d)
        k3 = tl.load(key_ptr + row * row_k + key_head * key_stride + d)
        v3 = tl.load(value_ptr + row * row_v + group_at + v)
        query_D = _convolved(q0, q1, q2, q3, conv_C4, q_channel, dtype)
        key_D = _convolved(k0, k1, k2, k3, conv_C4, k_channel, dtype)
        value_V = _convolved(v0, v1, v2, v3, conv_C4, v_channel, dtype)
        query_D = query_D * tl.rsqrt(tl.sum(query_D * query_D, 0) + 1e-6) / scale
        key_D = key_D * tl.rsqrt(tl.sum(key_D * key_D, 0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * row_b + gate_at).to(tl.float32)))
        beta = beta.to(dtype).to(tl.float32)
        step = tl.load(a_ptr + row * row_a + gate_at).to(tl.float32) + dt_bias
        decay = tl.exp(-tl.exp(a_log) * _softplus(step))
        state_DV = state_DV * decay
        known_V = tl.sum(state_DV * key_D[:, None], 0)
        change_V = (value_V - known_V) * beta
        state_DV = state_DV + key_D[:, None] * change_V[None, :]
        out_V = tl.sum(state_DV * query_D[:, None], 0)
        tl.store(out_TNV + (row * N + head) * V + v, out_V.to(dtype))
        tl.store(ring_d_RNV + (place * N + head) * V + v, change_V)
        tl.store(ring_x_RC + place * C + v_channel, v3)
        if first:
            tl.store(ring_k_RMD + (place * M + key_head) * D + d, key_D)
            tl.store(ring_x_RC + place * C + q_channel, q3)
            tl.store(ring_x_RC + place * C + k_channel, k3)
        if block == 0:
            tl.store(ring_g_RN + place * N + head, decay)
        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3


def why_not(*, taps: int, key_dim: int, value_dim: int, bias: bool) -> str | None:
    """Why the kernel cannot run such a layer, as the end of a sentence, or None."""
    if taps != TAPS or bias:
        return (
            f"its convolution has {taps} taps{' and a bias' if bias else ''}, the kernel knows {TAPS} without"
        )
    for name, width in (("keys", key_dim), ("values", value_dim)):
        if width != triton.next_power_of_2(width) or width > 256:
            return f"its {name} are {width} wide, which is no power of two up to 256"
    return None


def delta_window(
    projected: Projected,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    begin_2: torch.Tensor,
    state: DeltaState,
) -> torch.Tensor:
    """Outputs [T, N, V] of the window's rows, not yet normed; the state moves as the module says."""
    num_rows = projected.query.shape[0]
    heads, key_dim, value_dim = state.state_NDV.shape
    key_heads = state.ring_k_RMD.shape[1]
    out_TNV = torch.empty(
        num_rows, heads, value_dim, dtype=projected.query.dtype, device=state.state_NDV.device
    )
    block_v = min(32, value_dim)
    parts = (projected.query, projected.key, projected.value, projected.b, projected.a)
    delta_window_kernel[(heads, value_dim // block_v)](
        *parts, *(part.stride(0) for part in parts),
        projected.key_stride, projected.value_stride, projected.gate_stride,
        conv_C4, a_log_N, dt_bias_N, begin_2,
        state.ring_x_RC, state.ring_k_RMD, state.ring_d_RNV, state.ring_g_RN, state.state_NDV, out_TNV,
        float(key_dim) ** 0.5,
        T=num_rows, N=heads, M=key_heads, D=key_dim, V=value_dim, R=RING, BLOCK_V=block_v,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TNV

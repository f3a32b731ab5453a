"""Plain torch for the kernels of a decode window, under the same names: the CPU runs it, and tests compare.

Roundings to the compute dtype are where the kernels have them; sums are taken in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .window_state import RING, TAPS, DeltaState, Projected


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, plus_one: bool, groups: int = 1
) -> torch.Tensor:
    """As `small_ops.rms_norm`."""
    wide = x.float().unflatten(-1, (groups, -1))
    wide = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if plus_one:
        return (wide * (1.0 + weight_D.float())).to(x.dtype)
    return weight_D * wide.to(x.dtype)


def gated_norm(
    x_TNV: torch.Tensor,
    gate: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    *,
    repeat: int,
    group_stride: int,
    sigmoid: bool,
) -> torch.Tensor:
    """As `small_ops.gated_norm`."""
    num_rows, heads, width = x_TNV.shape
    gate_TNV = gate.as_strided(
        (num_rows, heads // repeat, repeat, width),
        (gate.stride(0), group_stride, width, 1),
        gate.storage_offset(),
    ).reshape(num_rows, heads, width)
    x = x_TNV.float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(x_TNV.dtype)
    act = torch.sigmoid(gate_TNV.float()) if sigmoid else F.silu(gate_TNV.float())
    return ((weight_V * x) * act).to(x_TNV.dtype).flatten(1)


def silu_mul(x_NI2: torch.Tensor) -> torch.Tensor:
    """As `small_ops.silu_mul`."""
    gate, up = x_NI2.chunk(2, dim=-1)
    return F.silu(gate) * up


def stream_gates(low_ND: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `small_ops.stream_gates`."""
    low_ND = low_ND / streams
    inject_NG = low_ND[:, rank:] if low_ND.shape[1] > rank else low_ND[:, :streams]
    return F.silu(low_ND[:, :rank]), 2 * torch.sigmoid(inject_NG)


def stream_mix(mix: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    """As `small_ops.stream_mix`."""
    return (torch.sigmoid(mix) * normed).unflatten(-1, (streams, -1)).mean(dim=-2)


def window_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask_TS: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `window_attention.window_attention`."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    out_ATD = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask_TS, scale=scale)
    return out_ATD.transpose(0, 1)


def gather_rows(address: int, id_R: torch.Tensor, out_RD: torch.Tensor) -> None:
    """As `gather_rows.gather_rows`."""
    from warmset.kernels.experts_reference import tensor_at

    for line, index in enumerate(id_R.tolist()):
        place = address + index * out_RD.shape[1] * out_RD.element_size()
        out_RD[line] = tensor_at(place, (out_RD.shape[1],), out_RD.dtype)


def delta_window(
    projected: Projected,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    begin_2: torch.Tensor,
    state: DeltaState,
) -> torch.Tensor:
    """As `delta_window.delta_window`."""
    num_rows = projected.query.shape[0]
    heads, key_dim, value_dim = state.state_NDV.shape
    key_heads, repeat = state.ring_k_RMD.shape[1], heads // state.ring_k_RMD.shape[1]
    dtype = projected.query.dtype
    settled, start = begin_2.tolist()  # host sync: the CPU is the host
    for position in range(settled, start):
        place = position % RING
        key_ND1 = state.ring_k_RMD[place].repeat_interleave(repeat, 0)[:, :, None]
        state.state_NDV.mul_(state.ring_g_RN[place, :, None, None])
        state.state_NDV.add_(key_ND1 * state.ring_d_RNV[place, :, None, :])

    def heads_of(part: torch.Tensor, count: int, inner: int, width: int, stride: int) -> torch.Tensor:
        shape = (num_rows, count // inner, inner, width)
        return part.as_strided(shape, (part.stride(0), stride, width, 1), part.storage_offset()).reshape(
            num_rows, count, width
        )

    query = heads_of(projected.query, key_heads, 1, key_dim, projected.key_stride)
    key = heads_of(projected.key, key_heads, 1, key_dim, projected.key_stride)
    value = heads_of(projected.value, heads, repeat, value_dim, projected.value_stride)
    b_TN = heads_of(projected.b, heads, repeat, 1, projected.gate_stride)[..., 0]
    a_TN = heads_of(projected.a, heads, repeat, 1, projected.gate_stride)[..., 0]
    x_TC = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
    places = [(start - back) % RING for back in (3, 2, 1)]
    past_3C = state.ring_x_RC[places].clone()
    past_3C[[start - back < 0 for back in (3, 2, 1)]] = 0
    rows_XC = torch.cat([past_3C, x_TC])
    windows_TC4 = rows_XC.unfold(0, TAPS, 1)
    mixed_TC = F.silu((windows_TC4.float() * conv_C4.float()).sum(-1).to(dtype)).float()
    width = key_heads * key_dim
    query, key, value = mixed_TC.split([width, width, heads * value_dim], dim=1)
    query, key = (_unit(part.view(num_rows, key_heads, key_dim)) for part in (query, key))
    query, value = query / key_dim**0.5, value.view(num_rows, heads, value_dim)
    beta_TN = b_TN.sigmoid().float()
    decay_TN = (-a_log_N.float().exp() * F.softplus(a_TN.float() + dt_bias_N.float())).exp()
    running = state.state_NDV
    out_TNV = torch.empty(num_rows, heads, value_dim, dtype=dtype, device=value.device)
    for row in range(num_rows):
        place = (start + row) % RING
        key_ND1 = key[row].repeat_interleave(repeat, 0)[:, :, None]
        running = running * decay_TN[row, :, None, None]
        change_NV = (value[row] - (running * key_ND1).sum(1)) * beta_TN[row, :, None]
        running = running + key_ND1 * change_NV[:, None, :]
        query_ND1 = query[row].repeat_interleave(repeat, 0)[:, :, None]
        out_TNV[row] = (running * query_ND1).sum(1).to(dtype)
        state.ring_k_RMD[place], state.ring_d_RNV[place] = key[row], change_NV
        state.ring_g_RN[place], state.ring_x_RC[place] = decay_TN[row], x_TC[row]
    return out_TNV


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

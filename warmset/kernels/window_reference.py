"""Plain torch for the kernels of a decode window, under the same names: the CPU runs it, and tests compare.

Roundings to the compute dtype are where the kernels have them; sums are taken in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .window_state import RING, TAPS, DeltaState, IndexWeights, Projected


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


def index_blocks(
    qk_TX: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    weights: IndexWeights,
    begin_2: torch.Tensor,
    index_keys_SD: torch.Tensor,
    block_keys_BD: torch.Tensor,
    block_cos_BR: torch.Tensor,
    block_sin_BR: torch.Tensor,
) -> torch.Tensor:
    """As `index_blocks.index_blocks`; of equal scores, torch's topk on a CPU does not always pick the first."""
    num_rows, (blocks, width), ratio = len(qk_TX), block_keys_BD.shape, weights.ratio
    row_T = torch.arange(num_rows, device=qk_TX.device)
    position_T = begin_2[1] + row_T
    query, raw_TD = qk_TX.split([weights.heads * width, width], dim=-1)
    query = query.reshape(num_rows, weights.heads, width)
    query = rms_norm(query, weights.query_D, weights.query_eps, plus_one=weights.query_plus_one)
    query_TND = rotated(query, cos_TR[:, None], sin_TR[:, None])
    index_keys_SD.index_copy_(0, position_T, raw_TD)
    touched = begin_2[1] // ratio + torch.arange((num_rows + ratio - 2) // ratio + 1, device=qk_TX.device)
    touched = touched.clamp(max=blocks - 1)
    places = touched[:, None] * ratio + torch.arange(ratio, device=qk_TX.device)
    angles = (block_cos_BR[touched], block_sin_BR[touched])
    block_keys_BD.index_copy_(0, touched, pooled_keys(index_keys_SD[places], weights, *angles))
    scores_TNB = query_TND.float() @ block_keys_BD.float().T
    scores_TB = scores_TNB.relu().sum(dim=1) / width**0.5
    whole_T1 = (position_T[:, None] + 1) // ratio
    picked_TB = torch.zeros_like(scores_TB, dtype=torch.bool)
    for row, whole in enumerate(whole_T1[:, 0].tolist()):  # host sync: the CPU is the host
        # The library's own choice among equal scores, which depends on how many there are.
        picked_TB[row, scores_TB[row, :whole].topk(min(weights.top, whole)).indices] = True
    picked_TS = picked_TB[:, :, None].expand(-1, -1, ratio).reshape(num_rows, -1)
    picked_TS = F.pad(picked_TS, (0, len(index_keys_SD) - picked_TS.shape[1]))
    return picked_TS | (torch.arange(len(index_keys_SD), device=qk_TX.device)[None] >= whole_T1 * ratio)


def pooled_keys(
    raw_BRD: torch.Tensor, weights: IndexWeights, cos_BR: torch.Tensor, sin_BR: torch.Tensor
) -> torch.Tensor:
    """Keys [B, D] of whole blocks: the mean of the places' index keys, normed and rotated to the first place."""
    mean_BD = raw_BRD.float().mean(dim=1).to(raw_BRD.dtype)
    normed_BD = rms_norm(mean_BD, weights.key_D, weights.key_eps, plus_one=weights.key_plus_one)
    return rotated(normed_BD, cos_BR, sin_BR)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first `cos.shape[-1]` numbers of each vector, by halves."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


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

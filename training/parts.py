"""Pure functions of tensors that the training form is made of. No modules, no state.

They are kept apart because `torch.compile` can fuse each of them on its own (`Parts.compiled`), which saves memory
traffic over the four residual streams; without it they run as they stand.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm over the last dimension, float32; weight may span several groups of it."""
    x = x.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * (1.0 + weight.view(-1, x.shape[-1]).squeeze(0))


def hc_read(
    streams: Tensor,
    norm: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Mix S residual streams [T, S, H] into one input [T, H]; also each stream's injection weight [T, S, 1]."""
    count = streams.shape[-2]
    normed = rms(streams, norm, eps).to(dtype)
    flat = normed.flatten(-2)
    low = F.silu(F.linear(flat, down.to(dtype)) / count)
    share = torch.sigmoid(F.linear(low, up.to(dtype)).view_as(normed).float())
    mixed = (share * normed).mean(-2).to(dtype)
    if inject is None:
        return mixed, None
    return mixed, 2 * torch.sigmoid(F.linear(flat, inject.to(dtype)).float() / count).unsqueeze(-1)


def hc_write(streams: Tensor, out: Tensor, injection: Tensor) -> Tensor:
    """Add a block's output [T, H] to each stream [T, S, H] by its injection weight."""
    return streams + (out.unsqueeze(-2) * injection).to(streams.dtype)


def causal_conv_silu(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise causal convolution over L of x [B, L, C] with weight [C, 1, taps], then SiLU.

    A sum of shifted products: the backward of a grouped conv1d is far slower at these widths.
    """
    taps, length = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0)).float()
    total = padded[:, :length] * weight[:, 0, 0]
    for tap in range(1, taps):
        total = total + padded[:, tap * dilation : tap * dilation + length] * weight[:, 0, tap]
    return F.silu(total).to(x.dtype)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of the gated delta rule, float32 [B, L, heads]."""
    return -a_log.exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * F.silu(gate.float())).to(
        dtype
    )


def head_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """x [B, L, heads, D] -> normed and rotated, [B, heads, L, D]; the rotation spans the whole width."""
    normed = rms(x, weight, eps)
    one, two = normed.chunk(2, -1)
    turned = normed * cos.unsqueeze(1) + torch.cat((-two, one), -1) * sin.unsqueeze(1)
    return turned.transpose(1, 2).to(dtype)


def ple_value(key: Tensor, query: Tensor, value: Tensor, norms: tuple[Tensor, Tensor, Tensor], eps: float):
    """Gate the n-gram value into each stream: (gated, gated and normed for the convolution), both [B, L, S, H]."""
    norm_key, norm_query, norm_conv = norms
    gate = (rms(key, norm_key, eps) * rms(query, norm_query, eps)).sum(-1, keepdim=True) * key.shape[
        -1
    ] ** -0.5
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    gated = torch.sigmoid(gate) * value.float().unsqueeze(-2)
    return gated, rms(gated, norm_conv, eps)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, open_: Tensor) -> Tensor:
    """The shared expert with its sigmoid gate; weights float32, x in the working dtype."""
    dtype = x.dtype
    middle = F.silu(F.linear(x, gate.to(dtype))) * F.linear(x, up.to(dtype))
    return torch.sigmoid(F.linear(x, open_.to(dtype))) * F.linear(middle, down.to(dtype))


def mean_softmax(logits: Tensor) -> Tensor:
    """The mean over tokens of the router's probabilities, [E]."""
    return logits.softmax(-1).mean(0)


@dataclass(frozen=True)
class Parts:
    hc_read: Callable = hc_read
    hc_write: Callable = hc_write
    causal_conv_silu: Callable = causal_conv_silu
    delta_gates: Callable = delta_gates
    gated_norm: Callable = gated_norm
    head_norm_rope: Callable = head_norm_rope
    ple_value: Callable = ple_value
    swiglu: Callable = swiglu
    mean_softmax: Callable = mean_softmax

    @classmethod
    def compiled(cls) -> "Parts":
        torch._dynamo.config.recompile_limit = 64  # one version a shape; the phases differ in shape
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**{name: torch.compile(part, dynamic=False) for name, part in fields.items()})

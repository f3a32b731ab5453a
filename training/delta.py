"""The gated delta rule in a few batched matrix products, for training.

Same arithmetic as transformers' `torch_chunk_gated_delta_rule`, but nothing loops over chunks except one small
product a chunk, so that a step is bound by arithmetic and not by kernel launches. Knows nothing of modules.

Shape letters: N chunks, B batch, K key heads, G value heads a key head, C rows a chunk, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
LEAF = 8  # a product series inverts blocks of this size; powers of larger ones lose float32's digits


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[..., C, C] -> [..., C / size, size, size], the blocks on the diagonal."""
    count = matrix.shape[-1] // size
    blocks = matrix.unflatten(-1, (count, size)).unflatten(
        -3, (count, size)
    )  # [..., count, size, count, size]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _invert_unit_lower(strict: Tensor) -> Tensor:
    """Inverse of I + strict, where strict [..., C, C] is strictly lower triangular."""
    nil = -_diagonal_blocks(strict, LEAF).contiguous()
    eye = torch.eye(LEAF, dtype=nil.dtype, device=nil.device)
    square = nil @ nil
    inverse = (eye + nil) @ (eye + square) @ (eye + square @ square)
    size = LEAF
    while size < strict.shape[-1]:
        # [[P, 0], [C, Q]]^-1 = [[P', 0], [-Q' C P', Q']]: as stable as forward substitution
        corner = _diagonal_blocks(strict, 2 * size)[..., size:, :size]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        joined = inverse.new_zeros(*upper.shape[:-2], 2 * size, 2 * size)
        joined[..., :size, :size] = upper
        joined[..., size:, size:] = lower
        joined[..., size:, :size] = -(lower @ corner @ upper)
        inverse, size = joined, 2 * size
    return inverse.squeeze(-3)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower A; the gradient needs the inverse alone, not the steps to it."""

    @staticmethod
    def forward(ctx, strict: Tensor) -> Tensor:
        inverse = _invert_unit_lower(strict)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        across = inverse.transpose(-1, -2)
        return -(across @ grad @ across).tril(-1)


class StateScan(torch.autograd.Function):
    """S[0] = 0, S[i + 1] = move[i] @ S[i] + add[i]; move and add are [N, R, D, D], S is [N, R, D, D]."""

    @staticmethod
    def forward(ctx, move: Tensor, add: Tensor) -> Tensor:
        states = [torch.zeros_like(add[0])]
        for index in range(move.shape[0] - 1):
            states.append(torch.baddbmm(add[index], move[index], states[-1]))
        stacked = torch.stack(states)
        ctx.save_for_backward(move, stacked)
        return stacked

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        move, states = ctx.saved_tensors
        after = torch.zeros_like(grad[0])  # the state behind the last chunk is not used
        arriving = [after]
        for index in range(move.shape[0] - 1, 0, -1):
            after = torch.baddbmm(grad[index], move[index].transpose(-1, -2), after)
            arriving.append(after)
        grad_add = torch.stack(arriving[::-1])
        return grad_add @ states.transpose(-1, -2), grad_add


def _by_chunk(x: Tensor, chunks: int) -> Tensor:
    """[B, L, H, D] -> [N, B, H, C, D], float32."""
    batch, _, heads, width = x.shape
    return x.float().reshape(batch, chunks, CHUNK, heads, width).permute(1, 0, 3, 2, 4)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """query, key [B, L, K, D], value [B, L, K * G, D], g (log decay) and beta [B, L, K * G] -> [B, L, K * G, D]."""
    batch, length, num_keys, width = key.shape
    num_values = value.shape[2]
    pad = -length % CHUNK
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (query, key, value))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    chunks = (length + pad) // CHUNK
    grouped = (chunks, batch, num_keys, num_values // num_keys, CHUNK)

    query = (_unit(_by_chunk(query, chunks)) * width**-0.5).unsqueeze(3)  # [N, B, K, 1, C, D]
    key = _unit(_by_chunk(key, chunks)).unsqueeze(3)
    value = _by_chunk(value, chunks).reshape(*grouped, -1)
    beta = _by_chunk(beta.unsqueeze(-1), chunks).reshape(grouped)
    decay = _by_chunk(g.unsqueeze(-1), chunks).reshape(grouped).cumsum(-1)

    ahead = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(ahead, float("-inf")).exp()
    mixing = UnitLowerInverse.apply(((key @ key.mT) * (between * beta.unsqueeze(-1))).tril(-1))
    inside = (query @ key.mT) * between

    grown = decay.exp().unsqueeze(-1)
    solved = mixing @ torch.cat((value * beta.unsqueeze(-1), key * (grown * beta.unsqueeze(-1))), -1)
    fresh, reads = solved.split((value.shape[-1], width), -1)

    left = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    moved = (key * left).mT @ solved  # [..., D, Dv + D]
    add, forget = moved.split((value.shape[-1], width), -1)
    eye = torch.eye(width, dtype=key.dtype, device=key.device)
    move = eye * decay[..., -1].exp()[..., None, None] - forget
    states = StateScan.apply(move.flatten(1, 3), add.flatten(1, 3)).view_as(add)

    out = (query * grown) @ states + inside @ (fresh - reads @ states)  # [N, B, K, G, C, Dv]
    out = out.permute(1, 0, 4, 2, 3, 5).reshape(batch, chunks * CHUNK, num_values, -1)
    return out[:, :length]

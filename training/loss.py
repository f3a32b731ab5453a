"""Next-token loss through the tied head, in slices, so that float32 logits of a whole batch never exist at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

SLICE = 16384  # rows of float32 logits at a time


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy of hidden [T, H] @ weight [V, H]^T against labels [T]; the gradients are made on the way."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        working = weight.to(hidden.dtype)
        total = torch.zeros((), device=hidden.device)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows, goal, grad in zip(
            hidden.split(SLICE), labels.split(SLICE), grad_hidden.split(SLICE), strict=True
        ):
            logits = F.linear(rows, working).float()
            spread = logits.logsumexp(-1, keepdim=True)
            total += (spread - logits.gather(1, goal[:, None])).sum()
            slope = logits.sub_(spread).exp_()
            slope.scatter_add_(1, goal[:, None], torch.full_like(spread, -1.0))
            slope = slope.to(hidden.dtype)
            torch.mm(slope, working, out=grad)
            grad_weight += slope.t() @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = labels.numel()
        return total / ctx.count

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad / ctx.count
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight * scale, None


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token in nats, float32 [T]; no gradient."""
    with torch.no_grad():
        working = weight.to(hidden.dtype)
        return torch.cat(
            [
                F.cross_entropy(F.linear(rows, working).float(), goal, reduction="none")
                for rows, goal in zip(hidden.split(SLICE), labels.split(SLICE), strict=True)
            ]
        )


class Lookup(torch.autograd.Function):
    """`weight[ids]`; the gradient is one atomic add, which a graph can capture (a sort-based one may not)."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        return out.index_add_(0, ids.flatten(), grad.reshape(-1, ctx.shape[-1])), None

"""The routed experts of one layer, forward and backward, for training.

Every pick is sorted by expert once; three forms multiply the sorted rows: `grouped` (one grouped product in bf16,
offsets on the device), `padded` (a batched product over a fixed capacity, for devices where `grouped` fails; picks
over the capacity are dropped) and `loop` (one product an expert, the reference; it reads the offsets on the host).

Shape letters: T tokens, K picks a token, S = T * K sorted picks, E experts, H hidden, I expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CAPACITY = 4  # of the mean load, in the padded form


@dataclass(frozen=True)
class Sorted:
    """Where each sorted pick came from, and where each expert's rows end."""

    order_S: Tensor  # sorted place -> pick (token * K + rank)
    place_S: Tensor  # pick -> sorted place
    expert_S: Tensor
    ends_E: Tensor  # int32: one past the last row of each expert


def sort_picks(ids_TK: Tensor, num_experts: int) -> Sorted:
    # 16-bit keys halve the radix passes
    expert, order = ids_TK.reshape(-1).to(torch.int16).sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    edges = torch.arange(num_experts, device=order.device, dtype=torch.int16)
    ends = torch.searchsorted(expert, edges, right=True, out_int32=True)
    return Sorted(order, place, expert.long(), ends)


def counts_of(picks: Sorted) -> Tensor:
    """Picks of each expert, int32 [E]."""
    return picks.ends_E.diff(prepend=picks.ends_E.new_zeros(1))


# Each form: rows(x [S, a], weight [E, a, b]) -> [S, b]; outer(x [S, a], y [S, b]) -> [E, a, b], 0 for an empty expert.
def _loop_rows(x: Tensor, weight: Tensor, picks: Sorted) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[-1])
    start = 0
    for expert, end in enumerate(picks.ends_E.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


def _loop_outer(x: Tensor, y: Tensor, picks: Sorted) -> Tensor:
    ends = picks.ends_E.tolist()
    out = x.new_zeros(len(ends), x.shape[-1], y.shape[-1])
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            torch.mm(x[start:end].t(), y[start:end], out=out[expert])
        start = end
    return out


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return grouped_mm(a, b, offs=ends)


def _grouped_rows(x: Tensor, weight: Tensor, picks: Sorted) -> Tensor:
    return _grouped_mm(x, weight, picks.ends_E)


def _grouped_outer(x: Tensor, y: Tensor, picks: Sorted) -> Tensor:
    out = _grouped_mm(x.t(), y, picks.ends_E)
    # a group of no rows may be left unwritten by the kernel
    return torch.where((counts_of(picks) > 0)[:, None, None], out, out.new_zeros(()))


def _seats(picks: Sorted) -> tuple[Tensor, int]:
    """The seat of each sorted pick in [E * capacity] (the last, extra one if it does not fit), and the capacity."""
    num_experts = picks.ends_E.numel()
    capacity = -(-CAPACITY * picks.order_S.numel() // num_experts // 16) * 16 or 16
    starts = (picks.ends_E - counts_of(picks))[picks.expert_S]
    rank = torch.arange(picks.order_S.numel(), device=starts.device) - starts
    return torch.where(rank < capacity, picks.expert_S * capacity + rank, num_experts * capacity), capacity


def _seated(x: Tensor, seats: Tensor, num_experts: int, capacity: int) -> Tensor:
    buffer = x.new_zeros(num_experts * capacity + 1, x.shape[-1])
    buffer[seats] = x
    return buffer[:-1].view(num_experts, capacity, -1)


def _padded_rows(x: Tensor, weight: Tensor, picks: Sorted) -> Tensor:
    seats, capacity = _seats(picks)
    out = torch.bmm(_seated(x, seats, weight.shape[0], capacity), weight).flatten(0, 1)
    return torch.cat((out, out.new_zeros(1, out.shape[-1])))[seats]


def _padded_outer(x: Tensor, y: Tensor, picks: Sorted) -> Tensor:
    seats, capacity = _seats(picks)
    num_experts = picks.ends_E.numel()
    seated = [_seated(z, seats, num_experts, capacity) for z in (x, y)]
    return torch.bmm(seated[0].mT, seated[1])


Form = tuple[Callable[[Tensor, Tensor, Sorted], Tensor], Callable[[Tensor, Tensor, Sorted], Tensor]]
FORMS: dict[str, Form] = {
    "loop": (_loop_rows, _loop_outer),
    "grouped": (_grouped_rows, _grouped_outer),
    "padded": (_padded_rows, _padded_outer),
}


class _Experts(torch.autograd.Function):
    """sum over a token's picks of weight * down(silu(gate x) * up x), in the dtype of x.

    The pick's weight is applied at the narrow middle (I wide), not at the output (H wide): the same sum, less traffic.
    """

    @staticmethod
    def forward(ctx, x_TH, gate_up, down, weights_TK, picks: Sorted, form: str):
        rows, _ = FORMS[form]
        top_k = weights_TK.shape[1]
        gate_up, down = gate_up.to(x_TH.dtype), down.to(x_TH.dtype)
        token_S = picks.order_S // top_k
        x_SH = x_TH[token_S]
        gate, up = rows(x_SH, gate_up.mT, picks).chunk(2, -1)
        weight_S = weights_TK.reshape(-1)[picks.order_S].unsqueeze(-1)
        middle = (F.silu(gate.float()) * up * weight_S).to(x_TH.dtype)
        out_SH = rows(middle, down.mT, picks)
        ctx.save_for_backward(x_SH, gate, up, weight_S, gate_up, down, token_S)
        ctx.picks, ctx.form, ctx.top_k = picks, form, top_k
        return out_SH[picks.place_S].view(-1, top_k, x_TH.shape[1]).sum(1)

    @staticmethod
    def backward(ctx, grad_TH):
        rows, outer = FORMS[ctx.form]
        x_SH, gate, up, weight_S, gate_up, down, token_S = ctx.saved_tensors
        picks, dtype = ctx.picks, x_SH.dtype
        gate, up = gate.float(), up.float()
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_SH = grad_TH.to(dtype)[token_S]
        grad_middle = rows(grad_SH, down, picks).float()
        grad_down = outer(grad_SH, (silu * up * weight_S).to(dtype), picks)
        grad_weight = (grad_middle * silu * up).sum(-1)
        grad_middle = grad_middle * weight_S
        grad_gate = grad_middle * up * (sigmoid + silu * (1 - sigmoid))
        grad_both = torch.cat((grad_gate, grad_middle * silu), -1).to(dtype)
        grad_gate_up = outer(grad_both, x_SH, picks)
        grad_x = rows(grad_both, gate_up, picks)[picks.place_S].view(-1, ctx.top_k, x_SH.shape[1]).sum(1)
        grad_weights = grad_weight[picks.place_S].view(-1, ctx.top_k)
        return grad_x, grad_gate_up.float(), grad_down.float(), grad_weights, None, None


def run_experts(
    x_TH: Tensor, gate_up: Tensor, down: Tensor, weights_TK: Tensor, picks: Sorted, form: str
) -> Tensor:
    """x [T, H], gate_up [E, 2I, H], down [E, H, I] (float32 masters), weights [T, K] float32 -> [T, H]."""
    return _Experts.apply(x_TH, gate_up, down, weights_TK, picks, form)


def check_form(form: str, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of a form against the loop in float32 (values and gradients; one expert is empty)."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (512, 128), "gate_up": (16, 32, 128), "down": (16, 128, 16)}
    values = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    ids = torch.rand(512, 15, generator=generator).topk(10).indices
    ids[ids >= 7] += 1  # expert 7 is empty
    weights = torch.rand(512, 10, generator=generator).softmax(-1)

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.to(device, copy=True).requires_grad_() for value in (*values.values(), weights)]
        x, gate_up, down, w = leaves
        out = run_experts(x.to(dtype), gate_up, down, w, sort_picks(ids.to(device), 16), name)
        out.float().square().sum().backward()
        return [out.detach().float(), *(leaf.grad for leaf in leaves)]

    def distance(got: Tensor, want: Tensor) -> float:
        return float((got - want).norm() / want.norm())

    errors = [distance(*pair) for pair in zip(run(form, dtype), run("loop", torch.float32), strict=True)]
    return max(float("inf") if error != error else error for error in errors)


def choose_form(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The first form that works here, and why the ones before it do not."""
    if device.type != "cuda":
        return "loop", "no CUDA device"
    said = []
    for form in ("grouped", "padded"):
        try:
            error = check_form(form, device, dtype)
        except Exception as problem:  # a form that cannot run must not end the run
            said.append(f"{form}: {type(problem).__name__}: {problem}")
            continue
        said.append(f"{form}: off by {error:.1e}")
        if error < 3e-2:
            return form, "; ".join(said)
    return "loop", "; ".join(said)

"""AdamW for everything, or Muon for the matrices and AdamW for the rest; both run inside a captured graph.

The learning rate is one tensor on the device, written by the host between replays.
"""

import torch
from torch import Tensor, nn

NO_DECAY = ("embed_tokens", "ngram_embedding", "norm", "dt_bias", "A_log")
ADAM_ONLY = (
    *NO_DECAY,
    "conv1d",
    "mlp.gate.weight",
    "shared_expert_gate",
    "block_inject_weight",
    "in_proj_a",
    "in_proj_b",
)
MUON_MATCH = (
    0.2  # an update's root mean square as a share of the learning rate, near AdamW's own (arXiv 2502.16982)
)
SERIES = (3.4445, -4.7750, 2.0315)


def decays(name: str) -> bool:
    return not any(part in name for part in NO_DECAY)


def trained(model: nn.Module, with_mtp: bool) -> dict[str, nn.Parameter]:
    """Parameters that get a gradient: not the indexer, and the MTP layer only once it is trained."""
    named = {name: parameter for name, parameter in model.named_parameters() if ".indexer." not in name}
    return {name: p for name, p in named.items() if with_mtp or not name.startswith("mtp.")}


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Near-orthogonal matrices of x [M, r, c] by a Newton-Schulz series in bf16."""
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = SERIES
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.float()
    return x if wide else x.mT


class Muon:
    """Momentum orthogonalised per matrix; matrices of one shape go through the series together."""

    def __init__(self, named: dict[str, nn.Parameter], lr: Tensor, decay: float, momentum: float = 0.95):
        self.named, self.lr, self.decay, self.momentum = named, lr, decay, momentum
        self.buffers = {name: torch.zeros_like(p) for name, p in named.items()}
        self.stacks: dict[tuple[int, int], list[str]] = {}
        for name, parameter in named.items():
            self.stacks.setdefault(self.matrices(name, parameter).shape[-2:], []).append(name)

    @staticmethod
    def matrices(name: str, x: Tensor) -> Tensor:
        """[M, r, c]: gate and up of an expert are two matrices."""
        if name.endswith("gate_up_proj"):
            x = x.unflatten(1, (2, -1))
        return x.reshape(-1, *x.shape[-2:])

    @torch.no_grad()
    def step(self) -> None:
        for (rows, columns), names in self.stacks.items():
            live = [name for name in names if self.named[name].grad is not None]
            if not live:
                continue
            ahead = []
            for name in live:
                grad, buffer = self.named[name].grad, self.buffers[name]
                buffer.lerp_(grad, 1 - self.momentum)
                ahead.append(self.matrices(name, grad.lerp(buffer, self.momentum)))
            updates = orthogonal(torch.cat(ahead)).split([len(part) for part in ahead])
            scale = self.lr * (MUON_MATCH * max(rows, columns) ** 0.5)
            for name, update in zip(live, updates, strict=True):
                parameter = self.named[name]
                parameter.mul_(1 - self.lr * self.decay)
                parameter.sub_(update.reshape(parameter.shape) * scale)


class Optimizer:
    """`lr` is written by `set_lr`; `step` clips the trunk and the MTP layer apart, so neither slows the other."""

    def __init__(self, model: nn.Module, kind: str, decay: float, clip: float):
        self.named = trained(model, with_mtp=True)
        device = next(iter(self.named.values())).device
        self.kind, self.clip = kind, clip
        self.lr = torch.zeros((), device=device)
        matrices = (
            {}
            if kind == "adamw"
            else {
                name: p
                for name, p in self.named.items()
                if p.ndim >= 2 and not any(part in name for part in ADAM_ONLY)
            }
        )
        rest = {name: p for name, p in self.named.items() if name not in matrices}
        groups = [
            {"params": [p for name, p in rest.items() if decays(name)], "weight_decay": decay},
            {"params": [p for name, p in rest.items() if not decays(name)], "weight_decay": 0.0},
        ]
        on_gpu = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            groups, lr=self.lr if on_gpu else 0.0, betas=(0.9, 0.95), fused=True, capturable=on_gpu
        )
        self.muon = Muon(matrices, self.lr, decay) if matrices else None

    def set_lr(self, value: float) -> None:
        self.lr.fill_(value)
        if self.lr.device.type != "cuda":
            for group in self.adam.param_groups:
                group["lr"] = value

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def step(self) -> Tensor:
        """One update; returns the trunk's gradient norm before clipping."""
        trunk = [p for name, p in self.named.items() if not name.startswith("mtp.") and p.grad is not None]
        mtp = [p for name, p in self.named.items() if name.startswith("mtp.") and p.grad is not None]
        norm = nn.utils.clip_grad_norm_(trunk, self.clip, foreach=True)
        if mtp:
            nn.utils.clip_grad_norm_(mtp, self.clip, foreach=True)
        self.adam.step()
        if self.muon is not None:
            self.muon.step()
        return norm

    def moments(self, parameter: nn.Parameter) -> list[Tensor]:
        """The tensors of the same shape that belong to a parameter."""
        state = self.adam.state.get(parameter, {})
        found = [state[key] for key in ("exp_avg", "exp_avg_sq") if key in state]
        if self.muon is not None:
            found += [self.muon.buffers[name] for name, p in self.muon.named.items() if p is parameter]
        return found

    def state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self.named.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"adam.{key}/{name}"] = value
            if self.muon is not None and name in self.muon.buffers:
                tensors[f"muon/{name}"] = self.muon.buffers[name]
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        for key, value in tensors.items():
            where, name = key.split("/", 1)
            parameter = self.named[name]
            value = value.to(parameter.device)
            if where == "muon" and self.muon is not None and name in self.muon.buffers:
                self.muon.buffers[name].copy_(value)
            elif where.startswith("adam.") and not (self.muon is not None and name in self.muon.named):
                self.adam.state[parameter][where.removeprefix("adam.")] = value

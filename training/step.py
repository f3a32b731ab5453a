"""One training step, eager or as one CUDA graph, and what it adds up on the device.

Batches are gathered on the device from the whole corpus by a plan and a counter, so a replay needs nothing from the
host but a learning rate.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training.balance import Balance
from training.data import Corpus, plan
from training.model import Run, TinyModel
from training.optim import Optimizer
from training.parts import Parts

PLAIN = Parts()
WARM_STEPS = 3  # eager steps before a capture; they train like the others


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Sequence length, whether the MTP layer learns, and the progress at which the phase ends."""

    length: int
    with_mtp: bool
    until: float

    @classmethod
    def parse(cls, text: str) -> "Phase":
        shape, until = text.split("@")
        length, *rest = shape.split("+")
        return cls(length=int(length), with_mtp=rest == ["mtp"], until=float(until))


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    batch_tokens: int = 65536
    dtype: torch.dtype = torch.bfloat16
    form: str = "grouped"
    dropout: float = 0.0
    parts: Parts = PLAIN
    planned_steps: int = 8000
    seed: int = 0


class Totals:
    """Sums since the last read, on the device: steps, losses, gradient norm, picks by layer and expert."""

    NAMES = ("steps", "lm", "mtp", "balance", "grad_norm")

    def __init__(self, layers: int, experts: int, device: torch.device):
        self.sums = torch.zeros(len(self.NAMES), device=device)
        self.counts = torch.zeros(layers, experts, device=device, dtype=torch.int64)

    def add(self, losses: dict[str, Tensor], norm: Tensor, counts: list[Tensor]) -> None:
        zero = torch.zeros_like(norm)
        values = {"steps": zero + 1, "grad_norm": norm} | {k: v.detach() for k, v in losses.items()}
        self.sums += torch.stack([values.get(name, zero) for name in self.NAMES])
        self.counts[: len(counts)] += torch.stack(counts)

    def read(self) -> dict[str, float]:
        """Means since the last read (waits for the device), and start again. Counts stay until `take_counts`."""
        values = dict(zip(self.NAMES, self.sums.tolist(), strict=True))
        self.sums.zero_()
        steps = max(values.pop("steps"), 1.0)
        return {name: value / steps for name, value in values.items()}

    def take_counts(self) -> Tensor:
        counts = self.counts.cpu().clone()  # on a CPU `.cpu()` is the tensor itself
        self.counts.zero_()
        return counts


class Stepper:
    """Runs steps of one phase. `graph=True` captures forward, backward, clipping and update in one CUDA graph."""

    def __init__(
        self,
        model: TinyModel,
        optimizer: Optimizer,
        corpus: Corpus,
        phase: Phase,
        config: StepConfig,
        totals: Totals,
        balance: Balance,
    ):
        self.model, self.optimizer, self.corpus, self.phase, self.config = (
            model,
            optimizer,
            corpus,
            phase,
            config,
        )
        self.totals, self.balance = totals, balance
        self.batch = max(1, config.batch_tokens // phase.length)
        self.tokens = self.batch * phase.length
        device = corpus.tokens.device
        span = phase.length + 2
        self.starts = plan(corpus, self.batch, span, config.planned_steps, config.seed + phase.length).to(
            device
        )
        self.offsets = torch.arange(span, device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0

    def window(self) -> Tensor:
        row = self.starts.index_select(0, (self.counter % self.starts.shape[0]).view(1)).view(-1, 1)
        return self.corpus.tokens[row.long() + self.offsets].long()

    def losses(self, window: Tensor) -> tuple[dict[str, Tensor], Run]:
        config = self.config
        run = Run(dtype=config.dtype, form=config.form, dropout=config.dropout, parts=config.parts)
        return self.model.losses(window, run, self.phase.with_mtp), run

    def work(self) -> None:
        losses, run = self.losses(self.window())
        total = losses["lm"] + self.balance.loss(run.balance)
        if "mtp" in losses:
            total = total + losses["mtp"]
        total.backward()
        norm = self.optimizer.step()
        self.totals.add(losses, norm, run.counts)
        self.counter += 1

    def eager(self) -> None:
        self.optimizer.zero_grad()
        self.work()
        self.taken += 1

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.work()
        self.graph = graph

    def step(self) -> None:
        if self.graph is None:
            self.eager()
        else:
            self.graph.replay()
            self.taken += 1

    def close(self) -> None:
        """Let go of the graph's memory before another phase takes its own."""
        self.optimizer.zero_grad()
        self.graph = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def prepare(build: Callable[[], Stepper], graph: bool) -> tuple[Stepper, str]:
    """A stepper, captured if that works; otherwise eager, with the reason in words."""
    stepper = build()
    if not graph:
        return stepper, "eager"
    try:
        stepper.capture()
    except Exception as problem:  # training goes on without a graph rather than not at all
        stepper.close()
        return stepper, f"eager: {type(problem).__name__}: {problem}"
    return stepper, "graph"

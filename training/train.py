"""Train the embedded model for a number of minutes: one GPU, one CUDA graph a phase, resumable, exports at the end.

    python -m training.train --minutes 8.5 --stage 1/2 --out OUT
    python -m training.train --minutes 8.5 --stage 2/2 --resume OUT/model --out OUT

The schedule goes by time: progress is the share of all stages' minutes that has passed. See `training/TRAINING.md`.
"""

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.balance import Balance
from training.data import MIX, Corpus, HeldOut, held_out, pieces, tokenise
from training.experts import choose_form
from training.export import export, load
from training.loss import token_losses
from training.model import Run, TinyModel, tiny_config
from training.optim import Optimizer
from training.parts import Parts
from training.revive import revive
from training.step import Phase, StepConfig, Stepper, Totals, prepare

RESERVE_SEC = 12.0  # kept for the export at the end
PLANNED_STEPS = 8000  # of one phase; more would begin the plan again
CHECK_STEPS = 20  # the speed is judged over these


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for model/, train.jsonl and checkpoints")
    add("--text", type=Path, default=Path("training/work/train.jsonl.ppmd"))
    add("--tokenizer", type=Path, default=Path("warmset/models/tiny/tokenizer.json"))
    add("--held-out", type=Path, default=Path("warmset/models/data/evaluation.jsonl.xz"))
    add(
        "--state",
        type=Path,
        default=Path("training/work/state"),
        help="float32 weights and moments; token cache",
    )
    add("--resume", type=Path, help="exported folder to go on from; the full state is used if it matches")
    add("--minutes", type=float, default=8.5, help="wall clock of this stage, start-up included")
    add("--stage", default="1/1", help="i/n: which part of one schedule this run is")
    add("--max-steps", type=int, default=0, help="go by steps instead of minutes (for tests)")
    add("--phases", default="512@0.6,512+mtp@0.75,2048+mtp@0.93,8192+mtp@1.0", help="LENGTH[+mtp]@END,...")
    add("--batch-tokens", type=int, default=65536)
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--lr", type=float, default=4e-3)
    add("--final-lr", type=float, default=0.02, help="share of --lr at the end")
    add("--warmup-steps", type=int, default=150)
    add("--decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0)
    add("--balance", type=float, default=1e-3, help="weight of a layer's balance loss at the start")
    add("--target-share", type=float, default=0.7, help="of the busiest third, steered to; 0 = do not steer")
    add(
        "--revive-first",
        type=Path,
        help="a profile: before the first step, bring back what it never saw picked",
    )
    add("--revive-until", type=float, default=0.7, help="of the schedule")
    add("--dropout", type=float, default=0.0)
    add("--revive-every", type=int, default=100, help="steps between looks at the routing; 0 = never")
    add("--eval-every", type=float, default=0.1, help="of this stage's time")
    add("--eval-tokens", type=int, default=20000, help="held-out tokens of each kind")
    add("--min-tokens-per-sec", type=float, default=0.0, help="stop if the first steps are slower")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="fuse the pointwise parts with torch.compile")
    add("--no-graph", action="store_true")
    add("--width", default="", help="changes to the shape as JSON (for tests)")
    add("--smoke", action="store_true", help="check and time everything in about 90 s, then stop")
    return parser.parse_args(argv)


class Clock:
    """Progress through the whole schedule, by time or by steps."""

    def __init__(self, stage: str, minutes: float, max_steps: int, started: float):
        index, count = (int(part) for part in stage.split("/"))
        self.index, self.count, self.max_steps = index - 1, count, max_steps
        self.started, self.budget = started, minutes * 60 - RESERVE_SEC
        self.first = 0.0  # of this stage's budget: what was gone when the first step began

    def begin(self) -> None:
        self.first = 0.0 if self.max_steps else (time.monotonic() - self.started) / self.budget

    def here(self, steps: int) -> float:
        """Progress through this stage, 0 to 1."""
        if self.max_steps:
            return min(1.0, steps / self.max_steps)
        spent = (time.monotonic() - self.started) / self.budget
        return min(1.0, max(0.0, (spent - self.first) / max(1 - self.first, 1e-3)))

    def overall(self, steps: int) -> float:
        return (self.index + self.here(steps)) / self.count


def learning_rate(options: argparse.Namespace, progress: float, steps: int, restored: bool) -> float:
    """Cosine over the whole schedule; a linear start over a stage's first steps, short if the moments are kept."""
    floor = options.final_lr
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    warmup = options.warmup_steps // 10 if restored else options.warmup_steps
    return options.lr * cosine * min(1.0, (steps + 1) / max(warmup, 1))


class Log:
    """JSON lines in a file, a short line on the screen every 10 s."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields) -> None:
        self.file.write(json.dumps({"kind": kind} | fields) + "\n")
        self.file.flush()
        shown = " ".join(f"{key}={short(value)}" for key, value in fields.items())
        print(f"{kind}: {shown}", flush=True)


def short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "/".join(short(part) for part in value)
    return str(value)


def spread(counts_LE: torch.Tensor, top_k: int) -> dict[str, list]:
    """By layer: experts without a pick in 100,000 tokens' worth (expected), and the busiest third's share of picks."""
    live = counts_LE[counts_LE.sum(1) > 0].double()
    top = max(1, round(0.33 * live.shape[1])) if live.numel() else 1
    share = live.sort(1, descending=True).values[:, :top].sum(1) / live.sum(1)
    dead = (live * 100_000 < live.sum(1, keepdim=True) / top_k).sum(1)
    return {"dead": dead.tolist(), "top33": [round(x, 3) for x in share.tolist()]}


@torch.no_grad()
def held_out_loss(
    model: TinyModel, documents: list[HeldOut], run: Run, budget: int, device: torch.device
) -> dict[str, float]:
    """Nats a token by kind over the first `budget` tokens of each, and for the mix."""
    losses = {}
    for kind in MIX:
        total, count = 0.0, 0
        for document in (d for d in documents if d.kind == kind):
            for piece in pieces(document, 2048):
                if count >= budget:
                    break
                ids = piece.to(device)[None]
                fresh = Run(dtype=run.dtype, form=run.form)
                hidden = model.hidden(ids[:, :-1], fresh)
                total += float(token_losses(hidden[0], model.embedding, ids[0, 1:]).sum())
                count += ids.shape[1] - 1
        if count:
            losses[kind] = total / count
    weight = sum(MIX[kind] for kind in losses)
    losses["mix"] = sum(MIX[kind] * value for kind, value in losses.items()) / weight if losses else math.nan
    return losses


def fingerprint(model: TinyModel) -> str:
    """Ties a state file to the exported weights beside it."""
    weight = model.embedding.detach().bfloat16().float()
    return f"{float(weight.double().sum()):.9e}/{float(weight.double().square().sum()):.9e}"


def save_state(model: TinyModel, optimizer: Optimizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"param/{name}": p.detach() for name, p in optimizer.named.items()}
    tensors |= {f"optim/{name}": value for name, value in optimizer.state().items()}
    tensors = {name: value.cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "state.safetensors", metadata={"model": fingerprint(model)})


def load_state(model: TinyModel, optimizer: Optimizer, folder: Path) -> bool:
    """Take float32 weights and moments if the file on this machine belongs to the model just loaded."""
    path = folder / "state.safetensors"
    if not path.exists():
        return False
    tensors = load_file(path)
    if any(tensors[f"param/{name}"].shape != p.shape for name, p in optimizer.named.items()):
        return False  # of another shape of model
    exported = fingerprint(model)
    kept = {name: p.detach().clone() for name, p in optimizer.named.items()}
    with torch.no_grad():
        for name, parameter in optimizer.named.items():
            parameter.copy_(tensors[f"param/{name}"])
    if fingerprint(model) != exported:
        with torch.no_grad():
            for name, parameter in optimizer.named.items():
                parameter.copy_(kept[name])
        return False
    prefix = "optim/"
    optimizer.load({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return True


class Trainer:
    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, time.monotonic()
        self.device = torch.device(options.device)
        self.log = Log(options.out / "train.jsonl")
        torch.manual_seed(options.seed)
        self.generator = torch.Generator().manual_seed(options.seed)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        form, why = choose_form(self.device, dtype)
        self.log.write("experts", form=form, why=why)
        self.model = self.build()
        self.optimizer = Optimizer(self.model, options.optimizer, options.decay, options.clip)
        self.restored = options.resume is not None and load_state(self.model, self.optimizer, options.state)
        self.config = StepConfig(
            batch_tokens=options.batch_tokens,
            dtype=dtype,
            form=form,
            dropout=options.dropout,
            parts=Parts.compiled() if options.compile else Parts(),
            seed=options.seed + 1000 * int(options.stage.split("/")[0]),
            planned_steps=options.max_steps + 1 if options.max_steps else PLANNED_STEPS,
        )
        config = self.model.config
        layers = config.num_hidden_layers + 1
        self.totals = Totals(layers, config.num_experts, self.device)
        self.balance = Balance(layers, options.balance, options.target_share, self.device)
        self.corpus = self.read_text()
        self.documents = held_out(options.held_out, options.tokenizer) if options.held_out.exists() else []
        self.phases = [Phase.parse(text) for text in options.phases.split(",")]
        self.clock = Clock(options.stage, options.minutes, options.max_steps, self.started)
        self.steps = self.tokens = 0
        self.stepper: Stepper | None = None
        self.stop = False
        self.log.write(
            "start",
            restored=self.restored,
            resume=str(options.resume or ""),
            text=self.corpus.describe(),
            held_out=len(self.documents),
            seconds=time.monotonic() - self.started,
            options={k: str(v) for k, v in vars(options).items()},
        )

    def build(self) -> TinyModel:
        if self.options.resume is not None:
            return load(self.options.resume).to(self.device)
        changes = json.loads(self.options.width) if self.options.width else {}
        return TinyModel(tiny_config(**changes)).to(self.device)

    def read_text(self) -> Corpus:
        cache = self.options.state / "tokens.safetensors"
        tokens = tokenise(self.options.text, self.options.tokenizer, 0, cache)
        joined = Corpus.join(tokens)
        return Corpus(joined.tokens.to(self.device), joined.ranges)

    def phase_at(self, progress: float) -> Phase:
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])

    def enter(self, phase: Phase) -> None:
        began = time.monotonic()
        if self.stepper is not None:
            self.stepper.close()

        def build() -> Stepper:
            return Stepper(
                self.model, self.optimizer, self.corpus, phase, self.config, self.totals, self.balance
            )

        self.stepper, how = prepare(build, graph=self.device.type == "cuda" and not self.options.no_graph)
        took = time.monotonic() - began
        self.log.write(
            "phase", length=phase.length, mtp=phase.with_mtp, batch=self.stepper.batch, how=how, seconds=took
        )
        self.note(self.stepper.taken)

    def note(self, steps: int) -> None:
        assert self.stepper is not None
        self.steps += steps
        self.tokens += steps * self.stepper.tokens

    def bring_back_unseen(self, profile: Path) -> None:
        """Revive the trunk's experts that a profile of training text never saw picked; the MTP layer has no counts."""
        seen = torch.tensor(json.loads(profile.read_text(encoding="utf-8"))["counts"], dtype=torch.int64)
        counts = torch.zeros_like(self.totals.counts, device="cpu")
        counts[: len(seen)] = seen
        revived = revive(self.model, self.optimizer, counts, self.generator, least=1.0 / seen.sum())
        self.log.write("routing", step=0, revived=revived, profile=profile.name)

    def run(self) -> int:
        if self.options.revive_first is not None:
            self.bring_back_unseen(self.options.revive_first)
        self.optimizer.set_lr(self.rate(self.clock.overall(0)))
        self.enter(self.phase_at(self.clock.overall(0)))
        self.clock.begin()
        shown, next_eval, halfway = time.monotonic(), self.options.eval_every, False
        checked = self.options.min_tokens_per_sec <= 0
        mark, mark_tokens = time.monotonic(), self.tokens
        events: list = []
        while not self.stop and (here := self.clock.here(self.steps)) < 1.0:
            progress = self.clock.overall(self.steps)
            assert self.stepper is not None
            if (phase := self.phase_at(progress)) != self.stepper.phase:
                self.enter(phase)
            self.optimizer.set_lr(self.rate(progress))
            self.stepper.step()
            self.note(1)
            self.throttle(events)
            every = self.options.revive_every
            if every and self.steps % every == 0:
                self.tend(progress)
            if not checked and self.steps >= CHECK_STEPS:
                self.synchronize()
                checked = True
                speed = (self.tokens - mark_tokens) / (time.monotonic() - mark)
                if speed < self.options.min_tokens_per_sec:
                    self.log.write("too slow", tokens_per_sec=speed, least=self.options.min_tokens_per_sec)
                    return 3
            if time.monotonic() - shown > 10 or (self.options.max_steps and self.steps % 10 == 0):
                shown = time.monotonic()
                if not self.report(progress, shown - mark, self.tokens - mark_tokens):
                    return 4
                mark, mark_tokens = time.monotonic(), self.tokens
            if here >= next_eval:
                next_eval += self.options.eval_every
                self.evaluate()
            if here >= 0.5 and not halfway:
                halfway = True
                export(self.model, self.options.out / "model")
        self.finish()
        return 0

    def rate(self, progress: float) -> float:
        return learning_rate(self.options, progress, self.steps, self.restored)

    def throttle(self, events: list) -> None:
        """Stay at most two steps ahead of the device, so that the clock and the schedule mean something."""
        if self.device.type == "cuda":
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > 2:
                events.pop(0).synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def spread(self, counts: torch.Tensor) -> dict[str, list]:
        return spread(counts, self.model.config.num_experts_per_tok)

    def tend(self, progress: float) -> None:
        """Look after the routing: steer each layer's balance, bring quiet experts back."""
        counts = self.totals.take_counts()
        shares = self.spread(counts)
        balance = self.balance.steer(shares["top33"])
        revived = [0] * len(counts)
        if progress < self.options.revive_until:
            revived = revive(self.model, self.optimizer, counts, self.generator)
        self.log.write("routing", step=self.steps, revived=revived, balance=balance, **shares)

    def report(self, progress: float, seconds: float, tokens: int) -> bool:
        means = self.totals.read()
        self.log.write(
            "step",
            step=self.steps,
            tokens=self.tokens,
            progress=progress,
            **means,
            lr=float(self.optimizer.lr),
            tokens_per_sec=tokens / seconds,
            **self.spread(self.totals.counts.cpu()),
        )
        if not math.isfinite(means["lm"]):
            print("The loss is not finite; the last export stands.", file=sys.stderr)
            return False
        return True

    def evaluate(self) -> None:
        began = time.monotonic()
        run = Run(dtype=self.config.dtype, form=self.config.form)
        losses = held_out_loss(self.model, self.documents, run, self.options.eval_tokens, self.device)
        seconds = time.monotonic() - began
        self.log.write(
            "held_out", step=self.steps, **losses, perplexity=math.exp(losses["mix"]), seconds=seconds
        )

    def finish(self) -> None:
        self.synchronize()
        size = export(self.model, self.options.out / "model")
        self.log.write("export", step=self.steps, tokens=self.tokens, bytes=size, stopped=self.stop)
        save_state(self.model, self.optimizer, self.options.state)
        self.evaluate()
        self.log.write("end", seconds=time.monotonic() - self.started)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.smoke:
        from training.smoke import smoke

        return smoke(options)
    trainer = Trainer(options)

    def ask_to_stop(*_) -> None:
        trainer.stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    return trainer.run()


if __name__ == "__main__":
    sys.exit(main())

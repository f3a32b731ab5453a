"""Measure the embedded model on its held-out text and hold it against the bars: `python -m training.evaluate --check`.

Runs the training form in float32 (equal to transformers' own forward; a test holds that) on the CPU in under two
minutes, or on a GPU. Exits 1 if a bar is missed and `--check` is given.
"""

import argparse
import json
import math
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import KINDS, MIX, HeldOut, held_out
from training.experts import choose_form
from training.export import load
from training.measures import (
    POSITION_BINS,
    dead_share,
    largest_rise,
    margin_swaps,
    most_used,
    picks_share,
    position_losses,
    smallest_rise,
)
from training.model import Run, TinyModel

TINY = Path("warmset/models/tiny")
EVALUATION = Path("warmset/models/data/evaluation.jsonl.xz")
CONTEXT = 8192
ROUTED_TOKENS = 100_000  # of the mix, for dead experts and shares
MARGINS = (0.05, 0.1, 0.25)
MARGIN_STRIDE = 10  # every tenth of those tokens goes through the swaps
MTP_TOKENS = 30_000


@dataclass(frozen=True)
class Bar:
    key: str
    sign: str
    limit: float
    what: str


# A value of NaN (not measured) is a miss.
BARS = (
    Bar("perplexity_mix", "<=", 13.0, "held-out perplexity on the mix (60% prose, 25% code, 15% Chinese)"),
    Bar(
        "position_rise", "<=", 1.02, "loss of a position range over the one before it, the same text at each"
    ),
    Bar("dead_share", "<=", 0.05, "experts never picked in 100,000 held-out tokens, worst layer"),
    Bar("top_share_min", ">=", 0.60, "held-out picks of the 33% most used in training, least of the layers"),
    Bar("top_share_max", "<=", 0.90, "held-out picks of the 33% most used in training, most of the layers"),
    Bar("swap_growth", ">=", 1.25, "share of tail cold picks swapped, each margin over the one before"),
    Bar("mtp_agreement", ">=", 0.45, "MTP top-1 equal to the trunk's own next token"),
    Bar("weight_bytes", "<=", 40e6, "bytes of weights on disk"),
    Bar("largest_shard_bytes", "<", 15e6, "bytes of the largest shard"),
)
SIGNS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass
class Sums:
    """What the pass over the held-out text leaves."""

    nats: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    documents: dict[str, list[Tensor]] = field(default_factory=dict)  # losses of long documents, by kind
    depths: dict[str, list[list[Tensor]]] = field(
        default_factory=dict
    )  # the same tokens at each depth, by kind
    counts: Tensor | None = None
    routed: dict[str, int] = field(default_factory=dict)
    swaps: dict[float, list[list[int]]] = field(default_factory=dict)  # margin -> layer -> [cold, swapped]
    mtp: list[int] = field(default_factory=lambda: [0, 0])


def quotas(documents: list[HeldOut], total: int) -> dict[str, int]:
    """Tokens of each kind whose routing counts: the mix's shares, topped up where a kind has too little text."""
    have = {kind: sum(len(d.ids) - 1 for d in documents if d.kind == kind) for kind in KINDS}
    take = {kind: min(have[kind], round(total * MIX[kind])) for kind in KINDS}
    for kind in KINDS:
        take[kind] += min(have[kind] - take[kind], max(0, total - sum(take.values())))
    return take


class Evaluation:
    def __init__(self, model: TinyModel, documents: list[HeldOut], training_counts: Tensor | None, form: str):
        self.model, self.documents, self.form = model.eval(), documents, form
        self.resident = None if training_counts is None else most_used(training_counts)
        self.sums = Sums()
        self.left = quotas(documents, ROUTED_TOKENS)

    @torch.no_grad()
    def run(self) -> Sums:
        for document in self.documents:
            losses = [
                self.piece(document, document.ids[start : start + CONTEXT + 1])
                for start in range(0, len(document.ids) - 1, CONTEXT)
            ]
            self.add(document, losses)
            if len(losses[0]) == CONTEXT:
                self.depths(document, losses[0])
        return self.sums

    def depths(self, document: HeldOut, whole: Tensor) -> None:
        """Losses of the document's last 6,144 tokens, read at each depth of context: the same text three times.

        Text further down a document is other text, harder or easier; what the bar asks is whether depth itself
        hurts, so the same tokens are read as the positions 0-512, 512-2,048 and 2,048-8,192 of a window.
        """
        first = POSITION_BINS[-1][0]
        shallower = [self.at_depth(document.ids, first, start, end) for start, end in POSITION_BINS[:-1]]
        self.sums.depths.setdefault(document.kind, []).append([*shallower, whole[first:].cpu()])

    def at_depth(self, ids: Tensor, first: int, start: int, end: int) -> Tensor:
        """Losses of tokens `first` to the context's end, each scored at a position from `start` to `end`."""
        begins = range(first - start, CONTEXT - end + 1, end - start)
        windows = torch.stack([ids[begin : begin + end + 1] for begin in begins]).to(
            self.model.embedding.device
        )
        hidden = self.model.hidden(windows[:, :-1], Run(form=self.form))[:, start:]
        logits = F.linear(hidden.flatten(0, 1), self.model.embedding)
        return F.cross_entropy(logits, windows[:, 1 + start :].flatten(), reduction="none").cpu()

    def add(self, document: HeldOut, losses: list[Tensor]) -> None:
        sums, kind = self.sums, document.kind
        whole = torch.cat(losses)
        sums.nats[kind] = sums.nats.get(kind, 0.0) + float(whole.double().sum())
        sums.tokens[kind] = sums.tokens.get(kind, 0) + len(whole)
        sums.num_bytes[kind] = sums.num_bytes.get(kind, 0) + document.num_bytes
        sums.documents.setdefault(kind, []).append(losses[0].cpu())

    def piece(self, document: HeldOut, ids: Tensor) -> Tensor:
        model = self.model
        ids = ids.to(model.embedding.device)[None]
        run = Run(form=self.form, keep_logits=True)
        hidden = model.hidden(ids[:, :-1], run)
        logits = F.linear(hidden[0], model.embedding)
        self.routing(document.kind, run)
        self.ahead(ids, hidden, logits.argmax(-1))
        return F.cross_entropy(logits, ids[0, 1:], reduction="none")

    def ahead(self, ids: Tensor, hidden: Tensor, own: Tensor) -> None:
        """Does the MTP layer's guess from t equal the trunk's own from t + 1?"""
        if self.sums.mtp[1] >= MTP_TOKENS or ids.shape[1] < 4:
            return
        # slices of the document's start keep the cost down; the layer sees them as it would in use
        span = min(2048, ids.shape[1] - 2)
        run = Run(form=self.form)
        guess = self.model.mtp_hidden(hidden[:, :span], ids[:, 1 : span + 1], run)
        same = F.linear(guess[0], self.model.embedding).argmax(-1) == own[1 : span + 1]
        self.sums.mtp[0] += int(same.sum())
        self.sums.mtp[1] += len(same)

    def routing(self, kind: str, run: Run) -> None:
        take = min(self.left[kind], len(run.logits[0]))
        if take == 0:
            return
        self.left[kind] -= take
        self.sums.routed[kind] = self.sums.routed.get(kind, 0) + take
        top_k = self.model.config.num_experts_per_tok
        counts = torch.stack([pick_counts(logits[:take], top_k) for logits in run.logits]).cpu()
        self.sums.counts = counts if self.sums.counts is None else self.sums.counts + counts
        if self.resident is None:
            return
        for margin in MARGINS:
            layers = self.sums.swaps.setdefault(margin, [[0, 0] for _ in run.logits])
            for layer, logits in enumerate(run.logits):
                scores = logits[:take:MARGIN_STRIDE]
                found = margin_swaps(scores, self.resident[layer].to(scores.device), top_k, margin)
                layers[layer] = [a + b for a, b in zip(layers[layer], found, strict=True)]


def pick_counts(logits_TE: Tensor, top_k: int) -> Tensor:
    ids = logits_TE.topk(top_k, dim=-1).indices.flatten()
    return torch.bincount(ids, minlength=logits_TE.shape[1])


def summarise(evaluation: Evaluation, folder: Path) -> dict[str, object]:
    """Every measured value by name; the bars read from here."""
    sums = evaluation.sums
    nats = {kind: sums.nats[kind] / sums.tokens[kind] for kind in KINDS if sums.tokens.get(kind)}
    share = sum(MIX[kind] for kind in nats)
    mix = sum(MIX[kind] * value for kind, value in nats.items()) / share if nats else math.nan
    bits = {kind: sums.nats[kind] / math.log(2) / sums.num_bytes[kind] for kind in nats}
    by_depth = [depths for found in sums.depths.values() for depths in found]
    positions = [float(torch.cat(losses).mean()) for losses in zip(*by_depth, strict=True)]
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    values: dict[str, object] = {
        "tokens": sums.tokens,
        "perplexity": {kind: math.exp(value) for kind, value in nats.items()},
        "bits_per_byte": bits,
        "bits_per_byte_mix": sum(MIX[kind] * value for kind, value in bits.items()) / share
        if nats
        else math.nan,
        "perplexity_mix": math.exp(mix),
        "position_ranges": [f"{a}-{b}" for a, b in POSITION_BINS],
        "position_losses": positions,
        "position_losses_by_kind": {
            kind: [float(torch.cat(losses).mean()) for losses in zip(*found, strict=True)]
            for kind, found in sums.depths.items()
        },
        "position_losses_other_text": position_losses(
            [d for found in sums.documents.values() for d in found]
        ),
        "position_rise": largest_rise(positions),
        "routed_tokens": sums.routed,
        "mtp_agreement": sums.mtp[0] / sums.mtp[1] if sums.mtp[1] else math.nan,
        "weight_bytes": float(sum(sizes)) if sizes else math.nan,
        "largest_shard_bytes": float(max(sizes)) if sizes else math.nan,
    }
    return values | routing_values(evaluation)


def routing_values(evaluation: Evaluation) -> dict[str, object]:
    sums, nothing = evaluation.sums, math.nan
    values: dict[str, object] = dict.fromkeys(
        ("dead_share", "top_share_min", "top_share_max", "swap_growth"), nothing
    )
    if sums.counts is None:
        return values
    dead = dead_share(sums.counts)
    values |= {"dead_share_by_layer": dead}
    if sum(sums.routed.values()) >= 0.99 * ROUTED_TOKENS:
        values["dead_share"] = max(dead)
    if evaluation.resident is not None:
        shares = picks_share(sums.counts, evaluation.resident)
        swapped = {
            margin: sum(swap for _, swap in layers) / max(1, sum(cold for cold, _ in layers))
            for margin, layers in sums.swaps.items()
        }
        values |= {"top_share_by_layer": shares, "top_share_min": min(shares), "top_share_max": max(shares)}
        values |= {"swap_shares": {str(margin): value for margin, value in swapped.items()}}
        values["swap_growth"] = smallest_rise(list(swapped.values()))
    return values


def judge(values: dict[str, object]) -> list[tuple[Bar, float, bool]]:
    """Each bar with the measured value and whether it passes."""
    judged = []
    for bar in BARS:
        value = values.get(bar.key, math.nan)
        assert isinstance(value, float | int)
        judged.append((bar, float(value), SIGNS[bar.sign](float(value), bar.limit)))
    return judged


def table(judged: list[tuple[Bar, float, bool]]) -> str:
    rows = [
        f"{'pass' if good else 'MISS'}  {value:>14,.4f}  {bar.sign:>2} {bar.limit:<12,g} {bar.what}"
        for bar, value, good in judged
    ]
    return "\n".join(rows)


def read_counts(path: Path) -> Tensor | None:
    """Training counts [L, E] of a profile file, if it is there."""
    if not path.exists():
        return None
    return torch.tensor(json.loads(path.read_text(encoding="utf-8"))["counts"], dtype=torch.float64)


def evaluate(
    folder: Path, evaluation: Path, tokenizer: Path, profile: Path, device: torch.device
) -> dict[str, object]:
    model = load(folder).to(device)
    documents = held_out(evaluation, tokenizer)
    form, _ = choose_form(device, torch.float32) if device.type == "cpu" else ("loop", "")
    work = Evaluation(model, documents, read_counts(profile), form)
    work.run()
    return summarise(work, folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=TINY)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write every measured value here")
    parser.add_argument("--evaluation", type=Path, default=EVALUATION)
    parser.add_argument("--tokenizer", type=Path, help="default: the folder's, else the embedded model's")
    parser.add_argument(
        "--profile", type=Path, help="training counts; default: the folder's profile-mix.json"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    began = time.monotonic()
    own = options.folder / "tokenizer.json"
    tokenizer = options.tokenizer or (own if own.exists() else TINY / "tokenizer.json")
    profile = options.profile or options.folder / "profile-mix.json"
    values = evaluate(options.folder, options.evaluation, tokenizer, profile, torch.device(options.device))
    values["seconds"] = time.monotonic() - began
    if options.json:
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name, value in values.items():
        print(f"{name}: {json.dumps(value)}")
    judged = judge(values)
    print(table(judged))
    return 1 if options.check and not all(good for _, _, good in judged) else 0


if __name__ == "__main__":
    sys.exit(main())

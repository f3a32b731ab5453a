"""Count the router's picks on training text and write the learned profiles: `python -m training.statistics`.

One file for the mix of texts, one for code alone; the engine draws the first residents from them.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from training.data import MIX, Corpus, epochs, tokenise
from training.evaluate import TINY, pick_counts
from training.export import load
from training.model import Run, TinyModel
from warmset.checkpoint import open_checkpoint

WINDOW = 2048


def fingerprint(folder: Path) -> str:
    """What ties a profile to its model: the engine's own."""
    return open_checkpoint(folder).fingerprint()


@torch.no_grad()
def count(
    model: TinyModel, corpus: Corpus, shares: dict[str, float], tokens: int, seed: int
) -> tuple[Tensor, int]:
    """Picks [layers, experts] over about `tokens` training tokens, kinds by `shares`; and the tokens counted."""
    generator = torch.Generator().manual_seed(seed)
    config, seen = model.config, 0
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for kind, share in shares.items():
        first, end = corpus.ranges[kind]
        windows = max(1, round(share * tokens / WINDOW))
        for start in epochs(first, end, min(WINDOW, end - first), windows, generator).tolist():
            ids = corpus.tokens[start : min(start + WINDOW, end)].long()[None].to(model.embedding.device)
            run = Run(keep_logits=True)
            model.hidden(ids, run)
            counts += torch.stack([pick_counts(x, config.num_experts_per_tok) for x in run.logits]).cpu()
            seen += ids.shape[1]
    return counts, seen


def profile(folder: Path, text: str, counts: Tensor, rows: int) -> dict[str, object]:
    return {
        "format": "warmset-profile",
        "version": 1,
        "model": "builtin:tiny",
        "layers": counts.shape[0],
        "experts": counts.shape[1],
        "fingerprint": fingerprint(folder),
        "rows": float(rows),
        "decay": 1.0,
        "text": text,
        "counts": [[float(value) for value in layer] for layer in counts.tolist()],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=TINY)
    parser.add_argument("--text", type=Path, default=Path("training/work/train.jsonl.ppmd"))
    parser.add_argument("--tokenizer", type=Path, default=TINY / "tokenizer.json")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    model = load(options.folder).to(options.device)
    corpus = Corpus.join(tokenise(options.text, options.tokenizer, 0))
    for name, shares in {"mix": MIX, "code": {"code": 1.0}}.items():
        counts, rows = count(model, corpus, shares, options.tokens, seed=1)
        path = options.folder / f"profile-{name}.json"
        path.write_text(json.dumps(profile(options.folder, name, counts, rows)) + "\n", encoding="utf-8")
        print(f"{path}: {rows:,} tokens, {int((counts == 0).sum())} experts without a pick")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the model card and its picture of the router: `python -m training.card FOLDER --logs RUN1.jsonl RUN2.jsonl`.

Everything in the card is read: sources from `corpus.json`, losses from the runs' logs, bars from a fresh evaluation or
a file of one, router counts from the profiles.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from training.evaluate import BARS, EVALUATION, TINY, evaluate, judge, read_counts
from training.measures import most_used, picks_share

CORPUS = Path("warmset/models/data/corpus.json")


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def as_table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    return "\n".join([row(*head), row(*("---" for _ in head)), *(row(*cells) for cells in rows)])


def sources(path: Path) -> str:
    """The sources table, from whatever columns the corpus file has."""
    if not path.exists():
        return "The list of sources is not built yet."
    listed = json.loads(path.read_text(encoding="utf-8"))
    entries = listed.get("sources", listed) if isinstance(listed, dict) else listed
    if isinstance(entries, dict):
        entries = [{"source": name} | fields for name, fields in entries.items()]
    simple = [
        {k: v for k, v in entry.items() if isinstance(v, str | int | float) and k != "copyright"}
        | {f"{split} tokens": f"{counts['tokens']:,}" for split, counts in entry.get("splits", {}).items()}
        for entry in entries
    ]
    columns = tuple(dict.fromkeys(key for entry in simple for key in entry))
    return as_table(columns, [tuple(entry.get(column, "") for column in columns) for entry in simple])


def leaks(path: Path) -> str:
    """How the split was checked, with the counts of the check itself."""
    said = "Documents are split before anything else and near-duplicates are removed."
    if not path.exists():
        return said
    check = json.loads(path.read_text(encoding="utf-8"))["leak_check"]["held_out"]
    return (
        f"{said} No run of {check['run_tokens']} tokens of a held-out text may occur in the training text. The "
        f"corpus builder looks for each of {check['held_out_runs']:,} such runs, of {check['held_out_documents']} "
        f"texts, in all {check['training_tokens']:,} training tokens; it found {check['shared_runs']}."
    )


def runs(logs: list[Path]) -> str:
    rows = []
    for number, path in enumerate(logs, 1):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        held = [line for line in lines if line["kind"] == "held_out"]
        if not steps:
            continue
        last, end = steps[-1], held[-1] if held else {}
        speed = sorted(line["tokens_per_sec"] for line in steps)[len(steps) // 2]
        options = next((line["options"] for line in lines if line["kind"] == "start"), {})
        recipe = f"{options.get('optimizer', '')}, peak {options.get('lr', '')}, dropout {options.get('dropout', '')}"
        rows.append(
            (
                number,
                recipe,
                last["step"],
                f"{last['tokens'] / 1e6:.0f} M",
                f"{speed:,.0f}",
                f"{last['lm']:.3f}",
                f"{last['mtp']:.3f}" if last["mtp"] else "-",
                f"{end.get('perplexity', float('nan')):.2f}",
            )
        )
    head = (
        "run",
        "optimiser",
        "steps",
        "tokens",
        "tokens/s",
        "training loss",
        "MTP loss",
        "perplexity, a held-out sample in windows of 2,048",
    )
    return as_table(head, rows) if rows else "No log was given."


def bars(values: dict) -> str:
    rows = [
        (bar.what, f"{bar.sign} {bar.limit:g}", f"{value:,.4g}", "pass" if good else "missed")
        for bar, value, good in judge(values)
    ]
    assert len(rows) == len(BARS)
    return as_table(("what", "bar", "measured", ""), rows)


def kinds(values: dict) -> str:
    rows = [
        (kind, f"{values['tokens'][kind]:,}", f"{bits:.3f}", f"{values['perplexity'][kind]:.2f}")
        for kind, bits in values["bits_per_byte"].items()
    ]
    rows.append(("mix", "", f"{values['bits_per_byte_mix']:.3f}", f"{values['perplexity_mix']:.2f}"))
    return as_table(("held-out text", "tokens", "bits per byte", "perplexity"), rows)


def router(folder: Path, values: dict) -> str:
    counts = read_counts(folder / "profile-mix.json")
    if counts is None:
        return "No profile has been learned yet."
    taken = picks_share(counts, most_used(counts))
    held = values.get("top_share_by_layer", [float("nan")] * len(taken))
    dead = values.get("dead_share_by_layer", [float("nan")] * len(taken))
    top_k = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_experts_per_tok"]
    common = (
        (counts * top_k / counts.sum(1, keepdim=True) > 0.5).sum(1).tolist()
    )  # picked by over half of the tokens
    rows = [
        (layer, f"{100 * a:.1f}%", f"{100 * b:.1f}%", f"{100 * c:.1f}%", d)
        for layer, (a, b, c, d) in enumerate(zip(taken, held, dead, common, strict=True))
    ]
    swaps = values.get("swap_shares", {})
    said = ", ".join(f"{100 * share:.0f}% at {margin}" for margin, share in swaps.items())
    head = (
        "layer",
        "most used third, training text",
        "the same, held-out",
        "experts without a held-out pick",
        "experts that over half of the tokens pick",
    )
    return (
        as_table(head, rows)
        + f"\n\nTail cold picks swapped with a third resident, by margin: {said or 'not measured'}."
    )


def picture(folder: Path) -> bool:
    """`router.png`: layers by experts, each layer sorted by use, mix and code."""
    profiles = {name: read_counts(folder / f"profile-{name}.json") for name in ("mix", "code")}
    if any(counts is None for counts in profiles.values()):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    order = profiles["mix"].argsort(dim=1, descending=True)
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
    for axis, (name, counts) in zip(axes, profiles.items(), strict=True):
        share = counts.gather(1, order) / counts.sum(1, keepdim=True) * counts.shape[1]
        image = axis.imshow(
            share.clamp_min(0.01), aspect="auto", norm=LogNorm(0.01, 20), interpolation="nearest"
        )
        axis.set_ylabel(f"{name}\nlayer")
        axis.set_yticks(range(counts.shape[0]))
    axes[1].set_xlabel("experts, by their use on the mix")
    figure.colorbar(image, ax=axes, label="picks, 1 = the mean")
    figure.savefig(folder / "router.png", dpi=110)
    plt.close(figure)
    return True


TEMPLATE = """---
license: apache-2.0
language: [en, zh]
---
# builtin:tiny

A language model of {parameters:.1f} million parameters with the architecture of Qwen4-Exp (`qwen4_exp`): {layers}
layers (gated delta nets and one attention layer), {experts} experts a layer of which a token picks {picks}, four
residual streams, n-gram embeddings and an MTP layer. It is here to measure expert offloading, drafts and routing
policies on, without a big GPU and without a download. It writes text that looks like technical documentation and knows
nothing.

## Text
{sources}

{leaks}

## Recipe
One H200, text of 60% prose, 25% code and 15% Chinese by tokens, seen 24 times. Float32 weights with bf16
products, AdamW on a cosine schedule by time, clipping at 1.0, dropout on embeddings, n-gram rows and block outputs,
sequences of 512 tokens, then 2,048 and 8,192. The MTP layer learns from the detached trunk. Each layer's balance loss
is steered so that the busiest third of its experts takes about 70% of the picks, as larger models' do; experts that
nobody picks are copied from busy ones. Run 1 is not an ancestor of this model; runs 2, 3 and 4 continue from one
another, the last one on two host cores. `LOG.md` says what each changed (4 is its run 5).

{runs}

## Measured
{kinds}

{bars}

Loss (nats) of the same tokens read at positions {ranges} of a window, the bar being on all of them together:
{positions}.

## Router
{router}
{picture}
## Not good for
Facts, instructions, conversation, reasoning, or any use of what it says. It saw documentation, manuals and Python's
standard library, and no web text. The context is 8,192 tokens. Its indexer is random and picks every block within the
context: `indexer_budget` must not be lowered. The MTP layer (`mtp.*`) is read by this project and ignored by
transformers.
"""


def positions(values: dict) -> str:
    rows = {"all": values["position_losses"], **values["position_losses_by_kind"]}
    return "; ".join(
        f"{kind} " + ", ".join(f"{loss:.3f}" for loss in losses) for kind, losses in rows.items()
    )


def render(folder: Path, values: dict, logs: list[Path], corpus: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    drawn = picture(folder)
    return TEMPLATE.format(
        parameters=values["weight_bytes"] / 2e6,
        layers=config["num_hidden_layers"],
        experts=config["num_experts"],
        picks=config["num_experts_per_tok"],
        sources=sources(corpus),
        leaks=leaks(corpus),
        runs=runs(logs),
        kinds=kinds(values),
        bars=bars(values),
        ranges=", ".join(values["position_ranges"]),
        positions=positions(values),
        router=router(folder, values),
        picture="\n![Picks by layer and expert](router.png)\n" if drawn else "",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=TINY)
    parser.add_argument("--logs", type=Path, nargs="*", default=[], help="train.jsonl of each run, in order")
    parser.add_argument("--values", type=Path, help="JSON of an evaluation; default: evaluate now")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    options = parser.parse_args(argv)
    folder = options.folder
    if options.values:
        values = json.loads(options.values.read_text(encoding="utf-8"))
    else:
        tokenizer = folder / "tokenizer.json"
        values = evaluate(folder, EVALUATION, tokenizer, folder / "profile-mix.json", torch.device("cpu"))
    (folder / "README.md").write_text(render(folder, values, options.logs, options.corpus), encoding="utf-8")
    print(f"{folder / 'README.md'} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

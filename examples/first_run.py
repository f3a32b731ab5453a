"""The first thing to run: the same prompt twice, routing off and `--route-resident`, a third of the experts resident.

Prints both texts and one table. `make run` calls it; `python examples/first_run.py --help` for its options.
"""

from __future__ import annotations

import argparse

import warmset
from warmset.measure.report import compare_runs, show
from warmset.progress import Bars

PROMPT = "When a query is executed, the server"


def answer(args: argparse.Namespace, policy: warmset.Policy | None) -> dict:
    with Bars() as bars:
        engine = warmset.Engine.load(args.model, slots=args.slots, policy=policy, progress=bars.update)
    drawn = {"temperature": args.temperature, "top_p": 0.95, "seed": args.seed}
    for piece in engine.stream(args.prompt, max_new_tokens=args.tokens, **drawn):
        print(piece, end="", flush=True)
    print("\n")
    figures = engine.stats()
    engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--slots", default="33%")
    parser.add_argument("--margin", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    print(f"--- routing off, {args.slots} of the experts resident\n\n{args.prompt}", end="", flush=True)
    off = answer(args, None)
    print(f"--- --route-resident {args.margin}\n\n{args.prompt}", end="", flush=True)
    on = answer(args, warmset.MarginSwap(margin=args.margin))

    print(
        f"{args.model} on {off['device']} in {off['dtype']}: {off['slots']} of {off['experts_total']} experts in slots"
    )
    show(compare_runs(["off", f"margin {args.margin}"], [off, on]))


if __name__ == "__main__":
    main()

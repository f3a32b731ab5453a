"""Record the routing trace that ships: held-out prose, then held-out code, in windows of one row.

python -m training.trace [FOLDER] --out warmset/models/data/trace.safetensors
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from training.data import held_out
from training.evaluate import EVALUATION, TINY
from warmset.config import EngineConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.measure.trace import record_trace, save_trace
from warmset.models import BUILTIN

ROWS = (("prose", 400), ("code", 800))


def longest(kind: str, rows: int, tokenizer: Path) -> list[int]:
    """The first `rows` token ids of the first held-out document of a kind that has as many."""
    for document in held_out(EVALUATION, tokenizer):
        if document.kind == kind and len(document.ids) > rows:
            return [int(token) for token in document.ids[:rows]]
    raise SystemExit(f"no held-out {kind} document has {rows} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=TINY)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    texts = [(kind, longest(kind, rows, TINY / "tokenizer.json")) for kind, rows in ROWS]
    config = EngineConfig(
        model=str(options.folder), slots=SlotsRequest(text="all"), device="cpu", stages=False
    )
    trace = record_trace(TokenEngine(config), texts)
    if options.folder.resolve() == BUILTIN["builtin:tiny"].resolve():
        trace = replace(trace, model="builtin:tiny")
    save_trace(trace, options.out)
    print(f"{options.out}: {trace.num_rows} rows, fingerprint {trace.fingerprint}")


if __name__ == "__main__":
    main()

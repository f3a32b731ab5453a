"""Record the routing trace that ships: held-out prose, then held-out code, in windows of 1, 2, 4 and 8 rows by turns.

The rows after a window's first are drafts of the MTP layer, and the text itself says which of them hold.

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
from warmset.measure.recording import read_with_drafts, recording, save_recording
from warmset.models import BUILTIN

ROWS = (("prose", 400), ("code", 800))
SIZES = (1, 2, 4, 8)
MARGIN = 1.0


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
    parser.add_argument("--margin", type=float, default=MARGIN, help="scores kept, below the last pick")
    options = parser.parse_args()
    config = EngineConfig(
        model=str(options.folder), slots=SlotsRequest(text="all"), device="cpu", stages=False,
        admission="off", window=max(SIZES), draft="mtp",
    )  # fmt: skip
    with TokenEngine(config) as engine, recording(engine, options.margin) as recorder:
        for kind, rows in ROWS:
            recorder.kind = kind
            read_with_drafts(engine, longest(kind, rows, TINY / "tokenizer.json"), SIZES)
        recorded = recorder.recording()
    if options.folder.resolve() == BUILTIN["builtin:tiny"].resolve():
        recorded = replace(recorded, model="builtin:tiny")
    save_recording(recorded, options.out)
    print(
        f"{options.out}: {options.out.stat().st_size:,} bytes, {len(recorded.windows)} windows of "
        f"{recorded.num_rows} rows, {int(recorded.committed_N.sum())} committed, fingerprint {recorded.fingerprint}"
    )


if __name__ == "__main__":
    main()

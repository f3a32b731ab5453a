"""`bench drafts`: how often drafts are right by depth, and what windows of several rows take, on held-out prompts.

The embedded model answers the prompts that ship, which are of text that it was not trained on. Arms take turns prompt
by prompt, since clocks of shared machines drift; every arm writes the same text up to near-ties.

    results["mtp_t4"]["greedy"]   accepted_per_window, ms_per_window, commit_share, rejected, by_depth, ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from warmset.config import MAX_WINDOW_ROWS, EngineConfig, SamplingConfig, SlotsRequest, require
from warmset.depth import Depth
from warmset.engine import TokenEngine
from warmset.models import BUILTIN, DATA

MODEL = "builtin:tiny"
SOURCES = ("mtp", "lookup")
KINDS = ("prose", "code")
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


@dataclass
class Arm:
    """One source and number of rows, under one setting of the sampler: what its answers added up to."""

    tokens: int = 0
    windows: int = 0
    window_ms: list[float] = field(default_factory=list)
    commit_ms: float = 0.0
    draft_ms: float = 0.0
    total_ms: float = 0.0
    asked: dict[int, int] = field(default_factory=dict)
    right: dict[int, int] = field(default_factory=dict)

    def add(self, engine: TokenEngine) -> None:
        """The engine's last answer."""
        stats = engine.stats()
        if not stats["windows"]:
            return
        stages = stats["stages"]
        self.tokens += engine.windows.counts.rows
        self.windows += stats["windows"]
        self.window_ms.append(stats["ms_per_window"])
        self.commit_ms += stages["commit"]
        self.draft_ms += stages.get("draft", 0.0)
        self.total_ms += stages["total"]
        for entry in stats["drafts"]["by_depth"]:
            depth = entry["depth"]
            self.asked[depth] = self.asked.get(depth, 0) + entry["drafted"]
            self.right[depth] = self.right.get(depth, 0) + entry["accepted"]

    def figures(self) -> dict[str, Any]:
        drafted, accepted = sum(self.asked.values()), sum(self.right.values())
        return {
            "accepted_per_window": self.tokens / self.windows,
            "windows": self.windows,
            "ms_per_window": median(self.window_ms),
            "commit_share": self.commit_ms / self.total_ms,
            "draft_share": self.draft_ms / self.total_ms,
            "drafted": drafted,
            "accepted": accepted,
            "rejected": drafted - accepted,
            "by_depth": {str(depth): self.right[depth] / self.asked[depth] for depth in sorted(self.asked)},
        }


def run_drafts(windows: list[int], prompts: int, tokens: int, slots: str, device: str) -> dict[str, Any]:
    """Measure every source at every number of rows; returns config and results.

    prompts: of each kind of text. A window of one row has no drafts, so it is measured once, as `none_t1`.
    """
    for rows in windows:
        require(1 <= rows <= MAX_WINDOW_ROWS, "windows", f"of 1 to {MAX_WINDOW_ROWS} rows", rows)
    require(len(set(windows)) == len(windows), "windows", "different", windows)
    require(8 <= tokens <= 2048, "tokens", "8 to 2048", tokens)
    texts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    most = min(len(texts[kind]) for kind in KINDS)
    require(1 <= prompts <= most, "prompts", f"1 to {most}", prompts)
    tokenizer = Tokenizer.from_file(str(BUILTIN[MODEL] / "tokenizer.json"))
    asked = [tokenizer.encode(text).ids for kind in KINDS for text in texts[kind][:prompts]]
    places = [(source, rows) for source in SOURCES for rows in windows if rows > 1]
    if 1 in windows:
        places.insert(0, ("none", 1))
    engines = {source: _engine(source, slots, device) for source in dict.fromkeys(s for s, _ in places)}
    arms = {(place, setting): Arm() for place in places for setting in TEMPERATURES}
    for number, ids in enumerate(asked):
        for setting, temperature in TEMPERATURES.items():
            sampling = SamplingConfig(max_new_tokens=tokens, seed=number, temperature=temperature)
            for source, rows in places if number % 2 == 0 else reversed(places):
                engine = engines[source]
                engine.depth = Depth(rows, adapt=False)
                engine.conversation.forget()
                for _ in engine.decode(ids, sampling):
                    pass
                arms[(source, rows), setting].add(engine)
    first = next(iter(engines.values()))
    results = {
        f"{source}_t{rows}": {setting: arms[(source, rows), setting].figures() for setting in TEMPERATURES}
        for source, rows in places
    }
    config = {
        "model": MODEL,
        "device": str(first.prepared.device),
        "dtype": str(first.prepared.dtype).removeprefix("torch."),
        "slots": first.slots.num_slots,
        "windows": windows,
        "tokens": tokens,
        "prompts": len(asked),
        "temperature": TEMPERATURES["sampled"],
    }
    for engine in engines.values():
        engine.close()
    return {"config": config, "results": results}


def _engine(source: str, slots: str, device: str) -> TokenEngine:
    rows = 1 if source == "none" else MAX_WINDOW_ROWS
    return TokenEngine(
        EngineConfig(
            model=MODEL, slots=SlotsRequest(text=slots), device=device, window=rows, draft=source,
            adapt=False, admission="off",
        )
    )  # fmt: skip


def drafts_table(results: dict[str, Any]) -> Any:
    """One line an arm and setting: tokens and ms a window, shares of its time, how often the first drafts are right."""
    from warmset.measure.report import number, plain_table

    table = plain_table("", "tokens", "ms", "commit", "draft", "rejected", "right at 1, 2, 3")
    for name, settings in results.items():
        for setting, found in settings.items():
            table.add_row(
                f"{name} {setting}",
                number(found["accepted_per_window"]),
                number(found["ms_per_window"]),
                f"{found['commit_share']:.1%}",
                f"{found['draft_share']:.1%}",
                number(found["rejected"]),
                " ".join(f"{rate:.2f}" for rate in list(found["by_depth"].values())[:3]) or "-",
            )
    return table

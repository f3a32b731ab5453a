"""`bench decode`: the embedded model at several windows, against transformers' own `generate`, everything resident.

Arms take turns, each over the same prompts, and only decoding is counted: a token's time without the prompt's. Figures
are ratios in one run, since clocks of shared machines drift. Three kinds of arms:

    transformers   `generate`, greedy, its default experts implementation
    window N       the engine's `decode`, windows of up to N rows, drafts by the model's MTP layer where N > 1
    run N          windows of N rows without the host (`graph.runs`), drafts by lookup; one captured graph on a GPU
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest, require
from warmset.engine import TokenEngine
from warmset.graph.runs import WindowRuns
from warmset.models import BUILTIN, DATA
from warmset.sample import sample_token
from warmset.stages import StageClock

MODEL = "builtin:tiny"
RUN_AHEAD = 8
"""Windows between two looks at the tokens."""


@dataclass
class Arm:
    """One way to decode: `answer(ids, tokens)` gives (tokens made, ms of decoding)."""

    name: str
    answer: Callable[[list[int], int], tuple[int, float]]
    tokens_per_sec: list[float] = field(default_factory=list)
    more: Callable[[], dict[str, Any]] = dict


def run_decode(windows: list[int], tokens: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure every arm `rounds` times; returns config and results."""
    for rows in windows:
        require(1 <= rows <= 8, "windows", "of 1 to 8 rows", rows)
    require(8 <= tokens <= 2048, "tokens", "8 to 2048", tokens)
    arms = _arms(windows, device)
    prompts = _prompts()
    for number in range(rounds + 1):
        for arm in arms if number % 2 == 0 else reversed(arms):
            made = ms = 0.0
            for ids in prompts:
                part = arm.answer(ids, tokens if number else 8)  # the first round only warms up
                made, ms = made + part[0], ms + part[1]
            if number:
                arm.tokens_per_sec.append(1e3 * made / ms)
    base = median(arms[0].tokens_per_sec)
    results = {
        arm.name: {
            "tokens_per_sec": median(arm.tokens_per_sec),
            "least": min(arm.tokens_per_sec),
            "most": max(arm.tokens_per_sec),
            "over_transformers": median(arm.tokens_per_sec) / base,
            **arm.more(),
        }
        for arm in arms
    }
    config = {
        "model": MODEL,
        "device": str(device),
        "windows": windows,
        "tokens": tokens,
        "rounds": rounds,
        "prompts": len(prompts),
    }
    return {"config": config, "results": results}


def _prompts() -> list[list[int]]:
    texts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(BUILTIN[MODEL] / "tokenizer.json"))
    return [tokenizer.encode(texts[kind][0]).ids[:128] for kind in ("prose", "code")]


def _arms(windows: list[int], device: torch.device) -> list[Arm]:
    arms, engines = [_transformers(device)], []
    for rows in windows:
        engine = TokenEngine(engine_config(rows, str(device)))
        arms.append(_engine(f"window {rows}", engine))
        engines.append(engine)
    arms.extend(_run(f"run {rows}", engines[0], rows) for rows in windows)
    return arms


def engine_config(rows: int, device: str) -> EngineConfig:
    """The embedded model, all experts resident, windows of up to `rows` rows with drafts by its MTP layer."""
    return EngineConfig(
        model=MODEL,
        slots=SlotsRequest(text="all"),
        device=device,
        window=rows,
        draft="none" if rows == 1 else "mtp",
    )


def _transformers(device: torch.device) -> Arm:
    from transformers import AutoModelForCausalLM

    from warmset.model import quiet_transformers

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(BUILTIN[MODEL], dtype=dtype).eval()
        model.to(device)

    def generate(ids: list[int], tokens: int) -> float:
        prompt = torch.tensor([ids], device=device)
        start = time.perf_counter()
        with torch.inference_mode(), quiet_transformers():
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=tokens, min_new_tokens=tokens,
            )  # fmt: skip
        _sync(device)
        return 1e3 * (time.perf_counter() - start)

    def answer(ids: list[int], tokens: int) -> tuple[int, float]:
        prompt_ms = generate(ids, 1)
        return tokens - 1, generate(ids, tokens) - prompt_ms

    return Arm("transformers", answer)


def _engine(name: str, engine: TokenEngine) -> Arm:
    accepted: list[float] = []

    def answer(ids: list[int], tokens: int) -> tuple[int, float]:
        engine.conversation.forget()
        for _ in engine.decode(ids, SamplingConfig(max_new_tokens=tokens)):
            pass
        counts = engine.windows.counts
        accepted.append(counts.rows / counts.windows)
        return counts.rows, engine.run.decode_ms

    return Arm(name, answer, more=lambda: {"accepted_per_window": sum(accepted) / len(accepted)})


def _run(name: str, engine: TokenEngine, rows: int) -> Arm:
    device = engine.prepared.device
    source: Any = "none" if rows == 1 else "lookup"
    windows = engine.windows
    runs = WindowRuns(
        windows.trunk, engine.runner, windows.routing, StageClock(device, enabled=False), source=source
    )
    accepted: list[float] = []

    def answer(ids: list[int], tokens: int) -> tuple[int, float]:
        config = SamplingConfig(max_new_tokens=tokens)
        sequence = windows.start()
        token = sample_token(windows.read_prompt(sequence, ids), config, len(ids))
        runs.begin(sequence.state, ids, token, sampling=config, most_tokens=tokens - 1)
        _sync(device)
        start, done = time.perf_counter(), False
        while not done:
            runs.run(RUN_AHEAD if device.type == "cuda" else 1, rows)
            _, done = runs.take()
        ms = 1e3 * (time.perf_counter() - start)
        counts = runs.counts()
        accepted.append(counts.rows / counts.windows)
        return counts.rows, ms

    return Arm(name, answer, more=lambda: {"accepted_per_window": sum(accepted) / len(accepted)})


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Inside a leg's process: load the engine once, answer the prompts one after the other, say one line a sample.

Greedy answers of exactly `max_new_tokens` tokens (the end of a text does not end them): every sample is the same amount
of work. Figures are those of `generate --json`; one that the engine does not give is None.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from warmset.config import EngineConfig, SamplingConfig
from warmset.errors import WarmsetError
from warmset.measure.ab.plan import sha256_of
from warmset.measure.ab.state import about_process, machine_state
from warmset.models import BUILTIN_PROFILES

Emit = Callable[[dict[str, Any]], None]

FIGURES = (
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "windows",
    "accepted_per_window",
    "ms_per_window",
    "tokens_per_sec",
    "prompt_ms",
    "cold_experts_per_layer_window",
    "hit_rate",
    "bytes_slow",
)


def answer_prompts(
    config: EngineConfig,
    policy: Any,
    sampling: SamplingConfig,
    chat: bool,
    prompts: list[str],
    emit: Emit,
) -> None:
    """Run one leg: the first prompt is the warm-up, each further one a sample.

    emit: gets {"event": "start" | "sample" | "end", ...} in that order.
    """
    from warmset.text import Engine, encode

    before = machine_state()
    started = time.perf_counter()
    with Engine.open(config, policy) as engine:
        profile = config.profile or BUILTIN_PROFILES.get(config.model)
        emit(
            {
                "event": "start",
                **about_process(on_gpu=engine.stats().get("device") != "cpu"),
                "load_sec": time.perf_counter() - started,
                "slots": engine.stats().get("slots"),
                "profile_sha256": None if profile is None else sha256_of(Path(profile)),
                "notes": list(engine.notes),
                "machine": before,
            }
        )
        for number, prompt in enumerate(prompts):
            ids = encode(engine.tokenizer, prompt, chat)
            tokens = list(engine.tokens.decode(ids, replace(sampling, temperature=0.0)))
            if len(tokens) != sampling.max_new_tokens:
                raise WarmsetError(f"an answer has {len(tokens)} tokens, not {sampling.max_new_tokens}.")
            if number:
                emit({"event": "sample", **_figures(engine.stats(), tokens)})
        emit({"event": "end", "machine": machine_state()})


def _figures(stats: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    text = " ".join(map(str, tokens))
    return {
        **{name: stats.get(name) for name in FIGURES},
        "swaps": stats.get("routing", {}).get("swaps"),
        "tokens": text,
        "tokens_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }

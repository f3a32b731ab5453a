"""Small things that several test files use."""

from __future__ import annotations

from pathlib import Path

import torch

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest
from warmset.engine import TokenEngine
from warmset.routing import Policy


def open_engine(
    folder: Path | str, slots: str | int, policy: Policy | None = None, **settings
) -> TokenEngine:
    """An engine whose slots stay as they were filled, unless `admission` says otherwise."""
    settings = {"admission": "off", **settings}
    config = EngineConfig(model=str(folder), slots=SlotsRequest(text=str(slots)), device="cpu", **settings)
    return TokenEngine(config, policy)


def decode_with_logits(engine: TokenEngine, ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the float logits [windows, V] that chose all but the first."""
    seen: list[torch.Tensor] = []
    step = engine.windows.step

    def recording(sequence, token):
        logits_V = step(sequence, token)
        seen.append(logits_V.clone())
        engine.slots.check_integrity()
        return logits_V

    engine.windows.step = recording  # type: ignore[method-assign]
    try:
        out = list(engine.decode(ids, SamplingConfig(max_new_tokens=tokens)))
    finally:
        engine.windows.step = step  # type: ignore[method-assign]
    return out, torch.stack(seen)


def transformers_logits(
    folder: Path, ids: list[int], tokens: int, implementation: str
) -> tuple[list[int], torch.Tensor]:
    """The same greedy schedule through transformers' own model with the named experts implementation."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=implementation
    ).eval()
    cache = DynamicCache(config=model.config)
    out, seen, step = [], [], list(ids)
    with torch.inference_mode():
        for _ in range(tokens):
            logits_V = model(torch.tensor([step]), cache=cache, use_cache=True).logits[0, -1]
            seen.append(logits_V)
            out.append(int(logits_V.argmax()))
            step = out[-1:]
    return out, torch.stack(seen[1:])

"""Text in, text out: the engine of token ids with the model's own tokenizer around it.

Characters that are split over tokens are delivered whole (`tokenizers`' own stream decoder). Knows no HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest, shown
from warmset.engine import Prepared, Progress, TokenEngine, check_prompt, prepare
from warmset.errors import CheckpointError, WarmsetError
from warmset.routing import Policy


def load_tokenizer(prepared: Prepared) -> Any:
    """The checkpoint's fast tokenizer; CheckpointError when there is none."""
    from transformers import AutoTokenizer

    from warmset.model import quiet_transformers

    if not (prepared.folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{prepared.folder} has no tokenizer.json.")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(prepared.folder, local_files_only=True)
    except Exception as error:  # whatever it raises is about these files
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{prepared.folder} has no tokenizer that can be loaded: {first}") from None
    if not tokenizer.is_fast:
        raise CheckpointError(f"{prepared.folder}: the tokenizer is no fast one.")
    return tokenizer


def stop_ids(prepared: Prepared, tokenizer: Any) -> frozenset[int]:
    """End-of-text ids of the generation config, the config and the tokenizer together."""
    from transformers import GenerationConfig

    found: list[Any] = []
    try:
        generation = GenerationConfig.from_pretrained(prepared.folder, local_files_only=True).eos_token_id
    except Exception:  # missing or broken: the configuration and the tokenizer know the end of a text too
        generation = None
    for value in (generation, getattr(prepared.config, "eos_token_id", None), tokenizer.eos_token_id):
        found += value if isinstance(value, list) else [value]
    return frozenset(token for token in found if type(token) is int)


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt; WarmsetError when it is no text that can be encoded."""
    from warmset.model import quiet_transformers

    if not isinstance(prompt, str):
        raise WarmsetError(f"prompt must be a text. Got {shown(prompt)}.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise WarmsetError(f"prompt must be valid Unicode. Got {shown(prompt)}.") from None
    with quiet_transformers():
        return tokenizer.encode(prompt)


class Engine:
    """A model that continues text.

    engine = warmset.Engine.load("builtin:tiny", slots="33%", policy=warmset.MarginSwap(margin=0.25))
    for piece in engine.stream("The expert cache", max_new_tokens=150):
        print(piece, end="")
    engine.stats()
    """

    def __init__(self, tokens: TokenEngine, tokenizer: Any) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids(tokens.prepared, tokenizer)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "builtin:tiny",
        *,
        slots: str | int = "auto",
        policy: Policy | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a model. `settings` are the fields of `config.EngineConfig`; ValueError on bad ones."""
        unknown = sorted(set(settings) - {field.name for field in fields(EngineConfig)})
        if unknown:
            raise WarmsetError(f"the engine has no setting {unknown[0]!r}.")
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = EngineConfig(model=name, slots=SlotsRequest(text=str(slots)), **settings)
        return cls.open(config, policy, progress)

    @classmethod
    def open(cls, config: EngineConfig, policy: Policy | None, progress: Progress | None = None) -> Engine:
        tokens = TokenEngine(config, policy, progress)
        return cls(tokens, load_tokenizer(tokens.prepared))

    @property
    def notes(self) -> list[str]:
        """What was chosen or left out while loading, one sentence each."""
        return self.tokens.notes

    def stream(self, prompt: str, **sampling: Any) -> Iterator[str]:
        """Pieces of the answer as they come. `sampling`: the fields of `config.SamplingConfig`."""
        unknown = sorted(set(sampling) - {field.name for field in fields(SamplingConfig)})
        if unknown:
            raise WarmsetError(f"sampling has no setting {unknown[0]!r}.")
        yield from self.stream_ids(encode(self.tokenizer, prompt), SamplingConfig(**sampling))

    def stream_ids(self, ids: list[int], sampling: SamplingConfig) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        backend = self.tokenizer.backend_tokenizer
        decoder = DecodeStream(skip_special_tokens=True)
        new_ids: list[int] = []
        shown = 0
        for token in self.tokens.decode(ids, sampling, self._stop_ids):
            new_ids.append(token)
            piece = decoder.step(backend, token)
            if piece:
                shown += len(piece)
                yield piece
        # Bytes of a character that the last tokens left unfinished are shown as the tokenizer shows them.
        rest = backend.decode(new_ids, skip_special_tokens=True)[shown:]
        if rest:
            yield rest

    def stats(self) -> dict[str, Any]:
        """Figures of the last answer; the names of `warmset generate --json`."""
        return self.tokens.stats()

    def close(self) -> None:
        """Let go of files and memory; the engine answers nothing afterwards."""
        self.tokens.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_request(config: EngineConfig, prompt: str, policy: Policy | None = None) -> None:
    """Refuse what can be refused before any weight is loaded: files, settings, prompt, and ranks without a tail."""
    prepared = prepare(config)
    ids = encode(load_tokenizer(prepared), prompt)
    check_prompt(len(ids), prepared.max_model_len)
    size = getattr(prepared.config, "vocab_size", None)
    if size is not None and max(ids) >= size:
        raise CheckpointError(f"the tokenizer gives the id {max(ids)}, the model has {size}.")
    ranks = getattr(policy, "ranks", None)
    top_k = getattr(prepared.config, "num_experts_per_tok", None)
    if ranks is not None and ranks[0] > ranks[1]:
        raise WarmsetError(f"ranks must leave a tail: LO at most HI. Got {ranks[0]}-{ranks[1]}.")
    if ranks is not None and top_k is not None and ranks[0] >= top_k:
        raise WarmsetError(
            f"ranks must leave a tail: a row has {top_k} picks, 0 to {top_k - 1}. Got {ranks[0]}-{ranks[1]}."
        )

"""Text in, text out: the engine of token ids with the model's own tokenizer around it.

Characters that are split over tokens are delivered whole (`tokenizers`' own stream decoder). Stop texts are looked for
at each token as it is drawn, and what may be the beginning of one is held back. Knows no HTTP.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from warmset.config import EngineConfig, SamplingConfig, SlotsRequest, shown
from warmset.engine import Progress, TokenEngine
from warmset.errors import CheckpointError, WarmsetError
from warmset.prepare import Prepared, check_prompt, prepare
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


def encode(tokenizer: Any, prompt: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, or with `chat` of a user's turn in the model's template; WarmsetError when that fails."""
    from warmset.model import quiet_transformers

    if not isinstance(prompt, str):
        raise WarmsetError(f"prompt must be a text. Got {shown(prompt)}.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise WarmsetError(f"prompt must be valid Unicode. Got {shown(prompt)}.") from None
    with quiet_transformers():
        if not chat:
            return tokenizer.encode(prompt)
        if not tokenizer.chat_template:
            raise WarmsetError("chat needs a model whose tokenizer has a chat template. This one has none.")
        turn = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


class StopTexts:
    """Finds the first of several texts in a stream of pieces; what may become one is held back until it is clear."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """The text that is clear by now, and whether a stop text follows it: then nothing after it counts."""
        text, self._held = self._held + piece, ""
        places = [place for place in map(text.find, self._stop) if place >= 0]
        if places:
            return text[: min(places)], True
        most = max((len(stop) for stop in self._stop), default=1) - 1
        for start in range(max(0, len(text) - most), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                self._held = text[start:]
                return text[:start], False
        return text, False

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held


class Writer:
    """Turns the tokens of one answer into text as they are drawn."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = StopTexts(stop)
        self._ids: list[int] = []
        self._decoded = 0
        self._pieces: deque[str] = deque()
        self._stopped = False

    def take(self, token: int) -> bool:
        """One more token was drawn; whether a stop text is complete with it."""
        self._ids.append(token)
        piece = self._decoder.step(self._backend, token) or ""
        self._decoded += len(piece)
        clear, self._stopped = self._stop.feed(piece)
        self._pieces.append(clear)
        return self._stopped

    def next_piece(self) -> str:
        """The text that the next token of those taken made clear; may be empty."""
        return self._pieces.popleft()

    def rest(self) -> str:
        """What is left at the end: text held back, and bytes of an unfinished character as the tokenizer shows them."""
        if self._stopped:
            return ""
        clear, stopped = self._stop.feed(
            self._backend.decode(self._ids, skip_special_tokens=True)[self._decoded :]
        )
        return clear if stopped else clear + self._stop.rest()


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

    def stream(self, prompt: str, *, chat: bool = False, **sampling: Any) -> Iterator[str]:
        """Pieces of the answer as they come. `sampling`: the fields of `config.SamplingConfig`."""
        unknown = sorted(set(sampling) - {field.name for field in fields(SamplingConfig)})
        if unknown:
            raise WarmsetError(f"sampling has no setting {unknown[0]!r}.")
        if isinstance(sampling.get("stop"), str | list):
            stop = sampling["stop"]
            sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        yield from self.stream_ids(encode(self.tokenizer, prompt, chat), SamplingConfig(**sampling))

    def stream_ids(self, ids: list[int], sampling: SamplingConfig) -> Iterator[str]:
        writer = Writer(self.tokenizer, sampling.stop)
        watch = (
            writer.take if sampling.stop else None
        )  # else no text can end the answer, and nobody has to wait
        for token in self.tokens.decode(ids, sampling, self._stop_ids, watch):
            if watch is None:
                writer.take(token)
            piece = writer.next_piece()
            if piece:
                yield piece
        rest = writer.rest()
        if rest:
            yield rest

    def logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the last answer's tokens, if they were asked for: the model's own, in nats."""

        def shown(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.tokenizer.decode([token]), "id": token, "logprob": logprob}

        return [
            {**shown(entry.token, entry.logprob), "top": [shown(*other) for other in entry.top]}
            for entry in self.tokens.run.logprobs
        ]

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


def check_request(
    config: EngineConfig, prompt: str, policy: Policy | None = None, chat: bool = False
) -> None:
    """Refuse what can be refused before any weight is loaded: files, settings, prompt, and ranks without a tail."""
    prepared = prepare(config)
    ids = encode(load_tokenizer(prepared), prompt, chat)
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

"""What an experiment is made of: two arms, what their samples are, an order; known and checked before the first leg.

A sample is one answer to a prompt (`Answers`), or a stretch of a routing trace (`Stretches`).
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmset.config import require
from warmset.errors import WarmsetError
from warmset.measure.ab.order import ORDERS, first_arms
from warmset.measure.ab.simulate import MOST_PAIRS
from warmset.models import DATA

PROMPTS_FILE = DATA / "prompts.json"
"""60 prompts that ship: prose, code and Chinese."""
MOST_SAMPLES = 1_000
NEW_TOKENS, WINDOWS = 150, 150
"""Of a sample: tokens of an answer, windows of a trace."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One configuration as a leg runs it.

    words: command and options, as a shell would split them.
    python: the interpreter whose Warmset runs; None is the one that runs the experiment.
    config: the resolved configuration, for the record.
    exact_work: what decides the tokens of an arm without a policy (model, dtype, ...); None for an arm with one.
    files: option -> the user's file that a leg gets a fresh copy of.
    """

    words: list[str]
    python: str | None
    config: dict[str, Any]
    exact_work: list[Any] | None
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Texts to continue, the file they came from (`path` None: the one that ships), and its SHA-256."""

    texts: tuple[str, ...]
    path: str | None
    sha256: str

    @property
    def file(self) -> str:
        return Path(self.path or PROMPTS_FILE).name


def read_prompts(given: Path | None = None) -> Prompts:
    """A JSON list of texts, or an object of such lists; WarmsetError on anything else and on an empty prompt."""
    path = given or PROMPTS_FILE
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        raise WarmsetError(f"prompts: {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise WarmsetError(f"prompts: {path} must be JSON: a list of texts.") from None
    lists = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(texts, list) for texts in lists):
        raise WarmsetError(f"prompts: {path} must be a list of texts, or an object of such lists.")
    texts = [text for part in lists for text in part]
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) or not text.strip():
            raise WarmsetError(f"prompts: number {number} of {path} must hold some text. Got {text!r}.")
    if not texts:
        raise WarmsetError(f"prompts: {path} must hold at least one prompt. Got none.")
    own = None if given is None else str(given)
    return Prompts(texts=tuple(texts), path=own, sha256=hashlib.sha256(raw).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Samples that are greedy answers of `max_new_tokens` tokens."""

    prompts: Prompts
    max_new_tokens: int = NEW_TOKENS

    def __post_init__(self) -> None:
        require(
            self.max_new_tokens >= 2,
            "max_new_tokens",
            "2 or more: the first comes with the prompt",
            self.max_new_tokens,
        )

    def check(self, samples: int) -> None:
        """Refuse more samples than there are prompts, one of which is the warm-up's."""
        if len(self.prompts.texts) < samples + 1:
            raise WarmsetError(
                f"prompts: {samples} samples and a warm-up need {samples + 1} prompts. "
                f"{self.prompts.file} has {len(self.prompts.texts)}."
            )

    def config(self) -> dict[str, Any]:
        prompts = {"path": self.prompts.path, "file": self.prompts.file, "sha256": self.prompts.sha256}
        return {"prompts": prompts, "max_new_tokens": self.max_new_tokens}

    def job(self, generator: random.Random, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both legs of a pair are told, and the part of it that is recorded: all prompts differ."""
        numbers = generator.sample(range(len(self.prompts.texts)), samples + 1)
        texts = [self.prompts.texts[number] for number in numbers]
        return {"prompts": texts, "max_new_tokens": self.max_new_tokens}, {"prompts": numbers}


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Samples that are `windows` windows of a routing trace, one stretch after the other."""

    windows: int = WINDOWS

    def __post_init__(self) -> None:
        require(1 <= self.windows <= WINDOWS, "windows", f"1 to {WINDOWS}", self.windows)

    def check(self, samples: int) -> None:
        """Any number of samples will do: a trace begins again at its end."""

    def config(self) -> dict[str, Any]:
        return {"windows": self.windows}

    def job(self, generator: random.Random, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both legs of a pair are told, and the part of it that is recorded: where in the trace they begin."""
        begin = {"first_window": generator.randrange(2**31)}
        return {**begin, "samples": samples, "windows": self.windows}, begin


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An experiment before its first leg. `null`: both arms are alike on purpose."""

    arms: dict[str, Arm]
    work: Answers | Stretches
    pairs: int = 12
    samples: int = 9
    order: str = "alternating"
    seed: int = 0
    null: bool = False

    def __post_init__(self) -> None:
        check_numbers(self.pairs, self.samples, self.order, self.seed)
        self.work.check(self.samples)

    def config(self) -> dict[str, Any]:
        """What a record must agree in before it is continued; JSON values only."""
        arms = {
            name: {
                "words": arm.words,
                "python": arm.python,
                "config": arm.config,
                "exact_work": arm.exact_work,
                "files": {option: sha256_of(Path(file)) for option, file in arm.files.items()},
            }
            for name, arm in self.arms.items()
        }
        numbers = ("pairs", "samples", "order", "seed", "null")
        return {"arms": arms, **self.work.config(), **{name: getattr(self, name) for name in numbers}}

    def legs(self) -> list[tuple[int, int, str]]:
        """(pair, place in the pair, arm) of every leg, in the order in which they run."""
        found = []
        for pair, first in enumerate(first_arms(self.pairs, self.order)):
            found += [(pair, place, arm) for place, arm in enumerate((first, "b" if first == "a" else "a"))]
        return found

    def job(self, pair: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both legs of a pair are told, and the part of it that is recorded; follows from the seed."""
        return self.work.job(random.Random(f"{self.seed} {pair}"), self.samples)


def check_numbers(pairs: int, samples: int, order: str, seed: int) -> None:
    """Refuse numbers that no experiment can have."""
    require(1 <= pairs <= MOST_PAIRS, "pairs", f"1 to {MOST_PAIRS:,}", pairs)
    require(1 <= samples <= MOST_SAMPLES, "samples", f"1 to {MOST_SAMPLES:,}", samples)
    require(order in ORDERS, "order", f"one of {', '.join(ORDERS)}", order)
    require(0 <= seed < 2**63, "seed", "0 to 2**63 - 1", seed)


def sha256_of(file: Path) -> str | None:
    """SHA-256 of a file's bytes, None where there is none yet (a profile that is still to be learned)."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WarmsetError(f"{file} cannot be read: {error.strerror}.") from None

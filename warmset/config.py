"""What an engine and an answer may be set to: frozen dataclasses, each with its own checks.

An automatic choice is a `Resolved` value: what was chosen, and why; both are printed. A value that is out of
range is refused here, in one sentence, before any work starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from warmset.errors import WarmsetError

Value = TypeVar("Value")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
ADMISSIONS = ("off", "lfu", "lru")
GRAPHS = ("auto", "on", "off")
ROUTE_KERNELS = ("fused", "warp", "serial")
MAX_WINDOW_ROWS = 8
DRAFTS = ("none", "lookup", "mtp", "model")
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[Value]):
    """An effective value and the reason for it."""

    value: Value
    why: str


def shown(value: object, most: int = 80) -> str:
    """A value as an error shows it: its repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def require(condition: bool, name: str, allowed: str, got: object) -> None:
    """Refuse a setting in the house form: name, what is allowed, what came."""
    if not condition:
        raise WarmsetError(f"{name} must be {allowed}. Got {shown(got)}.")


def require_types(owner: object, kinds: dict[str, tuple[type, ...]]) -> None:
    """Refuse fields of another type than they are declared with; True and False are no numbers."""
    for name, allowed in kinds.items():
        value = getattr(owner, name)
        fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
        require(fits, name, f"of type {names}", value)


_TEXT, _MAYBE_TEXT = (str,), (str, type(None))
_WHOLE, _REAL = (int,), (int, float)


@dataclass(frozen=True, kw_only=True)
class SlotsRequest:
    """How many slots were asked for: an exact number, a share of all experts, `auto`, or `all`."""

    text: str

    def __post_init__(self) -> None:
        self._parsed()

    def _parsed(self) -> tuple[str, float]:
        text = self.text.strip()
        allowed = "a whole number of 0 or more, 0% to 100%, auto, or all"
        if text in ("auto", "all"):
            return text, 0.0
        kind = "share" if text.endswith("%") else "count"
        try:
            number = float(text[:-1]) if kind == "share" else int(text)
        except ValueError:
            number = math.nan
        legal = 0 <= number <= 100 if kind == "share" else number >= 0
        require(legal, "slots", allowed, self.text)
        return kind, number

    def resolve(self, *, experts_total: int, fitting: int, fitting_why: str) -> Resolved[int]:
        """The number of slots, given the experts there are and how many would fit."""
        kind, number = self._parsed()
        if kind == "all":
            return Resolved(value=experts_total, why="all experts, as asked")
        if kind == "auto":
            return Resolved(value=min(experts_total, fitting), why=fitting_why)
        if kind == "share":
            return Resolved(value=round(experts_total * number / 100), why=f"{self.text} of {experts_total}")
        require(number <= experts_total, "slots", f"0 to {experts_total} for this model", self.text)
        return Resolved(value=int(number), why="as asked")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and held. `slots` is the total over all layers; `vram` the most VRAM that may be used
    (`12GiB`; None = what is free); dtype `auto` = float32 on a CPU, the checkpoint's own on a GPU; `max_model_len`
    None = the model's context; `check_slots` compares each slot with its source after every copy (a debug mode).
    `profile`: who lies in the slots at the start. `learn`: a profile that each answer's picks are added to.
    `admission`: who is brought in between windows, and who leaves; `off` leaves the slots as they were filled.
    `window`: the most rows a window verifies, of which `draft` proposes all but the first; None for both = one row,
    for one of them = a choice that is said. `adapt`: fewer rows where they do not pay. `snapshot_bytes`: host or
    device memory for going back to earlier points of a conversation; 0 reads every prompt whole. `stages`: time the
    stages of each window; None = where that costs nothing, on a CPU. `graphs`: windows that the device leads, captured
    on a GPU; `auto` = on a GPU, `on` also on a CPU, where the same code runs as Python and is slower."""

    model: str = "builtin:tiny"
    revision: str | None = None
    slots: SlotsRequest = SlotsRequest(text="auto")
    vram: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    profile: str | None = None
    learn: str | None = None
    admission: str = "lfu"
    route_kernel: str = "fused"
    stages: bool | None = None
    graphs: str = "auto"
    check_slots: bool = False
    window: int | None = None
    draft: str | None = None
    draft_model: str | None = None
    adapt: bool = True
    snapshot_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        require_types(
            self,
            {
                **dict.fromkeys(("model", "device", "dtype", "admission", "route_kernel", "graphs"), _TEXT),
                **dict.fromkeys(("revision", "vram", "profile", "learn"), _MAYBE_TEXT),
                "max_model_len": (int, type(None)),
                "slots": (SlotsRequest,),
                "stages": (bool, type(None)),
                "check_slots": (bool,),
                "adapt": (bool,),
                "window": (int, type(None)),
                "snapshot_bytes": _WHOLE,
                **dict.fromkeys(("draft", "draft_model"), _MAYBE_TEXT),
            },
        )
        require(self.model != "", "model", "a name", self.model)
        require(self.profile != "", "profile", "a file", self.profile)
        require(self.learn != "", "learn", "a file", self.learn)
        require(self.dtype in DTYPE_NAMES, "dtype", f"one of {', '.join(DTYPE_NAMES)}", self.dtype)
        require(self.admission in ADMISSIONS, "admission", f"one of {', '.join(ADMISSIONS)}", self.admission)
        require(
            self.route_kernel in ROUTE_KERNELS,
            "route_kernel",
            f"one of {', '.join(ROUTE_KERNELS)}",
            self.route_kernel,
        )
        require(self.graphs in GRAPHS, "graphs", f"one of {', '.join(GRAPHS)}", self.graphs)
        length = self.max_model_len
        require(length is None or length >= 2, "max_model_len", "2 or more tokens", length)
        self._check_windows()

    def _check_windows(self) -> None:
        rows = self.window
        require(rows is None or 1 <= rows <= MAX_WINDOW_ROWS, "window", f"1 to {MAX_WINDOW_ROWS} rows", rows)
        require(
            self.draft is None or self.draft in DRAFTS, "draft", f"one of {', '.join(DRAFTS)}", self.draft
        )
        require(self.snapshot_bytes >= 0, "snapshot_bytes", "0 or more", self.snapshot_bytes)
        if (self.draft == "model") != (self.draft_model is not None):
            raise WarmsetError(
                "draft 'model' and draft_model belong together: name the model that drafts. "
                f"Got draft {self.draft!r}, draft_model {shown(self.draft_model)}."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave every token in.

    Penalties: repetition 1, presence 0 and frequency 0 do nothing. `logit_bias`: token id -> what is added to its
    logit. `logprobs`: how many of the most likely tokens come with each token (None: no log-probabilities). `stop`:
    texts that end the answer and are not part of it; only `text.Engine` knows them.
    """

    max_new_tokens: int = 150
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        require_types(self, {**dict.fromkeys(("max_new_tokens", "top_k", "seed"), _WHOLE)})
        require_types(self, {**dict.fromkeys(("temperature", "top_p", "min_p", *penalties), _REAL)})
        require_types(self, {"logprobs": (int, type(None)), "logit_bias": (Mapping,), "stop": (tuple,)})
        require(self.max_new_tokens >= 1, "max_new_tokens", "1 or more", self.max_new_tokens)
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        require(finite, "temperature", "a finite number of 0 or more", self.temperature)
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        require(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        require(0 <= self.min_p <= 1, "min_p", "0 to 1", self.min_p)
        require(0 <= self.seed < 2**63, "seed", "0 to 2**63 - 1", self.seed)
        require(
            0 < self.repetition_penalty <= 10, penalties[0], "above 0 and at most 10", self.repetition_penalty
        )
        for name in penalties[1:]:
            require(-2 <= getattr(self, name) <= 2, name, "-2 to 2", getattr(self, name))
        count = self.logprobs
        require(count is None or 0 <= count <= MAX_LOGPROBS, "logprobs", f"0 to {MAX_LOGPROBS}", count)
        self._check_lists()

    def _check_lists(self) -> None:
        for token, bias in self.logit_bias.items():
            allowed = "token ids of 0 or more, each with a number from -100 to 100"
            whole = type(token) is int and token >= 0
            legal = whole and type(bias) in (int, float) and -100 <= bias <= 100
            require(legal, "logit_bias", allowed, {token: bias})
        for text in self.stop:
            require(isinstance(text, str) and text != "", "stop", "texts that are not empty", text)

    @property
    def changes_scores(self) -> bool:
        """Whether tokens are drawn from other scores than the model's own."""
        neutral = self.repetition_penalty == 1.0 and not self.presence_penalty and not self.frequency_penalty
        return bool(self.logit_bias) or not neutral

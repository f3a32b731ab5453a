"""The learned expert profile: how often the router itself picked each expert, by layer.

A profile is a warm start: it decides which experts lie in the slots when an engine starts. It is a JSON file
with the identity of the model it was learned on. Where it is a help only, a file from elsewhere, or a broken one, is
no error: it is left out with one warning (`load_profile` returns None and the reason). Where it is what a command is
about, `read_profile` refuses it. `Learner` counts picks, `merge` adds profiles up.

    counts_LE   float64 [L, E]   decayed counts of the router's own picks of committed rows
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from warmset.errors import WarmsetError

FORMAT = "warmset-profile"
VERSION = 1
MOST_BYTES = 256 << 20
MOST_COUNT = 1e15
"""Of one expert, and of rows: far beyond any text, and whole numbers are exact up to there."""
DECAY = 1 - 2**-14
"""Of all counts, a row: a pick weighs half as much after 11,356 more rows."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a profile was learned on; all of it must agree before the counts are used."""

    model: str
    num_layers: int
    num_experts: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Counts of picks by layer and expert, with the identity of their model."""

    identity: Identity
    counts_LE: np.ndarray
    rows: float = 0.0
    decay: float = 1.0
    text: str = ""
    source: str = field(default="", compare=False)

    def hottest(self, num_slots: int) -> list[tuple[int, int]]:
        """The `num_slots` (layer, expert) pairs with the greatest counts; ties by layer, then expert."""
        return hottest(self.counts_LE, num_slots)


class Learner:
    """Counts the router's own picks of committed rows, with decay; goes on from `start` where there is one.

    A window's rows decay what was there before and count alike among themselves.
    """

    def __init__(
        self, identity: Identity, start: Profile | None = None, *, decay: float = DECAY, text: str = ""
    ) -> None:
        shape = (identity.num_layers, identity.num_experts)
        self._identity = identity
        self._counts_LE = np.zeros(shape) if start is None else start.counts_LE.copy()
        self._rows = 0.0 if start is None else start.rows
        self._decay = decay
        self._text = text or ("" if start is None else start.text)

    def add(self, own_LTK: np.ndarray) -> None:
        """Picks of T rows, int [L, T, K]; ids outside 0 .. E-1 are padding and count nowhere."""
        num_rows = own_LTK.shape[1]
        faded = self._decay**num_rows
        self._counts_LE *= faded
        self._rows = self._rows * faded + num_rows
        layer_LTK = np.broadcast_to(np.arange(len(own_LTK))[:, None, None], own_LTK.shape)
        real_LTK = (own_LTK >= 0) & (own_LTK < self._identity.num_experts)
        np.add.at(self._counts_LE, (layer_LTK[real_LTK], own_LTK[real_LTK]), 1.0)

    def profile(self) -> Profile:
        """What was learned until now."""
        return Profile(
            identity=self._identity,
            counts_LE=self._counts_LE.copy(),
            rows=self._rows,
            decay=self._decay,
            text=self._text,
        )


def merge(profiles: list[Profile]) -> Profile:
    """The sum of profiles of one model, each with the weight of its rows; WarmsetError where models differ or counts
    grow beyond what a profile may hold."""
    assert profiles
    first = profiles[0].identity
    for other in profiles[1:]:
        for name, mine, theirs in (
            ("layers", first.num_layers, other.identity.num_layers),
            ("experts", first.num_experts, other.identity.num_experts),
            ("fingerprint", first.fingerprint, other.identity.fingerprint),
        ):
            if mine != theirs:
                raise WarmsetError(
                    f"Profiles must be of one model: {name} is {mine!r} in {profiles[0].source} "
                    f"and {theirs!r} in {other.source}."
                )
    counts_LE = np.sum([profile.counts_LE for profile in profiles], axis=0)
    rows = sum(profile.rows for profile in profiles)
    if max(rows, counts_LE.max()) > MOST_COUNT:
        raise WarmsetError(f"Profiles must add up to counts of at most {MOST_COUNT:g}.")
    return Profile(
        identity=first,
        counts_LE=counts_LE,
        rows=rows,
        decay=profiles[0].decay,
        text="; ".join(dict.fromkeys(profile.text for profile in profiles if profile.text)),
    )


def hottest(counts_LE: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
    order = np.argsort(-counts_LE, axis=None, kind="stable")[:num_slots]
    num_experts = counts_LE.shape[1]
    return [divmod(int(index), num_experts) for index in order]


def spread_evenly(num_layers: int, num_experts: int, num_slots: int) -> list[tuple[int, int]]:
    """Without a profile: the first experts of each layer, layers taking turns."""
    return [(index % num_layers, index // num_layers) for index in range(num_slots)]


def load_profile(
    path: Path, expected: Identity, seen: Callable[[object], None] | None = None
) -> tuple[Profile | None, str]:
    """Read and validate; (profile, "") or (None, the reason in one sentence). The file is only read.

    seen: is given the JSON value before it is compared with what is expected.
    """
    try:
        if path.is_dir():
            return None, f"{path} is a directory"
        if path.exists() and not path.is_file():
            return None, f"{path} is no regular file"
        if path.exists() and path.stat().st_size > MOST_BYTES:
            return None, f"{path} is larger than any profile"
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
        if seen is not None:
            seen(raw)
        return _validate(raw, expected, str(path))
    except FileNotFoundError:
        return None, f"{path} does not exist"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read ({error})"
    except (ValueError, RecursionError):  # ValueError also for numbers of thousands of digits
        return None, f"{path} is not whole JSON"


def profile_to_extend(path: Path, expected: Identity) -> Profile | None:
    """The profile that a learner goes on from; None where there is no file yet.

    WarmsetError where the file is something else, which learning would overwrite, or cannot be written.
    """
    if path.exists():
        learned, reason = load_profile(path, expected)
        if learned is None:
            raise WarmsetError(f"learn must name a new file or a profile of this model: {reason}.")
        return learned
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise WarmsetError(f"learn must name a file in a folder that can be written to. Got {str(path)!r}.")
    return None


def read_profile(path: Path) -> Profile:
    """The profile in a file, of whatever model it is; WarmsetError where it is none."""
    expected = Identity(model="", num_layers=0, num_experts=0, fingerprint="")
    found: list[object] = []
    learned, reason = load_profile(path, expected, found.append)
    raw = found[0] if found else None
    if isinstance(raw, dict) and raw.get("format") == FORMAT:
        sizes = (raw.get("layers"), raw.get("experts"))
        texts = (raw.get("model"), raw.get("fingerprint"))
        if all(type(size) is int and size > 0 for size in sizes) and all(type(t) is str for t in texts):
            own = Identity(
                model=raw["model"],
                num_layers=raw["layers"],
                num_experts=raw["experts"],
                fingerprint=raw["fingerprint"],
            )
            learned, reason = _validate(raw, own, str(path))
        else:
            reason = f"{path} does not say which model it is of"
    if learned is None:
        raise WarmsetError(f"{reason}.")
    return learned


def _validate(raw: object, expected: Identity, source: str) -> tuple[Profile | None, str]:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") is not VERSION:
        return None, f"{source} is no {FORMAT} of version {VERSION}"
    for key, value in (
        ("layers", expected.num_layers),
        ("experts", expected.num_experts),
        ("fingerprint", expected.fingerprint),
    ):
        if raw.get(key) != value or type(raw.get(key)) is not type(value):
            return None, f"{source} is of another model: {key} is {raw.get(key)!r}, not {value!r}"
    try:
        given = np.array(raw["counts"])
        if given.dtype.kind not in "iuf" or any(
            isinstance(count, bool) for row in raw["counts"] for count in row
        ):
            raise TypeError("counts must be numbers")
        counts_LE = given.astype(np.float64)
        rows, decay = float(raw.get("rows", 0.0)), float(raw.get("decay", 1.0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None, f"{source} has counts that are not numbers"
    if counts_LE.shape != (expected.num_layers, expected.num_experts):
        return None, f"{source} has counts of shape {counts_LE.shape}"
    if not ((counts_LE >= 0) & (counts_LE <= MOST_COUNT)).all() or not 0 <= rows <= MOST_COUNT:
        return None, f"{source} has counts that are negative, not finite or beyond {MOST_COUNT:g}"
    if not 0 < decay <= 1:
        return None, f"{source} has a decay that is not above 0 and at most 1"
    profile = Profile(
        identity=expected,
        counts_LE=counts_LE,
        rows=rows,
        decay=decay,
        text=str(raw.get("text", "")),
        source=source,
    )
    return profile, ""


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile to a temporary name beside `path`, then rename: a kill leaves the old file whole."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "model": profile.identity.model,
        "layers": profile.identity.num_layers,
        "experts": profile.identity.num_experts,
        "fingerprint": profile.identity.fingerprint,
        "rows": profile.rows,
        "decay": profile.decay,
        "text": profile.text,
        "counts": [[round(float(count), 3) for count in row] for row in profile.counts_LE],
    }
    write_atomically(path, json.dumps(value, separators=(",", ":")) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write text so that `path` holds either the old content or all of the new."""
    path = path.resolve()  # a link stays a link: what it points to is replaced
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe cannot be replaced, only written to
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

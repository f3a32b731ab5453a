"""The learned expert profile: how often the router itself picked each expert, by layer.

A profile is a warm start: it decides which experts lie in the slots when an engine starts. It is a JSON file
with the identity of the model it was learned on; a file from elsewhere, or a broken one, is never an error,
it is left out with one warning (`load_profile` returns None and the reason).

    counts_LE   float64 [L, E]   decayed counts of the router's own picks of committed rows
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FORMAT = "warmset-profile"
VERSION = 1
MOST_BYTES = 256 << 20


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


def hottest(counts_LE: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
    order = np.argsort(-counts_LE, axis=None, kind="stable")[:num_slots]
    num_experts = counts_LE.shape[1]
    return [divmod(int(index), num_experts) for index in order]


def spread_evenly(num_layers: int, num_experts: int, num_slots: int) -> list[tuple[int, int]]:
    """Without a profile: the first experts of each layer, layers taking turns."""
    return [(index % num_layers, index // num_layers) for index in range(num_slots)]


def load_profile(path: Path, expected: Identity) -> tuple[Profile | None, str]:
    """Read and validate; (profile, "") or (None, the reason in one sentence). The file is only read."""
    try:
        if path.is_dir():
            return None, f"{path} is a directory"
        if path.exists() and not path.is_file():
            return None, f"{path} is no regular file"
        if path.exists() and path.stat().st_size > MOST_BYTES:
            return None, f"{path} is larger than any profile"
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
        return _validate(raw, expected, str(path))
    except FileNotFoundError:
        return None, f"{path} does not exist"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read ({error})"
    except (ValueError, RecursionError):  # ValueError also for numbers of thousands of digits
        return None, f"{path} is not whole JSON"


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
    whole = np.isfinite(counts_LE).all() and np.isfinite([rows, decay]).all()
    if not whole or (counts_LE < 0).any() or rows < 0:
        return None, f"{source} has counts that are negative or not finite"
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

"""Policies as text: `margin:margin=0.25,ranks=6-9`, `module:Class` for a user's own, or the name of a policy file.

A policy file is JSON: format `warmset-policy`, version 1, `policy` (the text of a policy) and whatever says where it
comes from. Knows names and fields, nothing of tensors.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

from warmset.errors import PolicyError
from warmset.routing import policies
from warmset.routing.base import Policy

POLICIES: dict[str, type] = {
    "exact": policies.Exact,
    "margin": policies.MarginSwap,
    "additive-bias": policies.AdditiveBias,
    "cache-prior": policies.CachePrior,
    "max-rank": policies.MaxRank,
    "cumulative-mass": policies.CumulativeMass,
    "window-joint": policies.WindowJoint,
    "drop-cold": policies.DropCold,
    "fewer-picks": policies.FewerPicks,
    "resident-only": policies.ResidentOnly,
    "random-swap": policies.RandomSwap,
}
"""Name on the command line -> class."""

FILE_FORMAT, FILE_VERSION = "warmset-policy", 1
MOST_FILE_BYTES = 1 << 20
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def parse_policy(text: str) -> Policy:
    """The policy that `NAME:key=value,...`, `module:Class[:key=value,...]` or a file `*.json` names.

    PolicyError otherwise, in one sentence. A number a layer is written with slashes: `margin:margin=0.1/0.3`.
    """
    name, _, rest = text.strip().partition(":")
    if text.strip().endswith(".json"):
        return read_policy_file(Path(text.strip()))
    if name in POLICIES:
        return _build(POLICIES[name], name, _arguments(rest, text))
    path, _, rest = _split_class(text.strip())
    if path:
        return _build(_load(path), path, _arguments(rest, text))
    raise PolicyError(
        f"`policy` must be one of {', '.join(POLICIES)}, module:Class, or a file *.json. Got {text!r}."
    )


def read_policy_file(path: Path) -> Policy:
    """The policy that a file holds; PolicyError naming the file when it is none."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise PolicyError(f"policy file {path} is larger than any policy.")
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"policy file {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"policy file {path} is not whole JSON.") from None
    known = isinstance(held, dict) and held.get("format") == FILE_FORMAT
    if not known or held.get("version") is not FILE_VERSION or not isinstance(held.get("policy"), str):
        raise PolicyError(f"{path} is no {FILE_FORMAT} of version {FILE_VERSION}.")
    if held["policy"].strip().endswith(".json"):
        raise PolicyError(f"policy file {path} must hold a policy, not the name of another file.")
    return parse_policy(held["policy"])


def policy_file(policy: Policy, evidence: dict[str, Any]) -> str:
    """The text of a file that `read_policy_file` turns into an equal policy; `evidence` says where it comes from."""
    held = {"format": FILE_FORMAT, "version": FILE_VERSION, "policy": describe(policy)}
    assert not held.keys() & evidence.keys(), evidence
    held |= evidence
    return json.dumps(held, ensure_ascii=False, indent=1) + "\n"


def describe(policy: Policy) -> str:
    """The text that `parse_policy` turns into an equal policy."""
    name = next((n for n, cls in POLICIES.items() if type(policy) is cls), None)
    if name is None:
        name = f"{type(policy).__module__}:{type(policy).__qualname__}"
    if not dataclasses.is_dataclass(policy):
        return name
    pairs = [(f.name, getattr(policy, f.name)) for f in dataclasses.fields(policy) if f.init]
    shown = ",".join(
        f"{key.replace('_', '-')}={_show(key, value)}" for key, value in pairs if value is not None
    )
    return f"{name}:{shown}" if shown else name


def _show(key: str, value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    # A number a layer keeps its slash where it is a single one, so that it is read back as one a layer.
    return (
        "-".join(map(str, value)) if key == "ranks" else "/".join(map(str, value)) + "/" * (len(value) == 1)
    )


def _split_class(text: str) -> tuple[str, str, str]:
    match = _CLASS_PATH.match(text)
    if match is None:
        return "", "", text
    rest = text[match.end() :]
    return (match.group(), ":", rest[1:]) if rest[:1] in ("", ":") else ("", "", text)


def _load(path: str) -> type:
    module_name, _, class_name = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise PolicyError(f"`policy` {path!r} cannot be loaded: {type(error).__name__}: {error}.") from None
    if not isinstance(loaded, type) or not callable(getattr(loaded, "route", None)):
        raise PolicyError(f"`policy` {path!r} must be a class with a method `route`.")
    return loaded


def _arguments(rest: str, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise PolicyError(f"`policy` takes key=value pairs after its name. Got {part!r} in {text!r}.")
        if key in pairs:
            raise PolicyError(f"`policy` names {key!r} twice. Got {text!r}.")
        pairs[key] = value.strip()
    return pairs


def _build(cls: type, name: str, given: dict[str, str]) -> Policy:
    values = {key: _value(key, text) for key, text in given.items()}
    if dataclasses.is_dataclass(cls):
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        unknown = [key for key in values if key not in fields]
        if unknown:
            known = ", ".join(f.replace("_", "-") for f in fields) or "nothing"
            raise PolicyError(f"`policy` {name} takes {known}. Got {unknown[0]!r}.")
        missing = [
            key
            for key, f in fields.items()
            if f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
            and key not in values
        ]
        if missing:
            raise PolicyError(f"`policy` {name} needs {missing[0].replace('_', '-')}=...")
    try:
        return cls(**values)
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(f"`policy` {name} cannot be made: {type(error).__name__}: {error}.") from None


def _value(key: str, text: str) -> Any:
    if key == "ranks":
        match = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", text)
        if match is None:
            raise PolicyError(f"`ranks` must be LO-HI, two whole numbers. Got {text!r}.")
        if any(len(number or "") > 9 for number in match.groups()):
            raise PolicyError("`ranks` must be LO-HI, two whole numbers under a billion.")
        lo = int(match[1])
        return lo, lo if match[2] is None else int(match[2])
    if "/" in text:
        parts = [_number(part) for part in text.removesuffix("/").split("/")]
        if not any(isinstance(part, str) for part in parts):
            return tuple(parts)
    return _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

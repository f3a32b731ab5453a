"""What a cache that learns must keep: it follows a switch of text, and it never costs much where it cannot help.

Both are judged on a recording of prose and then code. After the switch, `lfu` is compared with slots that a profile of
code filled: the better of the profile that ships and of one learned on the recorded code itself, on other rows than the
compared ones. The cost is compared with `off` for many slot counts, texts and starts, profiles of the very rows among
them, which no cache can better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from warmset.errors import WarmsetError
from warmset.measure.recording import Recording
from warmset.measure.replay import DEFAULT_EXPERT_BYTES, Rates, Replayed, replay
from warmset.profile import Identity, Profile, read_profile
from warmset.routing import Exact

SHARE = 0.16
SETTLING_TOKENS = 500
FOLDS = 3
MOST_POINTS = 5.0
MOST_RATIO = 1.03
SHARES = (0.04, 0.08, 0.16, 0.33, 0.5, 0.75)
BLOCK = 100


@dataclass(frozen=True, kw_only=True)
class Text:
    """One kind's windows: first .. end - 1."""

    kind: str
    first: int
    end: int


def learned_on(recorded: Recording, counts_LE: np.ndarray) -> Profile:
    identity = Identity(
        model=recorded.model,
        num_layers=recorded.num_layers,
        num_experts=recorded.num_experts,
        fingerprint=recorded.fingerprint,
    )
    return Profile(identity=identity, counts_LE=counts_LE)


def check(recorded: Recording, mix: Profile, code: Profile, rates: Rates | None = None) -> dict[str, Any]:
    """Judge `lfu` on a recording whose kinds are prose, then code, in windows of one row.

    mix, code: the profiles that ship. Returns figures; `ok` says whether every bar was met.
    """
    prose_text, code_text = _texts(recorded)
    rates = rates or Rates()
    slots = round(SHARE * recorded.num_layers * recorded.num_experts)
    first, end = code_text.first + SETTLING_TOKENS, code_text.end
    off = replay(recorded, num_slots=slots, learned=mix, rates=rates)
    lfu = replay(recorded, num_slots=slots, learned=mix, rule="lfu", rates=rates)
    lru = replay(recorded, num_slots=slots, learned=mix, rule="lru", rates=rates)
    filled = replay(recorded, num_slots=slots, learned=code, rates=rates)
    fitted = _cross_fitted(recorded, code_text, first, slots)
    shipped = filled.hit_rate_of(first, end)
    learned = max(fitted, shipped)
    ratios = _ratios(recorded, prose_text, code_text, mix, code, rates)
    worst = max(ratios, key=lambda entry: entry["ratio"])
    points = 100 * (learned - lfu.hit_rate_of(first, end))
    blocks = [
        {
            "tokens": start - code_text.first,
            **{
                name: run.hit_rate_of(start, min(start + BLOCK, end))
                for name, run in (("off", off), ("lfu", lfu), ("lru", lru), ("profile-code", filled))
            },
        }
        for start in range(prose_text.first, end, BLOCK)
    ]
    return {
        "slots": slots,
        "compared_tokens": end - first,
        "hit_rate_off": off.hit_rate_of(first, end),
        "hit_rate_lfu": lfu.hit_rate_of(first, end),
        "hit_rate_lru": lru.hit_rate_of(first, end),
        "hit_rate_learned_shipped": shipped,
        "hit_rate_learned_cross_fitted": fitted,
        "points_below_learned": points,
        "ms_off": off.ms_per_window,
        "ms_lfu": lfu.ms_per_window,
        "ms_lru": lru.ms_per_window,
        "worst_ms_ratio": worst["ratio"],
        "worst_at": worst,
        "mean_ms_ratio": float(np.mean([entry["ratio"] for entry in ratios])),
        "ratios": len(ratios),
        "ratios_above": sum(entry["ratio"] > MOST_RATIO for entry in ratios),
        "blocks": blocks,
        "ok": points <= MOST_POINTS and worst["ratio"] <= MOST_RATIO,
    }


def forms_agree(recorded: Recording, mix: Profile) -> bool:
    """Whether the replay by arrays counts what the routers' own code counts, on the first windows."""
    part = recorded.rows(0, recorded.windows[:64][-1][1])
    part = replace(part, margin=None)  # exact routing needs no score that a recording may lack
    slots = round(SHARE * recorded.num_layers * recorded.num_experts)
    fast = replay(part, num_slots=slots, learned=mix, rule="lfu")
    slow = replay(part, num_slots=slots, learned=mix, rule="lfu", policy=_RoutedExact())
    return fast.figures() == slow.figures()


class _RoutedExact(Exact):
    """Exact routing through the routers' code."""


def _texts(recorded: Recording) -> tuple[Text, Text]:
    kinds = [recorded.kinds[kind] for kind in recorded.kind_N]
    switch = kinds.count("prose")
    whole = kinds == ["prose"] * switch + ["code"] * (len(kinds) - switch)
    one_row = len(recorded.windows) == recorded.num_rows
    if not whole or not one_row or switch == 0 or len(kinds) - switch < SETTLING_TOKENS + BLOCK:
        raise WarmsetError(
            f"--check needs a trace of prose, then at least {SETTLING_TOKENS + BLOCK} rows of code, in windows of one "
            "row, such as the committed rows of the one that ships."
        )
    return Text(kind="prose", first=0, end=switch), Text(kind="code", first=switch, end=len(kinds))


def _cross_fitted(recorded: Recording, code: Text, first: int, slots: int) -> float:
    """Hit rate of rows first .. in slots that the other rows of code fill, fold by fold."""
    hits = picks = 0.0
    whole_LE = recorded.rows(code.first, code.end).counts_LE()
    for fold in np.array_split(np.arange(first, code.end), FOLDS):
        part = recorded.rows(int(fold[0]), int(fold[-1]) + 1)
        run = replay(part, num_slots=slots, learned=learned_on(recorded, whole_LE - part.counts_LE()))
        hits += run.hit_rate * run.picks
        picks += run.picks
    return hits / picks


def _ratios(
    recorded: Recording, prose: Text, code: Text, mix: Profile, code_profile: Profile, rates: Rates
) -> list[dict[str, Any]]:
    """Median predicted ms of `lfu` over that of `off`, by share of slots, text, and what filled the slots."""
    texts = {
        "prose": recorded.rows(prose.first, prose.end),
        "code": recorded.rows(code.first, code.end),
        "prose, then code": recorded,
    }
    starts: dict[str, Profile | None] = {"profile-mix": mix, "profile-code": code_profile, "no profile": None}
    for name, text in texts.items():
        starts[f"the rows of {name}"] = learned_on(recorded, text.counts_LE())
    total = recorded.num_layers * recorded.num_experts
    found = []
    for share in SHARES:
        for text_name, text in texts.items():
            for start_name, start in starts.items():
                runs: list[Replayed] = [
                    replay(text, num_slots=round(share * total), learned=start, rule=rule, rates=rates)
                    for rule in ("off", "lfu")
                ]
                found.append(
                    {
                        "ratio": runs[1].ms_per_window / runs[0].ms_per_window,
                        "share": share,
                        "text": text_name,
                        "start": start_name,
                    }
                )
    return found


def shipped_check(rates: Rates | None = None) -> dict[str, Any]:
    """`check` on the profiles and the trace that ship, its committed rows one by one.

    Experts have the size in `rates`, or that of its defaults: those of the embedded model would cost nothing to copy.
    """
    from warmset.measure.recording import load_recording
    from warmset.models import BUILTIN, DATA

    rates = rates or Rates()
    recorded = load_recording(DATA / "trace.safetensors")
    recorded = replace(recorded, expert_bytes=rates.expert_bytes or DEFAULT_EXPERT_BYTES)
    tiny = BUILTIN["builtin:tiny"]
    mix, code = (read_profile(tiny / f"profile-{name}.json") for name in ("mix", "code"))
    for learned in (mix, code):
        if learned.identity.fingerprint != recorded.fingerprint:
            raise WarmsetError(f"{learned.source} is not of the model that the trace is of.")
    return {**check(recorded.row_by_row(), mix, code, rates), "forms_agree": forms_agree(recorded, mix)}

"""`warmset.price`: what routing policies cost in quality, from a model and a text to a report.

    model, text -> scorer -> Measurement -> Summary -> PriceReport

A model is a name (loaded here), an engine that is loaded, or a transformers model with simulated residency.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import warmset
from warmset.config import EngineConfig, SlotsRequest, require, shown
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.measure.price.documents import Document, ScoredText, documents_of, read_documents, split_text
from warmset.measure.price.measurement import Measurement, Pass, Progress
from warmset.measure.price.records import columns_of, rows_of, write_records
from warmset.measure.price.scorers import EngineScorer, Scorer, TransformersScorer, slots_of
from warmset.measure.price.summary import Summary
from warmset.measure.price.sweep import SLOT_SHARES, all_policies, cold_with
from warmset.measure.price.work import Work, default_root
from warmset.measure.record import versions
from warmset.prepare import check_policy
from warmset.routing import Policy, describe
from warmset.text import Engine, load_tokenizer

DEFAULT_SLOTS = "33%"
DEFAULT_CONTEXT = 2048
RESIDENCIES = ("frozen", "live")
SWEPT = (
    *("policy", "verdict", "argmax_same", "kl", "kl_interval", "kl_p99", "excess_kl", "excess_kl_interval"),
    *("loss", "loss_change", "loss_change_interval", "swaps", "dropped", "bytes_per_token", "bytes_saved"),
    "cold_experts_per_layer_window",
)
"""What is kept of each policy of a sweep."""


@dataclass(frozen=True, kw_only=True)
class PriceConfig:
    """How a price is measured.

    rows: of a window. residency: `frozen` leaves the slots as they were filled, `live` lets admission move experts
    between windows, every pass from the same start. controls: off against off, the
    rounding null and random swaps. positions: only the first so many, None = all. context: the longest segment.
    simulate_residency: every expert is loaded, and policies are only told that some are cold. resume: go on with
    what an interrupted run of the same measurement left.
    """

    rows: int = 4
    residency: str = "frozen"
    controls: bool = True
    seed: int = 0
    positions: int | None = None
    context: int = DEFAULT_CONTEXT
    simulate_residency: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        require(type(self.rows) is int and 1 <= self.rows <= 8, "window", "1 to 8 rows", self.rows)
        require(
            self.residency in RESIDENCIES, "residency", f"one of {', '.join(RESIDENCIES)}", self.residency
        )
        if self.simulate_residency and self.residency != "frozen":
            raise WarmsetError("simulated residency is frozen: no expert moves where all are loaded.")
        require(type(self.seed) is int and 0 <= self.seed < 2**31, "seed", "0 to 2**31 - 1", self.seed)
        legal = self.positions is None or (type(self.positions) is int and self.positions >= 1)
        require(legal, "positions", "1 or more", self.positions)
        require(type(self.context) is int and self.context >= 3, "context", "3 or more tokens", self.context)


@dataclass
class PriceReport:
    """What was found: `results` as written by `--json`, and every position of every policy."""

    results: dict[str, Any]
    text: ScoredText
    off: Pass
    arms: dict[str, tuple[Pass, list[Pass]]] = field(default_factory=dict)
    """Policy -> its pass and its rounding nulls."""

    def records(self, policy: str) -> Iterator[dict[str, Any]]:
        """One dictionary a position of this policy; its names are those of `warmset.measure.price.records`."""
        if policy not in self.arms:
            raise WarmsetError(f"policy must be one of {', '.join(self.arms)}. Got {shown(policy)}.")
        yield from rows_of(columns_of(self.text, policy, self.off, *self.arms[policy]))

    def save_records(self, path: str | Path) -> None:
        """All positions of all policies into a .jsonl or .parquet file."""
        write_records(path, [columns_of(self.text, name, self.off, *arm) for name, arm in self.arms.items()])


class Pricing:
    """One measurement and the summary of its passes; closes its work folder when it is finished."""

    def __init__(
        self,
        scorer: Scorer,
        text: ScoredText,
        config: PriceConfig,
        *,
        dtype: torch.dtype,
        identity: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.scorer, self.text, self.config, self.dtype = scorer, text, config, dtype
        self._temporary: Path | None = None
        if identity is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="warmset-price-"))
        whole = {
            **(identity or {}),
            "tokens": text.token_hash,
            "rows": config.rows,
            "residency": config.residency,
            "seed": config.seed,
            "slots": scorer.routing.slot_LE.cpu().tolist(),
            "dtype": str(dtype),
            "versions": versions(),
        }
        self.work = Work(self._temporary or default_root(), whole, resume=config.resume)
        self.measurement = Measurement(
            *(scorer, text, self.work),
            rows=config.rows,
            seed=config.seed,
            residency=config.residency,
            progress=progress,
        )
        self.summary = Summary(text, scorer.expert_bytes, seed=config.seed)
        self.arms: dict[str, tuple[Pass, list[Pass]]] = {}

    def off(self) -> dict[str, Any]:
        """The figures of off; with controls also how many positions a second pass had the same bits at."""
        found = self.summary.off(self.measurement.reference())
        checked = self.measurement.check_off() if self.config.controls else None
        return {**found, "checked_positions": checked}

    def arm(self, policy: Policy, *, random: bool = True) -> dict[str, Any]:
        """The figures of one policy, with its controls; `random`: random swaps among them, where it swaps."""
        name, measurement = describe(policy), self.measurement
        found, off = measurement.policy(policy), measurement.reference()
        changed = bool(found.routing.changed_NL.any())
        nulls, control = [], None
        if self.config.controls and changed:
            nulls = measurement.nulls(found, self.dtype)
            if random and found.routing.swaps_N.any():
                control = measurement.random_swaps(found)
        self.arms[name] = (found, nulls)
        return self.summary.arm(name, off, found, nulls, control)

    def sweep(self, residents: Callable[[int], list[tuple[int, int]]]) -> dict[str, Any]:
        """All policies side by side, and exact routing with more slots; `residents(n)`: who lies in n slots.

        One null for all: every row rounded in every layer, which is no smaller than any policy's own.
        """
        measurement, top_k = self.measurement, self.scorer.routing.made[0].ids_TK.shape[1]
        off, null = measurement.reference(), measurement.null_everywhere()
        families: dict[str, list[dict[str, Any]]] = {}
        for family, policies in all_policies(top_k).items():
            for policy in policies:
                found = measurement.policy(policy)
                arm = self.summary.arm(describe(policy), off, found, [null])
                families.setdefault(family, []).append({key: arm[key] for key in SWEPT})
        return {
            "families": families,
            "null_kl": float(null.kl_N.mean()),
            "exact": self._exact(off, residents),
        }

    def _exact(self, off: Pass, residents: Callable[[int], list[tuple[int, int]]]) -> list[dict[str, Any]]:
        """Bytes that exact routing reads with more slots: the picks are the same for any residency."""
        shape = self.scorer.routing.slot_LE.shape
        total = shape[0] * shape[1]
        found = []
        for share in SLOT_SHARES:
            table = slots_of(residents(round(share * total)), *shape)
            found.append(
                {"share": share, "bytes_per_token": cold_with(off.routing, table) * self.scorer.expert_bytes}
            )
        return found

    def finish(self) -> None:
        """Delete what was kept for an interruption."""
        self.work.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def about(self) -> dict[str, Any]:
        """What was measured, for the record."""
        slot_LE = self.scorer.routing.slot_LE
        return {
            "text": self.text.name,
            "token_hash": self.text.token_hash,
            "positions": self.text.num_positions,
            "documents": len({segment.document for segment in self.text.segments}),
            "kinds": self.text.kinds,
            "rows": self.config.rows,
            "residency": self.config.residency,
            "simulated": self.config.simulate_residency,
            "resident": int((slot_LE >= 0).sum()),
            "experts_total": slot_LE.numel(),
            "expert_bytes": self.scorer.expert_bytes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seed": self.config.seed,
        }


def price(
    model: Any = "builtin:tiny",
    text: Any = "builtin:price",
    policies: Sequence[Policy] = (),
    *,
    residency: str = "frozen",
    slots: str | int | Tensor = DEFAULT_SLOTS,
    rows: int = 4,
    controls: bool = True,
    positions: int | None = None,
    seed: int = 0,
    simulate_residency: bool = False,
    resume: bool = False,
    tokenizer: Any = None,
    progress: Progress | None = None,
    **settings: Any,
) -> PriceReport:
    """Measure what routing policies cost in quality, teacher-forced through decode windows.

    Args:
        model: a name, a folder or a hub id, which is loaded with `slots` and `settings` (`config.EngineConfig`); a
            loaded `warmset.Engine`; or a transformers model, whose residency is simulated.
        text: a text, texts, or (kind, text) pairs; a `Path`, or `builtin:price`, `builtin:calibration`.
        policies: such as `[warmset.MarginSwap(margin=0.25)]`.
        residency: `frozen`, or `live`: admission moves experts between windows, every pass from the same start.
        slots: as the engine's; for a transformers model an int32 table [L, E], -1 where an expert is cold.
        rows: of a window, 1 to 8.
        controls: off against off, the rounding null, random swaps.
        positions: score only the first so many.
        simulate_residency: load every expert and only tell policies that some are cold.
        resume: go on with what an interrupted run of the same measurement left.
        tokenizer: of a transformers model.

    Returns:
        A report: `results` is what `warmset price --json` writes, `records(policy)` gives one dictionary a position.

    Raises:
        ValueError: in one sentence, for bad input, and where two passes with routing off differ.
    """
    config = PriceConfig(
        rows=rows,
        residency=residency,
        controls=controls,
        seed=seed,
        positions=positions,
        simulate_residency=simulate_residency,
        resume=resume,
    )
    policies = list(policies)
    check_policies(policies)
    source = Source.of(text)
    if isinstance(model, Engine | TokenEngine | str | Path):
        engine = model
        if isinstance(model, str | Path):
            engine = open_engine(str(model), slots, config, progress, **settings)
        tokens = engine.tokens if isinstance(engine, Engine) else engine
        assert isinstance(tokens, TokenEngine)
        tokenizer = engine.tokenizer if isinstance(engine, Engine) else load_tokenizer(tokens.prepared)
        try:
            scored = scored_text(source, tokenizer, config, tokens)
            pricing = price_engine(tokens, scored, config, slots, progress)
            report = run(pricing, policies)
            pricing.finish()
            return report
        finally:
            if isinstance(model, str | Path):
                tokens.close()
    if tokenizer is None:
        raise WarmsetError("tokenizer must be given with a transformers model.")
    if residency != "frozen":
        raise WarmsetError("residency of a transformers model is only said, so it is frozen. Got 'live'.")
    if isinstance(slots, str | int):
        raise WarmsetError(
            "slots must be an int32 table [L, E] for a transformers model, -1 where one is cold."
        )
    scorer = TransformersScorer(model, slots)
    try:
        pricing = Pricing(scorer, scored_text(source, tokenizer, config), config, dtype=model.dtype)
        report = run(pricing, policies)
        pricing.finish()
        return report
    finally:
        scorer.close()


def open_engine(
    model: str, slots: Any, config: PriceConfig, progress: Callable | None, **settings: Any
) -> TokenEngine:
    """The model with these slots, or with every expert in a slot where residency is only simulated."""
    request = SlotsRequest(text="all" if config.simulate_residency else str(slots))
    admission = "lfu" if config.residency == "live" else "off"
    engine = EngineConfig(model=model, slots=request, stages=False, admission=admission, **settings)
    return TokenEngine(engine, None, progress)


def price_engine(
    engine: TokenEngine, text: ScoredText, config: PriceConfig, slots: Any, progress: Progress | None
) -> Pricing:
    """A measurement with a loaded engine; its work folder is named after the model's fingerprint."""
    if config.residency == "live" and engine.residency.admission is None:
        raise WarmsetError("live residency needs an engine with admission. Got admission 'off'.")
    table = simulated_slots(engine, slots) if config.simulate_residency else None
    identity = {**vars(engine.identity()), "device": str(engine.prepared.device)}
    scorer = EngineScorer(engine, table)
    return Pricing(scorer, text, config, dtype=engine.prepared.dtype, identity=identity, progress=progress)


def simulated_slots(engine: TokenEngine, slots: Any) -> Tensor:
    """int32 [L, E]: the slots that an engine with this setting would start with."""
    experts = engine.prepared.experts
    total = experts.num_layers * experts.num_experts
    asked = SlotsRequest(text=str(slots)).resolve(experts_total=total, fitting=total, fitting_why="")
    return slots_of(engine.choose_residents(asked.value), experts.num_layers, experts.num_experts)


@dataclass(frozen=True)
class Source:
    """Documents and the name that a record calls them by."""

    name: str
    documents: list[Document]

    @classmethod
    def of(cls, text: Any) -> Source:
        """From a text, texts or (kind, text) pairs; a `Path` or a name that begins with `builtin:` is read."""
        if isinstance(text, Path) or (isinstance(text, str) and text.startswith("builtin:")):
            return cls(str(text), read_documents(text))
        return cls("text", documents_of([text] if isinstance(text, str) else text))


def scored_text(
    source: Source, tokenizer: Any, config: PriceConfig, engine: TokenEngine | None = None
) -> ScoredText:
    """The text in segments that fit the model, up to the positions that are wanted."""
    from warmset.model import quiet_transformers

    most = config.context if engine is None else min(config.context, engine.prepared.max_model_len)
    with quiet_transformers():
        found = split_text(source.documents, tokenizer.encode, most, name=source.name)
    return found if config.positions is None else found.first_positions(config.positions)


def check_policies(policies: Sequence[Any]) -> None:
    """Refuse what is no policy, and the same one twice."""
    for policy in policies:
        if policy is None:
            raise WarmsetError("policies must be policies: off is measured in any case. Got None.")
        check_policy(policy)
    names = [describe(policy) for policy in policies]
    if len(set(names)) < len(names):
        raise WarmsetError(f"policies must differ. Got {next(n for n in names if names.count(n) > 1)} twice.")


def run(pricing: Pricing, policies: Iterable[Policy]) -> PriceReport:
    """Off, then each policy with its controls; what was kept for an interruption stays."""
    policies = list(policies)
    check_policies(policies)
    try:
        off = pricing.off()
        arms = [pricing.arm(policy) for policy in policies]
    except BaseException:
        pricing.work.release()
        raise
    results = {"version": warmset.__version__, **pricing.about(), "off": off, "policies": arms}
    return PriceReport(results, pricing.text, pricing.measurement.reference(), dict(pricing.arms))

"""Token ids in, token ids out: the whole road from a checkpoint to decode windows, in one object.

    checkpoint -> store -> slots -> model -> window -> here

Knows no text and no HTTP. In exact mode (no policy) logits do not depend, bit for bit, on how many slots there
are or which experts lie in them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from warmset import checkpoint as ckpt
from warmset import drafting, model, plan, profile
from warmset.answer import Answer, Run, Watch
from warmset.captured import CapturedWindows
from warmset.config import MAX_WINDOW_ROWS, EngineConfig, Resolved, SamplingConfig
from warmset.conversation import Conversation
from warmset.depth import Depth
from warmset.device_experts import DeviceExperts, activation_name, open_arena, why_not
from warmset.errors import WarmsetError
from warmset.experts import ExpertRunner
from warmset.graph.stamps import StampClock, follow_kinds
from warmset.models import BUILTIN_PROFILES
from warmset.mtp import MtpDraft
from warmset.needs import needs_of
from warmset.prepare import check_policy, check_prompt, identity_of, prepare
from warmset.residency import Residency
from warmset.router import Routing
from warmset.routing import Policy, describe
from warmset.sample import Sampler
from warmset.slots import AddressTable, Slots
from warmset.stages import StageClock
from warmset.store import FileStore, Store
from warmset.window import WindowRunner

Progress = Callable[[str, int, int], None]


class TokenEngine:
    """A loaded model with its slots filled; `decode` answers one prompt at a time."""

    def __init__(
        self, config: EngineConfig, policy: Policy | None = None, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.policy = policy
        self.prepared = prepare(config)
        self.notes: list[str] = []
        device, stages = self.prepared.device, config.stages
        self._wants_graphs = config.graphs == "on" or (config.graphs == "auto" and device.type == "cuda")
        kind = StampClock if self._wants_graphs else StageClock
        self.clock: StageClock = kind(device, enabled=device.type == "cpu" if stages is None else stages)
        self._progress = progress
        self._answering = threading.Lock()
        self._closed = False
        check_policy(policy)
        if config.route_kernel != "fused" and self.prepared.device.type == "cpu":
            self.notes.append(
                f"route_kernel {config.route_kernel} is for GPUs: on the CPU plain torch routes."
            )
        self._load()
        self.run = Run()

    def _load(self) -> None:
        prepared = self.prepared
        experts, device = prepared.experts, prepared.device
        trunk = model.load_trunk(
            prepared.checkpoint,
            prepared.config,
            prepared.covered,
            prepared.dtype,
            device,
        )
        model.skip_unused_indexers(trunk, prepared.max_model_len)
        layers = model.find_layers(trunk, experts)
        self.rule = layers[0].rule
        layout = experts.layout.with_dtype(prepared.dtype)
        self.num_slots = self._resolve_slots(layout, trunk)
        self.store = self._open_store()
        self.slots = Slots(
            num_slots=self.num_slots.value,
            layout=layout,
            num_layers=experts.num_layers,
            num_experts=experts.num_experts,
            device=device,
            checked=self.config.check_slots,
        )
        chosen = self.choose_residents(self.num_slots.value)
        self.slots.fill(chosen, self.store, self._reporter("filling slots"))
        self.store.reset_counts()
        activation = model.activation_of(trunk, layers)
        kernels = self._device_experts(self.slots, self.store, activation, self.clock)
        runner = ExpertRunner(self.slots, self.store, activation, self.clock, kernels)
        routing = Routing(
            self.policy,
            self.rule,
            self.slots.device_table_LE,
            max_rows=MAX_WINDOW_ROWS,
            form=self.config.route_kernel,  # type: ignore[arg-type]  # checked by the config
        )
        self.notes.extend(routing.notes)
        model.install(trunk, layers, runner, routing, self.clock)
        if isinstance(self.clock, StampClock):
            follow_kinds(trunk, self.clock)
        self.runner = runner
        self.windows = WindowRunner(trunk, runner, routing, self.clock)
        self.windows.residency = self.residency = self._open_residency()
        self._open_draft(trunk)
        self._open_captured()

    def _open_residency(self) -> Residency:
        residency = Residency(
            self.slots,
            self.store,
            self.config.admission,
            learned=self.learned,
            picks_a_row=self.prepared.experts.num_layers * self.rule.top_k,
        )
        self._learner: profile.Learner | None = None
        if self.config.learn is not None:
            identity = self.identity()
            start = profile.profile_to_extend(Path(self.config.learn), identity)
            self._learner = profile.Learner(identity, start, text="answers")
            residency.listeners.append(self._learner.add)
        return residency

    def refill(self) -> None:
        """Slots as at the start, and admission with nothing learned, so that the legs of a measurement begin alike."""
        self.residency.settle()
        self.slots.fill(self.choose_residents(self.slots.num_slots), self.store)
        self.store.reset_counts()
        self.windows.residency = self.residency = self._open_residency()

    def _save_learned(self) -> None:
        if self._learner is not None and self.config.learn is not None:
            profile.save_profile(self._learner.profile(), Path(self.config.learn))

    def _open_draft(self, trunk: Any) -> None:
        prepared, wanted = self.prepared, self.prepared.drafting
        rows = wanted.rows
        if rows > 1 and self.windows.one_row_because is not None:
            self.notes.append(f"Windows have one row: {self.windows.one_row_because}.")
            wanted = drafting.Drafting(rows=1, source="none", why=self.windows.one_row_because)
        elif rows < (self.config.window or 1):
            self.notes.append(f"Windows have one row: {wanted.why}.")
        self.drafting = wanted
        self.draft = drafting.open_draft(
            wanted,
            checkpoint=prepared.checkpoint,
            trunk=trunk,
            dtype=prepared.dtype,
            device=prepared.device,
            max_model_len=prepared.max_model_len,
            make_kernels=self._device_experts,
        )
        self.depth = Depth(wanted.rows, adapt=self.config.adapt)
        if self.draft.wants_hidden:
            self.windows.on_rows = self.draft.see
        self.conversation = Conversation(self.windows, self.draft, self.config.snapshot_bytes)

    def _open_captured(self) -> None:
        source = self.drafting.source
        self.captured: CapturedWindows | None = None
        if not self._wants_graphs:
            self._no_graphs = "graphs are off" if self.config.graphs == "off" else "the device is the CPU"
        elif source == "model":
            self._no_graphs = "the host makes the drafts (model)"
        else:
            self._no_graphs = ""
            self.captured = CapturedWindows(
                self.windows,
                self.runner,
                self.clock,
                source=source,  # type: ignore[arg-type]  # one of the three
                max_model_len=self.prepared.max_model_len,
                mtp=self.draft if isinstance(self.draft, MtpDraft) else None,
            )

    def _reporter(self, what: str) -> Callable[[int, int], None] | None:
        progress = self._progress
        return None if progress is None else lambda done, total: progress(what, done, total)

    def _resolve_slots(self, layout: ckpt.ExpertLayout, trunk: torch.nn.Module) -> Resolved[int]:
        experts, device = self.prepared.experts, self.prepared.device
        vram = None if self.config.vram is None else plan.parse_bytes(self.config.vram, "vram")
        needs = needs_of(
            self.prepared,
            layout,
            trunk,
            top_k=self.rule.top_k,
            graphs=self._wants_graphs,
            snapshot_bytes=self.config.snapshot_bytes,
        )
        planned = plan.make_plan(device, needs, layout.nbytes, vram)
        total = experts.num_layers * experts.num_experts
        automatic = min(total, planned.fitting)
        slots = self.config.slots.resolve(
            experts_total=total, fitting=automatic, fitting_why=planned.sentence(automatic)
        )
        plan.check_fits(planned, slots.value, device)
        if device.type == "cuda":
            self.notes.append(f"Plan: {planned.sentence(slots.value)}.")
        return slots

    def _open_store(self) -> Store:
        device, experts = self.prepared.device, self.prepared.experts
        files = FileStore(experts)
        if device.type == "cpu":
            return files
        arena_bytes = (
            experts.num_layers * experts.num_experts * experts.layout.with_dtype(self.prepared.dtype).nbytes
        )
        tier = plan.choose_slow_tier(arena_bytes)
        self.notes.append(f"Cold experts: {tier.why}.")
        if tier.value == "disk":
            return files
        report = self._reporter("filling the host arena")
        arena, notes = open_arena(files, device, self.prepared.dtype, progress=report)
        files.close()
        self.notes.extend(notes)
        return arena

    def _device_experts(
        self, slots: Slots, store: Store, activation: Callable, clock: StageClock
    ) -> DeviceExperts | None:
        """The kernels, or None for plain torch; on a GPU the reason is said."""
        if self.prepared.device.type == "cpu":
            return None
        reason = why_not(self.prepared.device, activation)
        if reason is not None:
            self.notes.append(f"Experts run in plain torch, which is slower: {reason}.")
            return None
        name = activation_name(activation)
        assert name is not None
        table = AddressTable(slots, store)
        return DeviceExperts(slots, store, table, name, clock)

    def choose_residents(self, count: int) -> list[tuple[int, int]]:
        """The (layer, expert) pairs that fill `count` slots when an engine starts, by the profile if there is one."""
        experts = self.prepared.experts
        self.learned: profile.Profile | None = None
        path: str | Path | None = self.config.profile
        if path is None:
            path = BUILTIN_PROFILES.get(self.config.model)
        if path is not None:
            learned, reason = profile.load_profile(Path(path), self.identity())
            if learned is not None:
                self.learned = learned
                self.residents_from = f"profile {Path(path).name}"
                return learned.hottest(count)
            self.notes.append(f"Starting without the learned profile: {reason}.")
        self.residents_from = "no profile: spread evenly"
        return profile.spread_evenly(experts.num_layers, experts.num_experts, count)

    def use_policy(self, policy: Policy | None) -> None:
        """Route the windows that follow by this policy; None is off. Nothing of the old one's is kept."""
        check_policy(policy)
        if self._answering.locked():
            raise WarmsetError("This engine is answering: its policy changes between answers.")
        self.windows.routing.use(policy)
        self.policy = policy
        self.conversation.forget()
        if self.captured is not None:
            self.captured.forget()

    def identity(self) -> profile.Identity:
        experts = self.prepared.experts
        return identity_of(self.config.model, experts, self.prepared.checkpoint)

    def decode(
        self,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        stop_ids: frozenset[int] = frozenset(),
        watch: Watch | None = None,
    ) -> Iterator[int]:
        """Yield new token ids one by one; `self.run` and `stats()` hold the figures. Counters start at zero.

        watch: told of each token as it is drawn; when it returns True the answer ends with that token.
        """
        limit = self.prepared.max_model_len
        check_prompt(len(prompt_ids), limit)
        self._check_ids(prompt_ids, "prompt ids")
        self._check_ids(list(sampling.logit_bias), "logit_bias ids")
        if self._closed:
            raise WarmsetError("This engine is closed.")
        if not self._answering.acquire(blocking=False):
            raise WarmsetError("This engine is already answering: it makes one answer at a time.")
        try:
            yield from self._decode(prompt_ids, sampling, stop_ids, watch)
        finally:
            self._answering.release()

    def _check_ids(self, ids: list[int], name: str) -> None:
        size = getattr(self.prepared.config, "vocab_size", None)
        for token in ids:
            if not isinstance(token, int) or token < 0 or (size is not None and token >= size):
                raise WarmsetError(f"{name} must be 0 to {size - 1 if size else '...'}. Got {token!r}.")

    def _decode(
        self, prompt_ids: list[int], sampling: SamplingConfig, stop_ids: frozenset[int], watch: Watch | None
    ) -> Iterator[int]:
        self.windows.reset_counts()
        self.store.reset_counts()
        self.residency.reset_counts()
        self.run = run = Run(prompt_tokens=len(prompt_ids))
        answer = Answer(
            self.windows,
            self.draft,
            self.depth,
            Sampler(sampling, seen=set(prompt_ids)),
            self.clock,
            run,
            stop_ids=stop_ids,
            max_model_len=self.prepared.max_model_len,
            watch=watch,
            captured=self.captured,
        )
        start = time.perf_counter()
        sequence, logits_V, run.cached_tokens = self.conversation.read(prompt_ids)
        try:
            drawn = answer.first(sequence, logits_V)
            run.prompt_ms = 1e3 * (time.perf_counter() - start)
            run.led_by_host = self._no_graphs or answer.why_host(sequence)
            yield from answer.tokens(sequence, drawn, lambda: self._closed)
        finally:
            self.conversation.keep(sequence)
            self._save_learned()
            if self.config.check_slots:
                self.slots.check_integrity()

    def stats(self) -> dict[str, Any]:
        """The figures of the last answer under the names of `generate --json`; unknown is None."""
        run, counts, reads = self.run, self.windows.counts, self.runner.counts
        windows = counts.windows
        stages = self.clock.typical_ms()
        mean_ms = run.decode_ms / windows if windows else None
        routing = counts.routing()
        return {
            "prompt_tokens": run.prompt_tokens,
            "cached_tokens": run.cached_tokens,
            "new_tokens": run.new_tokens,
            "finish_reason": run.finish_reason,
            "windows": windows,
            "accepted_per_window": counts.rows / windows if windows else None,
            "ms_per_window": stages.get("total", mean_ms),
            "tokens_per_sec": 1e3 * counts.rows / run.decode_ms if windows else None,
            "prompt_ms": run.prompt_ms,
            "device": str(self.prepared.device),
            "dtype": str(self.prepared.dtype).removeprefix("torch."),
            "slots": self.slots.num_slots,
            "slots_why": self.num_slots.why,
            "experts_total": self.prepared.experts.num_layers * self.prepared.experts.num_experts,
            "residents_from": self.residents_from,
            "max_model_len": self.prepared.max_model_len,
            "bytes_fast": reads.bytes_fast,
            "bytes_slow": self.store.bytes_read,
            "read_ms": self.store.read_ms,
            "admission": self.residency.stats(),
            "routing": {
                "policy": "off" if self.policy is None else describe(self.policy),
                **routing,
                "verified": counts.verified_routing(),
            },
            "drafts": {
                "source": self.drafting.source,
                "source_why": self.drafting.why,
                "most_rows": self.drafting.rows,
                "rows": self.depth.rows,
                "rows_why": self.depth.why,
                "verified_rows": counts.verified_rows,
                **run.drafts(),
            },
            "cold_experts_per_layer_window": (
                reads.cold_experts / reads.layer_windows if reads.layer_windows else None
            ),
            "hit_rate": 1 - routing["cold_after"] / counts.picks if counts.picks else None,
            "stages": stages or None,
            "graphs": {
                "used": run.led_by_host is None,
                "why_not": run.led_by_host,
                "captures": 0 if self.captured is None else self.captured.captures,
            },
        }

    def close(self) -> None:
        """Let go of files and pinned memory; the engine answers nothing afterwards."""
        self._closed = True
        self.residency.close()
        self.store.close()

    def __enter__(self) -> TokenEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

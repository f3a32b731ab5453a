"""Seeded random cases for the parity harness: ordinary rows, and all that is known to break routing.

A batch holds the rows of one window (on a GPU of several: a launch is dear, a row is cheap) with one residency
and one set of numbers. Shape letters: T rows, E experts, K picks a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warmset.routing import (
    AdditiveBias,
    CachePrior,
    MarginSwap,
    Policy,
    PolicyTable,
    RouteContext,
    RouterRule,
    WindowJoint,
)

EXPERTS = (8, 64, 128, 257, 384, 512)
MAX_ROWS = 8

GPU_SHAPES = ((8, 2), (64, 8), (64, 32), (128, 6), (257, 8), (384, 10), (512, 10))
GPU_POLICY_SHAPES = ((128, 6), (512, 10))
"""(E, K) on a GPU: each pair is compiled, so there are few; the other policies and rules take fewer."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that share residency and numbers.

    free_TK int32: ids that did not come from a router (repeats, padding), for the swap kernels alone; None where
    the ids are the router's. policy: one of the other fused policies, compared with its reference, or None.
    """

    number: int
    num_cases: int
    rule: RouterRule
    logits_TE: Tensor
    slot_E: Tensor
    bias_E: Tensor | None
    margin: float
    lo: int
    hi: int
    free_TK: Tensor | None
    weights_TK: Tensor
    policy: Policy | None

    def table(self, device: torch.device) -> PolicyTable:
        table = PolicyTable.full(1, self.margin, self.lo, self.hi, top_k=self.rule.top_k, device=device)
        return table

    def context(self, device: torch.device) -> RouteContext:
        """For `policy`: margin and ranks in the table where it has them, its own numbers otherwise."""
        table = self.table(device) if isinstance(self.policy, WindowJoint) else None
        mean_range_L = torch.tensor([4.0], device=device)
        return RouteContext(table=table, mean_range_L=mean_range_L)

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def row(self, row: int) -> Batch:
        """One row alone."""
        rows = slice(row, row + 1)
        free_TK = None if self.free_TK is None else self.free_TK[rows]
        return replace(
            self,
            num_cases=1,
            logits_TE=self.logits_TE[rows],
            free_TK=free_TK,
            weights_TK=self.weights_TK[rows],
        )


def make_batch(seed: int, number: int, *, experts: tuple[int, ...] = EXPERTS, gpu: bool = False) -> Batch:
    """Batch `number` of a run; the same for the same arguments everywhere."""
    rng = np.random.default_rng([seed, number])
    if gpu:
        num_experts, top_k = GPU_SHAPES[rng.integers(len(GPU_SHAPES))]
    else:
        num_experts = int(rng.choice(experts))
        most = min(32 if rng.random() < 0.15 else 10, num_experts)  # few large K: the interpreter is slow
        top_k = int(rng.integers(1, most + 1))
    num_cases = 10 if gpu else 1
    num_rows = int(rng.integers(1, MAX_ROWS + 1, size=num_cases).sum())
    free = rng.random() < 0.5
    rule = _make_rule(rng, num_experts, top_k, gpu) if not free else RouterRule(top_k=top_k)
    quantum = float(rng.choice([0.25, 0.5, 1.0])) if rng.random() < 0.5 else 0.0
    logits = _make_logits(rng, num_rows, num_experts, quantum)
    may_be_bf16 = num_experts == 512 if gpu else rule.scoring == "softmax"
    dtype = torch.bfloat16 if may_be_bf16 and rng.random() < (0.4 if gpu else 0.15) else torch.float32
    margin = float(np.float32(rng.uniform(-0.5, 1.5)))
    if quantum:
        margin = round(margin * 4) / 4  # so that gaps equal to the margin come up
    lo, hi = int(rng.integers(0, top_k + 1)), int(rng.integers(0, top_k))
    bias = None
    if rule.scoring == "sigmoid" and (gpu or rng.random() < 0.7):
        bias = torch.from_numpy(rng.normal(0, 0.2, num_experts).astype(np.float32))
    has_policy = not free and rng.random() < 0.3
    if gpu:
        plain = rule == RouterRule(top_k=top_k) and dtype == torch.float32
        has_policy = has_policy and plain and (num_experts, top_k) in GPU_POLICY_SHAPES
    policy = _make_policy(rng, margin, (lo, hi), top_k) if has_policy else None
    return Batch(
        number=number,
        num_cases=num_cases,
        rule=rule,
        logits_TE=torch.from_numpy(logits).to(dtype),
        slot_E=torch.from_numpy(_make_slots(rng, num_experts)),
        bias_E=bias,
        margin=margin,
        lo=lo,
        hi=hi,
        free_TK=torch.from_numpy(_make_ids(rng, num_rows, num_experts, top_k)) if free else None,
        weights_TK=torch.from_numpy(rng.random((num_rows, top_k), dtype=np.float32)),
        policy=policy,
    )


def _make_rule(rng: np.random.Generator, num_experts: int, top_k: int, gpu: bool) -> RouterRule:
    kind = rng.random()
    if (gpu and num_experts != 128) or kind < 0.5:
        return RouterRule(top_k=top_k)
    if kind < 0.65:
        return RouterRule(top_k=top_k, renormalize=False, scale=2.5)
    if gpu:
        return RouterRule(top_k=top_k, scoring="sigmoid", num_groups=8, top_groups=4, group_score="sum2")
    grouped = num_experts % 8 == 0 and top_k <= num_experts // 2 and kind < 0.85
    return RouterRule(
        top_k=top_k,
        renormalize=rng.random() < 0.7,
        scoring="sigmoid" if rng.random() < 0.7 else "softmax",
        num_groups=8 if grouped else 1,
        top_groups=4 if grouped else 1,
        group_score="sum2" if rng.random() < 0.5 else "max",
    )


def _make_logits(rng: np.random.Generator, num_rows: int, num_experts: int, quantum: float) -> np.ndarray:
    shape = (num_rows, num_experts)
    logits: np.ndarray = rng.normal(0, rng.choice([0.5, 1.0, 3.0]), shape)
    if quantum:
        logits = np.round(logits / quantum) * quantum
        if rng.random() < 0.4:
            logits = np.minimum(logits, 0.0)  # zeros on top, of both signs
    elif rng.random() < 0.2:
        logits = 1.0 + rng.integers(0, 64, shape) * 2.0**-23  # neighbours differ in their last bits only
    logits = logits.astype(np.float32)
    if rng.random() < 0.7:
        logits[(logits == 0) & (rng.random(shape) < 0.5)] = -0.0
    if rng.random() < 0.3:
        share = float(rng.choice([0.01, 0.1, 0.9]))
        odd = rng.random(shape) < share
        values = [np.nan, -np.inf] if share == 0.9 else [np.nan, np.inf, -np.inf, 0.0, -0.0]
        logits[odd] = rng.choice(np.array(values, dtype=np.float32), size=int(odd.sum()))
    return logits


def _make_slots(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    share = float(rng.choice([0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.3, 0.05, 0.0, 1.0]))
    resident = rng.random(num_experts) < share
    slots = rng.permutation(num_experts * 2)[:num_experts]
    return np.where(resident, slots, -1).astype(np.int32)


def _make_ids(rng: np.random.Generator, num_rows: int, num_experts: int, top_k: int) -> np.ndarray:
    """Ids of any origin: distinct or with repeats, some of them padding."""
    if rng.random() < 0.5:
        ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)])
    else:
        ids = rng.integers(0, num_experts, (num_rows, top_k))
    if rng.random() < 0.4:
        padding = rng.random((num_rows, top_k)) < 0.2
        ids = np.where(padding, rng.choice([-1, num_experts], (num_rows, top_k)), ids)
    return ids.astype(np.int32)


def _make_policy(rng: np.random.Generator, margin: float, ranks: tuple[int, int], top_k: int) -> Policy:
    protect = int(rng.integers(0, top_k + 1))
    kind = int(rng.integers(0, 3))
    if kind == 0:
        return AdditiveBias(beta=margin, protect=protect)
    if kind == 1:
        return CachePrior(strength=abs(margin) / 8, protect=protect)
    return WindowJoint(margin=margin, ranks=ranks)


MARGIN_SWAP = MarginSwap()
"""Names the policy; its numbers come from the batch's table."""

"""The parity harness: green on the kernels, red on every mutant of them."""

from __future__ import annotations

import json

import pytest
import torch
from test_kernels_routing import run_script

from warmset.errors import WarmsetError
from warmset.measure import parity
from warmset.measure.parity_cases import EXPERTS, make_batch


def test_60_cases():
    report = parity.run(cases=60, seed=0, device="cpu")
    assert report.ok, "\n".join(report.lines())
    assert report.exit_status == 0
    assert report.cases == 60
    assert report.swaps > 30


def test_the_60_cases_find_every_mutant():
    done = run_script("kernel_mutants.py", "60")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_400_cases_and_another_seed():
    for seed in (0, 1):
        report = parity.run(cases=400, seed=seed, device="cpu")
        assert report.ok, "\n".join(report.lines())
        assert report.error_rows > 0


def test_cases_are_seeded_and_hold_what_breaks_kernels():
    batches = [make_batch(0, number) for number in range(200)]
    again = make_batch(0, 7)
    assert torch.equal(again.logits_TE.nan_to_num(), batches[7].logits_TE.nan_to_num())
    assert not torch.equal(make_batch(1, 7).weights_TK, again.weights_TK)
    assert {b.logits_TE.shape[1] for b in batches} == set(EXPERTS)
    assert {b.logits_TE.shape[0] for b in batches} == set(range(1, 9))
    assert all(b.rule.top_k <= min(32, b.logits_TE.shape[1]) for b in batches)
    assert max(b.rule.top_k for b in batches) > 16
    assert any(b.lo > b.hi for b in batches) and min(b.margin for b in batches) < 0
    shares = {float((b.slot_E >= 0).float().mean()) for b in batches}
    assert 0.0 in shares and 1.0 in shares
    values = torch.cat([b.logits_TE.float().reshape(-1) for b in batches])
    assert values.isnan().any() and values.isinf().any()
    free = [b.free_TK for b in batches if b.free_TK is not None]
    assert any((ids == -1).any() for ids in free)
    assert any(len(set(row)) < len(row) for ids in free for row in ids.tolist())
    assert any(b.logits_TE.dtype == torch.bfloat16 for b in batches)
    assert {b.rule.scoring for b in batches} == {"softmax", "sigmoid"}
    policies = {type(b.policy).__name__ for b in batches}
    assert policies == {"NoneType", "AdditiveBias", "CachePrior", "WindowJoint"}


def test_a_report_shows_kinds_and_the_first_case():
    report = parity.ParityReport(
        device="cpu", seed=0, cases=2, rows=5, mismatches={"swap_warp ids": 3}, first="  margin = 0.5"
    )
    assert report.exit_status == 1
    lines = report.lines()
    assert "2 cases, 5 rows" in lines[0] and "3 mismatches" in lines[0]
    assert lines[1:] == ["  swap_warp ids: 3 rows", "first failing case:", "  margin = 0.5"]
    assert parity.ParityReport(**json.loads(json.dumps(vars(report)))) == report


def test_bad_input_is_one_sentence():
    with pytest.raises(WarmsetError, match=r"`cases` must be at least 1\. Got 0\."):
        parity.run(cases=0)
    if not torch.cuda.is_available():
        with pytest.raises(WarmsetError, match="torch sees no CUDA device"):
            parity.run(device="cuda")

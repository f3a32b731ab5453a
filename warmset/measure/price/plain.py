"""How long a policy's pass takes beside plain transformers windows over the same rows, in one run.

Segment by segment the two take turns, so that a machine that is slower for a while slows both. The policy's pass is all
of it: windows with the policy, routing facts, and the comparison with the reference. Processor seconds are compared.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warmset.engine import TokenEngine
from warmset.measure.price.documents import ScoredText, Segment
from warmset.measure.price.measurement import Measurement
from warmset.measure.price.scorers import EngineScorer
from warmset.measure.price.work import Work
from warmset.model import quiet_transformers
from warmset.routing import Policy


def ratio_to_plain(engine: TokenEngine, text: ScoredText, policy: Policy, rows: int) -> dict[str, Any]:
    """Processor seconds of both, and policy over plain, over all segments of the text."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        plain = AutoModelForCausalLM.from_pretrained(
            engine.prepared.folder, dtype=engine.prepared.dtype, local_files_only=True
        ).eval()
    spent = {"policy": 0.0, "plain": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for segment in text.segments:
            alone = ScoredText((replace(segment, first=0),))
            work = Work(Path(folder), {"segment": segment.first}, resume=False)
            measurement = Measurement(EngineScorer(engine), alone, work, rows=rows)
            measurement.reference()
            start = time.process_time()
            measurement.policy(policy)
            spent["policy"] += time.process_time() - start
            start = time.process_time()
            plain_windows(plain, segment, rows)
            spent["plain"] += time.process_time() - start
            work.clear()
    return {
        "positions": text.num_positions,
        "rows": rows,
        "policy_cpu_sec": spent["policy"],
        "plain_cpu_sec": spent["plain"],
        "ratio": spent["policy"] / spent["plain"],
    }


def plain_windows(model: Any, segment: Segment, rows: int) -> None:
    """The same rows through transformers' own model and cache, in the same windows."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), quiet_transformers():
        model(torch.tensor([segment.ids[:1]]), cache=cache, use_cache=True)
        end = 1 + segment.num_scored
        for start in range(1, end, rows):
            window = segment.ids[start : min(start + rows, end)]
            model(torch.tensor([window]), cache=cache, use_cache=True)

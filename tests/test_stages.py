"""The stage clock: stages add up to the window, and a delay shows where it was put and nowhere else."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import open_engine

from warmset.config import SamplingConfig
from warmset.stages import STAGES, StageClock

DELAY_SEC = 0.005


def least_of(engine, prompt_ids, tokens: int = 25) -> dict[str, float]:
    """The least ms of each stage over the windows: what the machine does besides only ever adds."""
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=tokens)))
    return {name: min(window[name] for window in engine.clock.windows_ms) for name in STAGES}


def windows_of(engine, prompt_ids, tokens: int = 25) -> dict[str, float]:
    list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=tokens)))
    return engine.stats()["stages"]


def test_stages_add_up_to_the_window(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    stages = windows_of(engine, prompt_ids)
    assert sum(stages[name] for name in STAGES) == pytest.approx(stages["total"], rel=1e-6)
    measured_ms = sum(sum(window.values()) for window in engine.clock.windows_ms)
    assert measured_ms == pytest.approx(engine.run.decode_ms, rel=0.05)
    assert stages["gap"] < 0.25 * stages["total"]


@pytest.mark.parametrize(
    ("stage", "find"),
    [
        ("token mixer", lambda trunk: trunk.model.layers[0].linear_attn.out_proj),
        ("shared expert", lambda trunk: trunk.model.layers[1].mlp.shared_expert.down_proj),
        ("hc-read+router", lambda trunk: trunk.model.layers[1].mlp.gate),
        ("head", lambda trunk: trunk.lm_head),
    ],
)
def test_a_sleep_shows_in_its_own_row_alone(checkpoints, prompt_ids, stage, find):
    engine = open_engine(checkpoints["qwen4_exp"], "33%")
    before = least_of(engine, prompt_ids)
    find(engine.windows._trunk).register_forward_hook(
        lambda *_: time.sleep(DELAY_SEC),
        prepend=True,  # inside the stage, before the clock leaves it
    )
    after = least_of(engine, prompt_ids)
    grown = {name: after[name] - before[name] for name in STAGES}
    assert grown[stage] > 4.9, grown
    assert all(ms < 2.5 for name, ms in grown.items() if name != stage), grown


def test_a_sleep_in_the_slow_tier_is_cold_wait(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen4_exp"], "0")
    before = least_of(engine, prompt_ids)
    begin = engine.store.begin

    def slow(layer, expert, out):
        time.sleep(DELAY_SEC / 8)  # 2 layers x 4 picks a window
        return begin(layer, expert, out)

    engine.store.begin = slow
    after = least_of(engine, prompt_ids)
    grown = {name: after[name] - before[name] for name in STAGES}
    assert grown["cold wait"] > 4.9 and all(ms < 2.5 for name, ms in grown.items() if name != "cold wait"), (
        grown
    )


def test_a_module_that_raises_leaves_the_clock_whole():
    clock = StageClock(torch.device("cpu"))
    with pytest.raises(KeyError), clock.window():
        clock.enter("head")
        raise KeyError
    with clock.window(), clock.stage("head"):
        pass
    assert len(clock.windows_ms) == 2 and set(clock.windows_ms[1]) == set(STAGES)


def test_a_clock_that_is_off_measures_nothing(checkpoints, prompt_ids):
    engine = open_engine(checkpoints["qwen3_moe"], "33%", stages=False)
    assert windows_of(engine, prompt_ids, 4) is None
    assert engine.stats()["ms_per_window"] > 0

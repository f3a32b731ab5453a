"""Small checkpoints made here, one thread a worker, and a budget of processor seconds for each test file."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FILE_BUDGET_SEC = 100.0
"""Processor seconds, not wall clock: shared machines are slower by the minute, not in work done."""

TINY_TOKENIZER = Path(__file__).parent.parent / "warmset" / "models" / "tiny"


def _cpu_sec() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    start = _cpu_sec()
    result = yield
    item.config.stash.setdefault(_SPENT, []).append((item.nodeid.split("::")[0], _cpu_sec() - start))
    return result


_SPENT = pytest.StashKey[list]()


def pytest_sessionfinish(session):
    spent = session.config.stash.get(_SPENT, [])
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = spent
        return
    totals: dict[str, float] = {}
    for file, seconds in spent + session.config.stash.get(_FROM_WORKERS, []):
        totals[file] = totals.get(file, 0.0) + seconds
    over = {file: round(sec) for file, sec in totals.items() if sec > FILE_BUDGET_SEC}
    if over and session.config.option.markexpr.startswith("not slow"):
        print(f"\nover the budget of {FILE_BUDGET_SEC:.0f} processor seconds a file: {over}")
        session.exitstatus = 1


_FROM_WORKERS = pytest.StashKey[list]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    spent = getattr(node, "workeroutput", {}).get("spent", [])
    node.config.stash.setdefault(_FROM_WORKERS, []).extend(spent)


def make_config(family: str):
    """A configuration of a few thousand parameters for each family that the tests cover."""
    import transformers as tf

    common = dict(
        vocab_size=8192,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    linear = dict(
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4
    )
    moe = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24)
    if family == "mixtral":
        return tf.MixtralConfig(**common, intermediate_size=40, num_local_experts=8, num_experts_per_tok=2)
    if family == "olmoe":
        return tf.OlmoeConfig(**common, intermediate_size=24, num_experts=16, num_experts_per_tok=4)
    if family == "qwen3_moe":
        return tf.Qwen3MoeConfig(**common, **moe, intermediate_size=64, norm_topk_prob=True)
    if family == "qwen3_next":
        kinds = ["linear_attention", "full_attention"]
        return tf.Qwen3NextConfig(
            **common,
            **moe,
            **linear,
            intermediate_size=64,
            shared_expert_intermediate_size=16,
            layer_types=kinds,
        )
    assert family in ("qwen4_exp", "qwen4_exp_sparse"), family
    ple = dict(
        ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=4, ngram_vocab_size_base=50, split_ngram_parts=2
    )
    indexer = dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=512,
        indexer_compress_ratio=16,
    )
    if family == "qwen4_exp_sparse":  # past 8 tokens an indexer has to choose, so here it is really used
        indexer |= dict(indexer_budget=8, indexer_compress_ratio=4)
    return tf.Qwen4ExpTextConfig(
        **common,
        **moe,
        **linear,
        **ple,
        **indexer,
        shared_expert_intermediate_size=16,
        hc_count=2,
        hc_lowrank=8,
        layer_types=["linear_attention", "full_attention"],
    )


def save_random(folder: Path, config, *, scale: float = 6.0, dtype=None, **save) -> Path:
    """Write a random checkpoint whose routers are spread enough that picks differ from row to row."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
            if "gate.weight" in name:
                parameter.mul_(2)
    model.to(dtype or torch.float32).save_pretrained(folder, **save)
    for file in TINY_TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


FAMILIES = ("qwen4_exp", "qwen4_exp_sparse", "qwen3_next", "qwen3_moe", "mixtral", "olmoe")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """One small random checkpoint of each family, per-expert on disk as transformers saves it."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_random(root / family, make_config(family)) for family in FAMILIES}


@pytest.fixture
def copy_of(tmp_path):
    """Copy a checkpoint so that a test can damage it."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-{folder.name}"))

    return copy


@pytest.fixture
def edit_json():
    """Change keys of a JSON file in place."""

    def edit(file: Path, **changes) -> None:
        value = json.loads(file.read_text())
        file.write_text(json.dumps({**value, **changes}))

    return edit


PROMPT_IDS = [257, 901, 44, 1203, 77, 3000, 12, 8000, 5, 450, 451, 452, 1000, 2000]


@pytest.fixture
def prompt_ids() -> list[int]:
    return list(PROMPT_IDS)

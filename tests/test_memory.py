"""What memory there is, and the plan: everything else first, then slots, the sum in words (C20, C21)."""

from __future__ import annotations

import pytest
import torch
from helpers import open_engine

from warmset import memory, plan
from warmset.config import EngineConfig, SlotsRequest
from warmset.device_experts import check_host_memory
from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.needs import needs_of

GIB = 1 << 30


def write(root, **files: str):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_limit_is_the_cgroups_of_version_2(tmp_path):
    write(tmp_path, memory_dot_max=f"{4 * GIB}\n", memory_dot_current=f"{3 * GIB}\n")
    assert memory.cgroup_left_bytes(tmp_path) == GIB
    write(tmp_path, memory_dot_stat=f"anon 5\ninactive_file {2 * GIB}\n")
    assert memory.cgroup_left_bytes(tmp_path) == 3 * GIB, "pages of files that were read are given up"
    write(tmp_path, memory_dot_max="max\n")
    assert memory.cgroup_left_bytes(tmp_path) is None


def test_the_limit_is_the_cgroups_of_version_1(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(GIB // 2))
    assert memory.cgroup_left_bytes(tmp_path) == 3 * GIB // 2
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert memory.cgroup_left_bytes(tmp_path) is None
    assert memory.cgroup_left_bytes(tmp_path / "nowhere") is None


def test_ram_is_the_smaller_of_system_and_cgroup(monkeypatch):
    monkeypatch.setattr(memory, "cgroup_left_bytes", lambda: 12345)
    assert memory.host_available_bytes() == 12345


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * GIB),
        ("800MiB", 800 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("12GB", 12 * 10**9),
        ("64KiB", 64 << 10),
        (" 3 gib ", 3 * GIB),
    ],
)
def test_sizes(text, size):
    assert plan.parse_bytes(text, "vram") == size


@pytest.mark.parametrize(
    "text", ["", "12", "GiB", "-1GiB", "0GiB", "nan GiB", "12GiBs", "1e3GiB", "12 parsecs"]
)
def test_sizes_that_are_refused_in_one_sentence(text):
    with pytest.raises(WarmsetError, match=r"^vram must be a size with a unit.* Got "):
        plan.parse_bytes(text, "vram")


NEEDS = plan.Needs(weights=2 * GIB, cache=GIB, prompt=GIB // 2, window=GIB // 4, max_model_len=4096)


def planned(monkeypatch, free: int, vram: int | None = None) -> plan.Plan:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    return plan.make_plan(torch.device("cuda:1"), NEEDS, 10 << 20, vram)


def test_slots_get_what_is_left_on_the_device_that_was_asked_for(monkeypatch):
    found = planned(monkeypatch, free=10 * GIB)
    rest = NEEDS.weights + NEEDS.cache + NEEDS.prompt + NEEDS.window + plan.GRAPHS_BYTES + plan.RESERVE_BYTES
    assert found.reserved_bytes == rest
    assert found.fitting == (12 * GIB - rest) // (10 << 20), (
        "weights that are there already are free and needed"
    )
    sentence = found.sentence(found.fitting)
    for part in (
        "cuda:1",
        "2.00 non-expert weights",
        "1.00 cache of 4,096 tokens",
        "prompt",
        "graphs",
        "reserve",
    ):
        assert part in sentence
    assert f"{found.fitting:,} slots" in sentence


def test_vram_is_the_most_that_is_used(monkeypatch):
    assert planned(monkeypatch, 20 * GIB, vram=6 * GIB).budget_bytes == 6 * GIB
    assert planned(monkeypatch, 1 * GIB, vram=6 * GIB).budget_bytes == 3 * GIB, "never more than there is"
    found = planned(monkeypatch, 20 * GIB, vram=GIB)
    assert found.fitting == 0
    for slots in (0, 5):
        with pytest.raises(WarmsetError, match=r"slots do not fit: VRAM allowed by --vram 1\.00"):
            plan.check_fits(found, slots, torch.device("cuda:1"))
    plan.check_fits(planned(monkeypatch, 10 * GIB), 100, torch.device("cuda:1"))


def test_a_longer_context_leaves_fewer_slots(checkpoints):
    """C21: the plan holds the longest sequence that the settings allow."""
    reserved = []
    for length in (64, 512):
        engine = open_engine(checkpoints["qwen3_moe"], "0", max_model_len=length)
        trunk, layout = engine.windows._trunk, engine.slots.layout
        needs = needs_of(engine.prepared, layout, trunk, top_k=4, graphs=False, snapshot_bytes=0)
        reserved.append(needs.cache)
    assert reserved[1] == 8 * reserved[0] > 0


def test_the_sum_is_the_reason_of_an_automatic_number(checkpoints):
    why = open_engine(checkpoints["qwen3_moe"], "auto").num_slots.why
    assert "non-expert weights" in why and "cache of 512 tokens" in why and "32 slots" in why


@pytest.mark.parametrize("vram", ["12", "12GiB"])
def test_vram_on_a_cpu_is_refused(checkpoints, vram):
    with pytest.raises(WarmsetError, match="vram"):
        TokenEngine(
            EngineConfig(
                model=str(checkpoints["qwen3_moe"]), slots=SlotsRequest(text="0"), device="cpu", vram=vram
            )
        )


def test_an_arena_that_the_cgroup_would_not_allow_is_refused(monkeypatch):
    """C20: the limit is the cgroup's; what the system reports free is only a warning."""
    monkeypatch.setattr(memory, "cgroup_left_bytes", lambda: 4 * GIB)
    with pytest.raises(WarmsetError, match=r"must hold all experts, 5\.00 GiB.*leaves 4\.00 GiB"):
        check_host_memory(5 * GIB)
    monkeypatch.setattr(memory, "cgroup_left_bytes", lambda: None)
    monkeypatch.setattr(memory, "host_available_bytes", lambda: GIB)
    assert check_host_memory(GIB) == [] and "seem to be left" in check_host_memory(2 * GIB)[0]

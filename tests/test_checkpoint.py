"""C44, C45: a damaged checkpoint is refused with the file's name before anything is served."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import FAMILIES, make_config, save_random
from helpers import decode_with_logits, open_engine
from safetensors.torch import load_file, save_file

from warmset import checkpoint as ckpt
from warmset.errors import CheckpointError
from warmset.store import FileStore, aligned_bytes


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    folder = save_random(
        tmp_path_factory.mktemp("sharded") / "model", make_config("qwen3_moe"), max_shard_size="400KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def refused(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_engine(folder, "0")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_c44_a_shard_that_is_missing(sharded, copy_of):
    folder = copy_of(sharded)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(folder)


@pytest.mark.parametrize(
    "keep", [lambda size: size - 1, lambda size: size // 2, lambda size: 5, lambda size: 0]
)
def test_c44_a_shard_that_is_cut(sharded, copy_of, keep):
    folder = copy_of(sharded)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[: keep(len(data))])
    assert shard.name in refused(folder)


def test_a_shard_that_is_longer_than_its_header_says(sharded, copy_of):
    folder = copy_of(sharded)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes() + b"x")
    assert shard.name in refused(folder)


def test_c44_an_index_that_names_an_absent_file(sharded, copy_of):
    folder = copy_of(sharded)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    first = next(iter(value["weight_map"]))
    value["weight_map"][first] = "model-99999-of-00001.safetensors"
    index.write_text(json.dumps(value))
    assert "model-99999-of-00001.safetensors" in refused(folder)


def test_an_index_that_puts_a_tensor_in_the_wrong_shard(sharded, copy_of):
    folder = copy_of(sharded)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    names = sorted(value["weight_map"])
    value["weight_map"][names[0]] = next(
        shard for shard in value["weight_map"].values() if shard != value["weight_map"][names[0]]
    )
    index.write_text(json.dumps(value))
    assert names[0] in refused(folder)


def test_c44_a_git_lfs_pointer(sharded, copy_of):
    folder = copy_of(sharded)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    message = refused(folder)
    assert shard.name in message and "LFS" in message


@pytest.mark.parametrize("junk", [b"\xff" * 64, (40).to_bytes(8, "little") + b"not json" * 10])
def test_a_file_that_is_no_safetensors(checkpoints, copy_of, junk):
    folder = copy_of(checkpoints["olmoe"])
    (folder / "model.safetensors").write_bytes(junk)
    assert "model.safetensors" in refused(folder)


def test_folders_that_are_no_checkpoint(tmp_path, checkpoints, copy_of):
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled" in refused(tmp_path)
    folder = copy_of(checkpoints["olmoe"])
    (folder / "config.json").write_text('{"model_type": "no-such-family"}')
    assert "config.json" in refused(folder)


def test_a_dense_model_has_no_experts(tmp_path):
    import transformers as tf

    config = tf.Qwen3Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16,
    )  # fmt: skip
    assert "experts" in refused(save_random(tmp_path / "dense", config))


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_c45_a_tensor_that_nobody_uses_is_an_error(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(2)}))
    assert "model.layers.0.extra.weight" in refused(folder)


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.norm.weight"])
def test_c45_an_mtp_layer_is_passed_over_only_where_the_family_has_one(checkpoints, copy_of, name):
    folder = copy_of(checkpoints["qwen3_moe"])
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    assert name.rpartition(".")[0].split(".experts")[0] in refused(folder)


@pytest.mark.parametrize("count", [15, 17])
def test_c45_more_or_fewer_experts_than_the_configuration_says(checkpoints, copy_of, edit_json, count):
    folder = copy_of(checkpoints["qwen3_moe"])
    edit_json(folder / "config.json", num_experts=count, num_local_experts=count)
    message = refused(folder)
    assert str(count) in message and "16" in message


def test_an_expert_missing_in_every_layer(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])

    def drop(tensors):
        for name in [name for name in tensors if ".experts.15." in name]:
            del tensors[name]

    rewrite(folder, drop)
    assert "15 experts" in refused(folder)


@pytest.mark.parametrize("shard", [5, None, "", "../model.safetensors", "sub/model.safetensors"])
def test_c44_an_index_whose_file_names_are_none(sharded, copy_of, shard):
    folder = copy_of(sharded)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"][sorted(value["weight_map"])[0]] = shard
    index.write_text(json.dumps(value))
    assert "model.safetensors.index.json" in refused(folder)


def test_c44_tensors_that_overlap(checkpoints, copy_of):
    file = copy_of(checkpoints["olmoe"]) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = sorted(name for name in header if name != "__metadata__" and "norm" in name)
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert "model.safetensors" in refused(file.parent)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.15.down_proj.weight"]
)
def test_an_expert_that_is_missing(checkpoints, copy_of, name):
    folder = copy_of(checkpoints["qwen3_moe"])
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder)


def test_a_trunk_tensor_that_is_missing(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    assert "model.layers.1.self_attn.q_proj.weight" in refused(folder)


def test_an_expert_of_another_shape(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(5, 5)}))
    assert name in refused(folder)


def test_c07_more_picks_than_experts_is_refused_at_load(checkpoints, copy_of, edit_json):
    """C07: K > E."""
    folder = copy_of(checkpoints["qwen3_moe"])
    edit_json(folder / "config.json", num_experts_per_tok=17)
    with pytest.raises(ValueError, match="17"):
        open_engine(folder, "0")


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen4_exp", "mixtral"])
def test_c45_fused_and_per_expert_files_give_the_same_logits(checkpoints, copy_of, prompt_ids, family):
    folder = copy_of(checkpoints[family])
    plain = decode_with_logits(open_engine(folder, "33%"), prompt_ids, 6)
    rewrite(folder, fuse)
    assert "gate_up_proj" in " ".join(ckpt.open_checkpoint(folder).tensors)
    fused = decode_with_logits(open_engine(folder, "33%"), prompt_ids, 6)
    assert plain[0] == fused[0] and torch.equal(plain[1], fused[1])


def fuse(tensors: dict[str, torch.Tensor]) -> None:
    """Rewrite per-expert tensors as one stack a layer, under the module's own names."""
    names = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
    groups: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        base, _, rest = name.partition(".experts.")
        expert, matrix, _ = rest.split(".")
        groups.setdefault(base, {})[int(expert), names[matrix]] = tensors.pop(name)
    for base, parts in groups.items():
        count = 1 + max(expert for expert, _ in parts)
        base = base.replace("block_sparse_moe", "mlp")
        tensors[f"{base}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([parts[expert, 0], parts[expert, 1]]) for expert in range(count)]
        )
        tensors[f"{base}.experts.down_proj"] = torch.stack([parts[expert, 2] for expert in range(count)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_reads_each_expert_as_it_was_saved(checkpoints, family):
    """The bytes read by position are the tensors that safetensors itself loads."""
    folder = checkpoints[family]
    opened = ckpt.open_checkpoint(folder)
    experts, covered = ckpt.find_experts(opened, opened.config["model_type"])
    stored = load_file(folder / "model.safetensors")
    fuse(stored)
    store = FileStore(experts)
    buffer = aligned_bytes(experts.layout.nbytes)
    for layer, module in enumerate(experts.modules):
        module = module.replace("block_sparse_moe", "mlp")
        for expert in range(experts.num_experts):
            store.read(layer, expert, buffer)
            gate_up, down = experts.layout.views(buffer)
            assert torch.equal(gate_up, stored[f"{module}.gate_up_proj"][expert])
            assert torch.equal(down, stored[f"{module}.down_proj"][expert])
    assert store.bytes_read == sum(opened.tensors[name].nbytes for name in covered)


def test_fingerprints_tell_models_apart(checkpoints, copy_of):
    folder = copy_of(checkpoints["qwen3_moe"])
    before = ckpt.open_checkpoint(folder).fingerprint()
    assert before == ckpt.open_checkpoint(checkpoints["qwen3_moe"]).fingerprint()
    rewrite(folder, lambda tensors: tensors["model.layers.0.mlp.gate.weight"].mul_(1.5))
    assert ckpt.open_checkpoint(folder).fingerprint() != before


def test_a_file_that_shrinks_under_us_is_said(checkpoints, copy_of):
    folder = copy_of(checkpoints["mixtral"])
    opened = ckpt.open_checkpoint(folder)
    experts, _ = ckpt.find_experts(opened, "mixtral")
    store = FileStore(experts)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        store.read(0, 0, aligned_bytes(experts.layout.nbytes))

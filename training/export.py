"""Write the model as others load it (bf16 safetensors shards, index, config, generation config), and read it back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import TinyModel, tiny_config

SHARD_BYTES = 14_000_000  # under the 15 MB a shard may have
NGRAM = "ngram_embedding.weight"


def on_disk(model: TinyModel) -> dict[str, Tensor]:
    """Tensors by their names on disk: experts fused, the n-gram table in parts, the tied head left out."""
    tensors = {}
    for name, value in model.trunk.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith(NGRAM):
            parts = value.chunk(model.config.split_ngram_parts)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.shard_{index}.weight": part for index, part in enumerate(parts)}
        else:
            tensors[name] = value
    tensors |= {f"mtp.{name}": value for name, value in model.mtp.state_dict().items()}
    return {
        name: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().clone().contiguous()
        for name, value in tensors.items()
    }


def shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, a new shard before one would pass `SHARD_BYTES`."""
    out: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, value in tensors.items():
        if value.nbytes > room and out[-1]:
            out.append({})
            room = SHARD_BYTES
        out[-1][name] = value
        room -= value.nbytes
    return out


def export(model: TinyModel, folder: Path) -> int:
    """Write everything but the tokenizer into `folder`; returns the bytes of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors"):
        old.unlink()
    parts = shards(on_disk(model))
    places = {}
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        places |= dict.fromkeys(part, file)
    total = sum(value.nbytes for part in parts for value in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", config_json(model))
    eos = model.config.eos_token_id
    write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos}
    )
    return total


def config_json(model: TinyModel) -> dict:
    config = json.loads(model.config.to_json_string(use_diff=False))
    # releases differ in the name of an indexed attention layer; all of them read this one
    kinds = [kind if kind == "linear_attention" else "full_attention" for kind in config["layer_types"]]
    kept = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    return kept | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "layer_types": kinds,
        "dtype": "bfloat16",
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> TinyModel:
    """The training form in float32 from an exported folder."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    drop = ("architectures", "model_type", "transformers_version", "dtype")
    model = TinyModel(tiny_config(**{key: value for key, value in fields.items() if key not in drop}))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    trunk, mtp, table = {}, {}, {}
    for name, value in tensors.items():
        value = value.float() if value.is_floating_point() else value
        if name.startswith("mtp."):
            mtp[name.removeprefix("mtp.")] = value
        elif ".shard_" in name:
            stem, part = name.removesuffix(".weight").split(".shard_")
            table.setdefault(f"{stem}.weight", {})[int(part)] = value
        else:
            trunk[name] = value
    trunk |= {name: torch.cat([parts[key] for key in sorted(parts)]) for name, parts in table.items()}
    if model.config.tie_word_embeddings:
        trunk["lm_head.weight"] = trunk["model.embed_tokens.weight"]
    model.trunk.load_state_dict(trunk)
    model.mtp.load_state_dict(mtp)
    return model

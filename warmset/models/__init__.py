"""Model names -> folders: the embedded model, a folder on disk, or a Hugging Face hub id."""

from __future__ import annotations

from pathlib import Path

from warmset.errors import WarmsetError

HERE = Path(__file__).parent
BUILTIN = {"builtin:tiny": HERE / "tiny"}
BUILTIN_PROFILES = {"builtin:tiny": HERE / "tiny" / "profile-mix.json"}
BUILTIN_POLICIES = {"builtin:tiny": HERE / "tiny" / "policy.json"}
DATA = HERE / "data"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


def find_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model; a hub id is fetched into the hub's own cache (safetensors and JSON only).

    Raises WarmsetError when nothing of that name is there.
    """
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise WarmsetError(
                f"model must be one of {', '.join(BUILTIN)}, a folder or a hub id. Got {name!r}."
            )
        return BUILTIN[name]
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise WarmsetError(
            f"model {name[:80]!r} is no path that can be looked at: {error}"[:200] + "."
        ) from None
    if is_folder:
        return folder
    if exists:
        raise WarmsetError(
            f"model must be a folder, {', '.join(BUILTIN)} or a hub id. Got the file {name!r}."
        )
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise WarmsetError(
            f"model must be a folder, {', '.join(BUILTIN)} or a hub id (owner/name). Got {name!r}."
        )
    return _fetch(name, revision)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises many kinds; each means the same to a user
        reason = str(error).strip().splitlines()[0]
        raise WarmsetError(
            f"model {name!r} is no folder here, and the hub did not give it: {reason}"
        ) from None

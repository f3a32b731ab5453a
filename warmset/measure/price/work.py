"""What a measurement keeps on disk while it runs: the reference's logits, and each pass that is finished.

    reference-000000000.safetensors   logits [n, V] of one stretch of the pass with routing off
    NAME.safetensors                  the arrays of one finished pass

One folder a measurement, named after everything that decides its figures. It is deleted when the measurement is
finished; after an interruption `resume` finds there what is done. Files are whole or not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def default_root() -> Path:
    """Where folders are made: `price` in Warmset's part of the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "warmset" / "price"


class Work:
    """The folder of one measurement; `identity` is everything that decides its figures."""

    def __init__(self, root: Path, identity: dict[str, Any], *, resume: bool) -> None:
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
        root.mkdir(parents=True, exist_ok=True)
        self._lock = open(root / f"{name}.lock", "w")  # noqa: SIM115  # held as long as the folder is used
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (
            OSError
        ):  # the same is being measured elsewhere: that one keeps its folder, this one gets its own
            name = f"{name}-{os.getpid()}"
        self.folder = root / name
        if not resume:
            self.clear()
        self.folder.mkdir(exist_ok=True)

    def clear(self) -> None:
        """Delete everything that is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Let go of the folder and leave it for `resume`."""
        self._lock.close()

    def close(self) -> None:
        """Delete the folder and let go of it."""
        self.clear()
        self.release()

    def keep_logits(self, first: int, logits_NV: Tensor) -> None:
        self._write(self._reference(first), {"logits": logits_NV})

    def logits(self, first: int, device: torch.device | str = "cpu") -> Tensor:
        """The reference's logits [n, V] of the stretch that begins at this position, in their own dtype."""
        from safetensors.torch import load_file

        return load_file(self._reference(first), device=str(device))["logits"]

    def keep(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Keep a finished pass under a name of any form."""
        self._write(self._file(name), {key: torch.from_numpy(value) for key, value in arrays.items()})

    def find(self, name: str) -> dict[str, np.ndarray] | None:
        """The pass kept under this name, or None."""
        from safetensors.torch import load_file

        path = self._file(name)
        return {key: value.numpy() for key, value in load_file(path).items()} if path.exists() else None

    def _reference(self, first: int) -> Path:
        return self.folder / f"reference-{first:09d}.safetensors"

    def _file(self, name: str) -> Path:
        return self.folder / f"pass-{hashlib.sha256(name.encode()).hexdigest()[:20]}.safetensors"

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
        os.close(descriptor)
        try:
            save_file({key: value.contiguous() for key, value in tensors.items()}, temporary)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

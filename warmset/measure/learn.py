"""Learn a profile from texts: what the router picks while it reads them.

Each text is read as a prompt is, in chunks and from its start, with the router's own picks; all rows count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from warmset.engine import TokenEngine
from warmset.errors import WarmsetError
from warmset.profile import Learner, Profile
from warmset.router import WarmRouter
from warmset.window import PROMPT_CHUNK_ROWS


def learn_profile(
    engine: TokenEngine,
    texts: Sequence[Sequence[int]],
    *,
    text: str,
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """The profile of token ids, text by text; longer ones than the model's context are read in parts.

    text: what the profile is to say it was learned on. WarmsetError where there is no token.
    """
    most = min(engine.prepared.max_model_len, PROMPT_CHUNK_ROWS)
    total, done = sum(len(ids) for ids in texts), 0
    if total == 0:
        raise WarmsetError("A profile needs at least one token to be learned on. Got none.")
    learner = Learner(engine.identity(), decay=1.0, text=text)
    picked: dict[int, Any] = {}

    def keep(module: WarmRouter, inputs: Any, output: Any) -> None:
        picked[module.layer.index] = output[2]

    routers = [module for module in engine.windows.trunk.modules() if isinstance(module, WarmRouter)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        for ids in texts:
            for start in range(0, len(ids), most):
                part = list(ids[start : start + most])
                engine.windows.read_prompt(engine.windows.start(), part)
                learner.add(np.stack([picked[layer].cpu().numpy() for layer in sorted(picked)]))
                done += len(part)
                if progress is not None:
                    progress("reading", done, total)
    finally:
        for hook in hooks:
            hook.remove()
    return learner.profile()

"""Makes Triton's interpreter quicker, and mends two things in older ones, for the parity harness.

The interpreter patches `triton.language` at each call of a device function, nested ones included, although the
outermost call has done so already; that is nearly half of its time. Here nested calls skip it. Where a version
of Triton has other internals, nothing is changed and runs are slower.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def quicken_interpreter() -> bool:
    """Patches the interpreter of this process once; says whether it could."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang: Any = getattr(interpreter, "_patch_lang", None)
    make_scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch_lang is None or make_scope is None or getattr(interpreter, "_warmset_quick", False):
        return patch_lang is not None
    # Before 3.9, the greater of NaN and a number is NaN in the interpreter; on a GPU it is the number.
    builder = interpreter.interpreter_builder
    builder.create_maxnumf = lambda left, right: builder.binary_op(left, right, np.fmax)
    builder.create_minnumf = lambda left, right: builder.binary_op(left, right, np.fmin)
    # Kernels see `tl`, Triton's own library sees `tl.core`: the outermost call patches both.
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    active: list[Any] = []

    def patch_outermost(fn: Any) -> Any:
        if active:
            return make_scope()
        scope = patch_lang(everything)
        # Before 3.9, `range` over a loaded number fails with numpy 2.4: the array has one entry, not none.
        scope.set_attr(tl.tensor, "__index__", lambda number: int(number.handle.data.squeeze()))
        restore = scope.restore
        active.append(scope)

        def restore_outermost() -> None:
            active.clear()
            restore()

        scope.restore = restore_outermost
        return scope

    interpreter._patch_lang = patch_outermost  # type: ignore[attr-defined]
    interpreter._warmset_quick = True  # type: ignore[attr-defined]
    return True

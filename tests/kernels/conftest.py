"""Where there is no GPU, kernels run in Triton's interpreter: it must be chosen before the first kernel is defined."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch


def _let_loops_end_at_loaded_numbers() -> None:
    """The interpreter's scalars are arrays of one element, which numpy >= 2.4 refuses to take as integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _patch_the_language_once() -> None:
    """The interpreter patches it again for every call within a kernel, and restores it after every kernel."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @cache
    def patch_for_good(function: Any) -> Any:
        scope = patch(function)
        scope._changes.clear()  # nothing to restore
        return scope

    interpreter._patch_lang = patch_for_good


def _let_rows_not_see_one_another() -> None:
    """The interpreter's dot is numpy's, which adds up in an order that depends on the machine and on the other rows."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        total = np.zeros_like(d.data)
        for i in range(a.data.shape[-1]):
            total += (a.data[..., :, i, None] * b.data[..., None, i, :]).astype(total.dtype)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not torch.cuda.is_available() and find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _let_loops_end_at_loaded_numbers()
    _patch_the_language_once()
    _let_rows_not_see_one_another()

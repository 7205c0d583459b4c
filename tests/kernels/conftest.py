"""Where there is no GPU, kernels run in Triton's interpreter: it must be chosen before the first kernel is defined."""

import os
from importlib.util import find_spec
from typing import Any

import torch


def _let_loops_end_at_loaded_numbers() -> None:
    """The interpreter's scalars are arrays of one element, which numpy >= 2.4 refuses to take as integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if not torch.cuda.is_available() and find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _let_loops_end_at_loaded_numbers()

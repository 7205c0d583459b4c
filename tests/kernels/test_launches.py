"""What is launched between a captured step's logits and its tokens: kernels, and no operations of torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from saguaro.attention.paged import left_padded
from saguaro.kernels import adjust, limits, sample
from saguaro.kernels.bundle import plain_kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.runner.captured import Computed
from saguaro.target.graphed import RULES, Decider
from saguaro.target.tables import RuleTables, room_for
from tests.target.test_round import CPU, SPEC

VIEWS = {"view", "slice", "select", "unsqueeze", "alias", "empty", "detach", "expand", "as_strided"}  # launch nothing


class Launches:
    """A kernel that is not run: its name is noted."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **keywords: self._launched.append(self._name)


class Operations(TorchDispatchMode):
    """Notes torch's operations."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in VIEWS:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_rows", [1, 4])
def test_five_kernels_and_nothing_else(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for module, names in (
        (adjust, ("_begin_kernel", "_adjust_kernel")),
        (limits, ("_kernel",)),
        (sample, ("_block_kernel", "_row_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Launches(f"{module.__name__.rpartition('.')[2]}{name}", launched))
    kernels = replace(plain_kernels(), adjust=adjust.adjust, limits=limits.limits, choose=sample.choose)
    tables = RuleTables(room_for(n_rows, 4, 5 * n_rows), 97, 5 * n_rows, CPU)
    cache = KVCache(KVPlan(4, 4, SPEC.kv_bytes_per_token(torch.float64), 16), SPEC, CPU, torch.float64)
    lines = torch.zeros(n_rows, 40, dtype=torch.int64)
    text, n, pages = lines[:, 1], lines[:, 2], torch.zeros(n_rows, 4, dtype=torch.int32)
    starts = torch.arange(n_rows + 1, dtype=torch.int32) * 5
    step = left_padded(lines[:, 30:35], text, n, pages, starts, 4, 16)
    at = Computed(step, None, n, lines[:, 3 : 3 + RULES + 9], torch.arange(5), torch.zeros(5 * n_rows, 101))
    with Operations(launched):
        Decider(kernels, cache, tables, 97)._choose(at)
    assert launched == [
        "adjust_begin_kernel",
        "adjust_adjust_kernel",
        "limits_kernel",
        "sample_block_kernel",
        "sample_row_kernel",
    ]

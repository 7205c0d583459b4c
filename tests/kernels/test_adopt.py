"""Adoption of branches: the kernel against its twin and a loop."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.kernels.adopt import adopt, adopt_plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _loop(own: Tensor, branch: list[int], memory: Tensor, slots: list[list[int]]) -> Tensor:
    memory = memory.clone()
    for row, adopted in enumerate(branch):
        for token, slot in enumerate(slots[row]):
            if adopted >= 0 and slot >= 0:
                memory[:, slot] = own[:, adopted, token]
    return memory


@pytest.mark.parametrize(("n_kv", "d"), [(1, 16), (3, 32), (8, 128), (20, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("branch", "slots"),
    [
        pytest.param([4, -1, 0], [[7, 3, 1], [5, 6, 8], [2, 0, -1]], id="some rows and tokens"),
        pytest.param([-1], [[1, 2, 3]], id="none"),
        pytest.param([2, 2], [[0, 1], [4, -1]], id="fewer tokens than there is room for"),
        pytest.param([], [], id="no rows"),
    ],
)
def test_adopt(n_kv: int, d: int, dtype: torch.dtype, branch: list[int], slots: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(2, 5, 3, 2 * n_kv, d, generator=generator).to(dtype)
    memory = torch.randn(2, 9, 2 * n_kv, d, generator=generator).to(dtype)
    expected = _loop(own, branch, memory, slots)
    which = torch.tensor(branch, dtype=torch.int64, device=DEVICE)
    where = torch.tensor(slots, dtype=torch.int64, device=DEVICE).view(len(branch), -1 if branch else 3)
    for function in (adopt, adopt_plain):
        moved = memory.clone().to(DEVICE)
        function(own.to(DEVICE), which, moved, where)
        assert torch.equal(moved.cpu(), expected), function.__name__


def test_the_branches_may_be_a_column() -> None:
    own, slots = torch.randn(1, 3, 2, 4, 16, device=DEVICE), torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    found, expected = torch.zeros(2, 1, 9, 4, 16, device=DEVICE)
    column = torch.tensor([[2, 7], [0, 7]], device=DEVICE)[:, 0]
    adopt(own, column, found, slots)
    adopt_plain(own, column, expected, slots)
    assert found.equal(expected)
    assert found.any()


def test_own_may_be_a_slice_of_more_branches() -> None:
    own = torch.arange(2 * 6 * 2 * 2 * 16, dtype=torch.float32, device=DEVICE).view(2, 6, 2, 2, 16)[:, 1:4]
    memory = torch.zeros(2, 4, 2, 16, device=DEVICE)
    adopt(own, torch.tensor([2], device=DEVICE), memory, torch.tensor([[3, 0]], device=DEVICE))
    assert torch.equal(memory[:, [3, 0]], own[:, 2])
    assert not memory[:, 1:3].any()

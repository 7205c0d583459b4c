"""Exchanges between ranks: what each rank gives, all have."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from saguaro.model.split import Exchange
from saguaro.parallel.exchange import ROOM, ExchangeLost, SharedExchange, SharedMemory
from tests.parallel.threads import exchanges, splits, together

SHAPES = [(1, 1), (3, 576), (5, 0), (2, ROOM // 4 + 3), (1, ROOM // 2)]


@pytest.fixture(scope="module", params=[("shared", 2), ("shared", 4), ("gloo", 2), ("gloo", 3)], ids=str)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Exchange]:
    backend, size = request.param
    return exchanges(backend, size, tmp_path_factory.mktemp("group"))


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_what_each_gave(group: list[Exchange], dtype: torch.dtype) -> None:
    for shape in SHAPES:
        wanted = torch.stack([given(rank, shape, dtype) for rank in range(len(group))])
        found = together(len(group), lambda rank, shape=shape: group[rank](given(rank, shape, dtype)))  # type: ignore[misc]
        assert all(torch.equal(each, wanted) for each in found)


def test_many_exchanges_stay_in_step(group: list[Exchange]) -> None:
    """A fast rank may not overwrite what a slow one has not read."""

    def work(rank: int) -> list[Tensor]:
        return [group[rank](torch.full((2, 7), float(100 * rank + n))) for n in range(200)]

    for found in together(len(group), work):
        for n, each in enumerate(found):
            assert each[:, 0, 0].tolist() == [100 * rank + n for rank in range(len(group))]


def test_columns_are_joined_in_the_order_of_ranks(group: list[Exchange]) -> None:
    widths = [3, 1, 2, 4][: len(group)]
    ranks = splits(group)
    wanted = torch.cat([torch.full((2, n), float(rank)) for rank, n in enumerate(widths)], 1)
    found = together(len(group), lambda rank: ranks[rank].join(torch.full((2, widths[rank]), float(rank)), widths))
    assert all(torch.equal(each, wanted) for each in found)


def test_a_sum_is_the_same_on_every_rank_and_for_every_number_of_rows(group: list[Exchange]) -> None:
    """Addition in float32 depends on the order; it is that of the ranks, wherever a row lies."""
    ranks = splits(group)
    few, many = ((2, 33), (64, 33))
    whole = together(len(group), lambda rank: ranks[rank].sum(given(rank, many, torch.float32)))
    part = together(len(group), lambda rank: ranks[rank].sum(given(rank, many, torch.float32)[: few[0]]))
    assert all(torch.equal(each, whole[0]) for each in whole)
    assert all(torch.equal(each, whole[0][: few[0]]) for each in part)


def test_a_rank_that_waits_for_a_lost_one_gives_up() -> None:
    memory = SharedMemory(2)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(SharedExchange(0, 2, memory), torch.zeros(1, 1))
        memory.lose()
        with pytest.raises(ExchangeLost, match="a rank has ended"):
            waits.result(timeout=60)

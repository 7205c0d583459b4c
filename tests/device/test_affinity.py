"""Cores and threads are set for a step and put back after it, whatever happens in between."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch

from saguaro.attention.step import Segment
from saguaro.config import SamplingParams
from saguaro.device.affinity import Affinity, split_cores, usable_cores
from saguaro.target.pinned import LONG, Pins
from saguaro.target.request import Request
from saguaro.target.rules import SharedNoise
from saguaro.target.sampler import Sampler
from saguaro.target.scheduler import Batch, BatchRow
from saguaro.target.verifier import Verifier
from saguaro.types import Speculation

CORES = usable_cores()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    os.sched_setaffinity(0, CORES)
    torch.set_num_threads(threads)


def state() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


@pytest.mark.parametrize("n_cores", range(1, 6))
@pytest.mark.parametrize("n_draft", range(1, 6))
def test_cores_are_split_and_nobody_goes_without(n_cores: int, n_draft: int) -> None:
    cores = [2 * core + 1 for core in range(n_cores)]
    ours, theirs = split_cores(cores, n_draft)
    assert ours
    assert set(ours) | set(theirs) == set(cores)
    if n_cores > n_draft:
        assert theirs == cores[-n_draft:]
        assert not set(ours) & set(theirs)
    else:  # too few to share out
        assert set(ours) == set(theirs) == set(cores)


def test_usable_cores_are_those_of_the_process() -> None:
    assert sorted(os.sched_getaffinity(0)) == CORES
    os.sched_setaffinity(0, CORES[:1])
    assert usable_cores() == CORES[:1]


def test_a_placement_holds_inside_and_not_after() -> None:
    torch.set_num_threads(2)
    before = state()
    with Affinity(frozenset(CORES[-1:]), 1):
        assert state() == (set(CORES[-1:]), 1)
    assert state() == before


def test_an_error_puts_everything_back() -> None:
    torch.set_num_threads(2)
    before = state()
    placement = Affinity(frozenset(CORES[:1]), 1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), placement:
            raise KeyboardInterrupt
        assert state() == before


def test_one_inside_another() -> None:
    torch.set_num_threads(3)
    before = state()
    placement, other = Affinity(frozenset(CORES[:1]), 1), Affinity(frozenset(CORES[-1:]), 2)
    with placement:
        with other, placement:
            assert state() == (set(CORES[:1]), 1)
        assert state() == (set(CORES[:1]), 1)
    assert state() == before


def test_what_is_not_said_stays_as_it_is() -> None:
    torch.set_num_threads(2)
    before = state()
    with Affinity():
        assert state() == before
        torch.set_num_threads(1)  # by whatever runs inside
    assert state() == before
    with Affinity(threads=1):
        assert state() == (before[0], 1)
    with Affinity(cores=frozenset(CORES[:1])):
        assert state() == (set(CORES[:1]), before[1])
    assert state() == before


def test_long_steps_take_every_core() -> None:
    """Where the draft has a core of its own, a prompt is read on all of them, and put back after."""
    if len(CORES) < 2:
        pytest.skip("one core")
    seen: list[tuple[int, tuple[set[int], int]]] = []

    class Watched:
        device = torch.device("cpu")
        threads = nullcontext
        room = None

        def run(self, rows: Sequence[Segment], is_followed: bool) -> None:
            seen.append((sum(len(row.tokens) for row in rows), state()))
            raise StopIteration

    pins = Pins(Affinity(frozenset(CORES[:-1]), 1), Affinity(frozenset(CORES), 2))
    placed = Verifier(Watched(), SharedNoise(Sampler(9)), n_known=9, pins=pins)  # type: ignore[arg-type]
    before = state()
    for n_tokens in (1, LONG - 1, LONG, 500):
        row = BatchRow(Request("r", [0] * n_tokens, SamplingParams(), 0), 0, n_tokens, 0, True)
        with pytest.raises(StopIteration):
            placed.launch(Batch([row], [], []), Speculation.empty(1))
        assert state() == before
    few, many = (set(CORES[:-1]), 1), (set(CORES), 2)
    assert seen == [(1, few), (LONG - 1, few), (LONG, many), (500, many)]

"""The speculation cache: what was prepared is found under its outcome, and nowhere else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.algo.planning import Planned
from saguaro.draft.cache import SpeculationCache
from saguaro.draft.model import NoModel
from saguaro.types import Outcome

SLOTS, K, V = 4, 2, 5
OUTCOMES = st.sets(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, K), st.integers(0, V - 1)), max_size=12)


def planned(outcomes: list[tuple[int, int, int]], n_gaps: int) -> Planned:
    """A plan of these outcomes, row by row, with places that are not used."""
    slots = sorted({slot for slot, _, _ in outcomes}, reverse=True)
    each = [[(-1, 3)] * n_gaps + [(k, token) for own, k, token in outcomes if own == slot] for slot in slots]
    width = max(map(len, each), default=0)
    each = [row + [(-1, 0)] * (width - len(row)) for row in each]
    shape = (len(slots), width, 2)
    pairs = torch.tensor(each, dtype=torch.int64).view(shape)
    return Planned(torch.tensor(slots, dtype=torch.int64), pairs[..., 0], pairs[..., 1])


def decided(outcome: tuple[int, int, int]) -> Outcome:
    slot, k, bonus = (torch.tensor([x]) for x in outcome)
    return Outcome(slot, torch.tensor([K]), k, bonus)


def everything(cache: SpeculationCache) -> dict[tuple[int, int, int], int]:
    """What is found for each outcome there could be."""
    keys = [(slot, k, token) for slot in range(SLOTS + 1) for k in range(K + 1) for token in range(V)]
    found = {key: cache.look_up(decided(key)) for key in keys}
    assert all(set(branch) <= {slot} for (slot, _, _), branch in found.items())
    return {key: branch[key[0]] for key, branch in found.items() if branch}


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(OUTCOMES, OUTCOMES, st.integers(0, 2), st.sets(st.integers(0, SLOTS)))
def test_exactly_what_was_filled_in_is_found(
    first: set[tuple[int, int, int]], second: set[tuple[int, int, int]], n_gaps: int, gone: set[int]
) -> None:
    cache = SpeculationCache()
    cache.fill(planned(list(first), 0))
    outcomes = list(second)
    cache.fill(planned(outcomes, n_gaps))  # replaces the first
    in_order = sorted(outcomes, key=lambda outcome: (-outcome[0], outcomes.index(outcome)))
    expected = {outcome: branch for branch, outcome in enumerate(in_order)}
    assert everything(cache) == expected
    cache.forget(gone)
    assert everything(cache) == {key: branch for key, branch in expected.items() if key[0] not in gone}
    cache.clear()
    assert everything(cache) == {}


def test_rows_hit_and_miss_apart() -> None:
    cache = SpeculationCache()
    cache.fill(Planned(torch.tensor([3, 1]), torch.tensor([[0, 2], [1, -1]]), torch.tensor([[4, 4], [2, 0]])))
    slots, k, bonus = torch.tensor([1, 3, 0]), torch.tensor([1, 2, 1]), torch.tensor([2, 4, 2])
    length = torch.tensor([2, 2, 2])
    assert cache.look_up(Outcome(slots, length, k, bonus)) == {1: 2, 3: 1}
    assert cache.look_up(Outcome(slots, length, k, bonus + torch.tensor([1, 0, 0]))) == {3: 1}
    assert cache.look_up(Outcome(slots, length, k - torch.tensor([0, 1, 0]), bonus)) == {1: 2}
    assert cache.look_up(Outcome.nothing()) == {}


def test_what_was_served_is_not_served_again() -> None:
    """The next round may prepare nothing; then nothing must be found."""
    cache = SpeculationCache()
    cache.fill(planned([(0, 1, 2)], 0))
    assert cache.serve(decided((0, 1, 3)), [], NoModel()) == []
    assert everything(cache) == {}

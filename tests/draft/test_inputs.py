"""Features of texts: however they arrive and are read, those that are held are those of their positions."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from saguaro.draft.inputs import FeatureTexts
from saguaro.types import Features

N_RECENT, WIDTH = 5, 3


class Draft:
    """Of a draft only what it reads of features: their sums, beside the first number."""

    reads = SimpleNamespace(n_features=WIDTH)
    device, dtype = torch.device("cpu"), torch.float64

    @staticmethod
    def read_features(features: Tensor) -> Tensor:
        return torch.stack((features[:, 0], features.sum(1)), 1)


def feature(slot: int, position: int) -> list[float]:
    return [1000.0 * slot + position, 1.0, -2.0]


def state(slot: int, position: int) -> list[float]:
    return [1000.0 * slot + position, 1000.0 * slot + position - 1.0]


def new_texts(first: int, n_slots: int = 3) -> FeatureTexts:
    return FeatureTexts(cast(Any, Draft()), first, n_slots=n_slots, n_recent=N_RECENT)


def told(parts: dict[int, range]) -> Features:
    values = torch.tensor([feature(slot, at) for slot, own in parts.items() for at in own], dtype=torch.float64)
    facts = ([*parts], [own.start for own in parts.values()], [len(own) for own in parts.values()])
    slots, start, length = (torch.tensor(each) for each in facts)
    return Features(slots, start, length, values.view(-1, WIDTH))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_held_is_what_was_told(seed: int, first: int) -> None:
    """Rows are read at once, or fall behind further than the ring reaches and are read in parts."""
    chance, texts = random.Random(seed), new_texts(first)
    ends, read = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)  # positions after the last one told, and read
    for _ in range(60):
        rows = chance.sample(range(3), chance.randint(1, 3))
        parts = {slot: range(ends[slot], ends[slot] + chance.choice([1, 1, 2, 4, 9])) for slot in rows}
        features = told(parts)
        for slot, start, values in features.rows():
            assert texts.put(slot, start, values, read[slot]) == 0
            ends[slot] = start + len(values)
        texts.put_recent(features)
        for slot in range(3):
            n = chance.randint(0, ends[slot] - read[slot])
            if n:
                found = texts.of_text(slot, read[slot] + first, n)
                assert found is not None
                assert found.tolist() == [state(slot, at) for at in range(read[slot], read[slot] + n)]
                read[slot] += n
        recent = min(ends.values(), default=0)
        if recent >= N_RECENT:
            places = torch.stack([torch.arange(ends[slot] - N_RECENT, ends[slot]) for slot in range(3)])
            found = texts.of_places(torch.arange(3), places, torch.full((3,), first))
            assert found is not None
            assert found.tolist() == [state(slot, at) for slot in range(3) for at in places[slot].tolist()]


def test_what_is_lost_is_counted_and_what_follows_is_held() -> None:
    texts = new_texts(1)
    for parts, needed, n_lost in (({1: range(4)}, 0, 0), ({1: range(9, 21)}, 4, 5), ({1: range(21, 22)}, 15, 0)):
        features = told(parts)
        (slot, start, values), *_ = features.rows()
        assert texts.put(slot, start, values, needed) == n_lost
        texts.put_recent(features)
    found = texts.of_text(1, 16, 7)
    assert found is not None
    assert found.tolist() == [state(1, at) for at in range(15, 22)]


def test_a_damaged_target_does_not_spread() -> None:
    texts, features = new_texts(0), told({0: range(2)})
    features.values[1] = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=torch.float64)
    (slot, start, values), *_ = features.rows()
    texts.put(slot, start, values, 0)
    texts.put_recent(features)
    found = texts.of_text(0, 0, 2)
    assert found is not None
    assert found.tolist() == [state(0, 0), [0.0, 0.0]]

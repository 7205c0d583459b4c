"""Exhaustive tests play a path again and again: whatever is decided by the clock must be decided alike each time."""

from itertools import count

import pytest

from saguaro.draft.policy import learnt


@pytest.fixture(autouse=True)
def _every_look_at_the_clock_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt, "clock", count().__next__)

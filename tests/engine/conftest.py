"""What the policy of a draft in this process decides does not depend on how fast this machine is now."""

import pytest

from saguaro.draft.policy import learnt
from tests.clock import Clock


@pytest.fixture(autouse=True)
def _every_look_at_the_clock_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt, "clock", Clock())

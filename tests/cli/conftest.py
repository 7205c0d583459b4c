"""What tests of the command share."""

import pytest

from tests.cli.here import Here


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)

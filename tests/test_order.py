"""The files that are said to take longest are there."""

from pathlib import Path

import pytest

from tests.conftest import LONGEST


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_files_are_there(name: str) -> None:
    assert (Path(__file__).parent / name).is_file()

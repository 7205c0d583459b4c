"""What tests of the report share: a tiny pair, and a profile that takes seconds."""

from dataclasses import replace
from pathlib import Path

import pytest

from saguaro.model.tiny import write_tiny
from saguaro.report.cell import PROFILES, Profile

TINY = replace(
    PROFILES["quick"],
    n_prompts=2,
    max_tokens=10,
    n_recorded=2,
    temperatures=(0.0, 1.0),
    batches=(1, 2),
    weights=(1.0, 0.0),
    shapes=((2, 2, 1), (4, 8, 2)),
    lookahead=3,
    budget=4,
    candidates=6,
    apart={"link": "inline"},
    pairs=("tiny",),
    sets=("one", "two"),
)
TEXTS = {"one": ["abc abc", "the end"], "two": ["in the"]}


@pytest.fixture
def tiny() -> Profile:
    return TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, whose draft is the target without a layer."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=3)

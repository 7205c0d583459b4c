"""What tests share: threads, and the default model."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does, and before torch is loaded

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from saguaro import LLM
from saguaro.llm import default_cache
from saguaro.model.default import fetch_default


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two threads for the default model, one for tiny tensors, where two would wait for each other most of the time.

    A module under serve/ that has only tiny models says so: N_THREADS = 1.
    """
    before = torch.get_num_threads()
    usual = 2 if request.path.parent.name == "serve" else 1
    torch.set_num_threads(getattr(request.module, "N_THREADS", usual))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder, downloaded the first time."""
    return fetch_default(default_cache())


@pytest.fixture(scope="session")
def llm(default_folder: Path) -> LLM:
    """One engine on the default model for all tests that only ask it questions."""
    return LLM(default_folder, device="cpu")

"""What tests share: threads, and the default model."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does, and before torch is loaded
os.environ["SAGUARO_LEARNT"] = "none"  # no test depends on what was measured in another, nor does the user's machine

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from saguaro import LLM
from saguaro.llm import default_cache
from saguaro.model.default import fetch_default


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: tests run on all cores already, one process each. A module may say otherwise: N_THREADS = 2."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request.module, "N_THREADS", 1))
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

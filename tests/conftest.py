"""What tests share: threads, and the default model."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does, and before torch is loaded

from pathlib import Path

import pytest
import torch

from saguaro import LLM
from saguaro.model.default import fetch_default
from saguaro.serve.llm import default_cache


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder, downloaded the first time."""
    return fetch_default(default_cache())


@pytest.fixture(scope="session")
def llm(default_folder: Path) -> LLM:
    """One engine on the default model for all tests that only ask it questions."""
    torch.set_num_threads(2)
    return LLM(default_folder, device="cpu")

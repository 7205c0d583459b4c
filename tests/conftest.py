"""What tests share: threads, the default model, and the order of files."""

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does, and before torch is loaded
os.environ["SAGUARO_LEARNT"] = "none"  # no test depends on what was measured in another, nor does the user's machine

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from saguaro import LLM
from saguaro.llm import default_cache
from saguaro.model.default import fetch_default
from tests.cli.here import Here

# The files that take longest begin: one that begins last is waited for by all other processes.
LONGEST = (
    "cluster/test_cluster.py",
    "kernels/test_compiled.py",
    "round/test_conformance.py",
    "parallel/test_ranks.py",
    "round/test_exact.py",
    "round/test_unprepared.py",
    "serve/http/test_command.py",
    "serve/http/test_parallel.py",
    "cli/test_start.py",
    "kernels/test_instruction_sets.py",
    "cli/test_cli.py",
    "cli/test_bench_served.py",
    "distill/test_command.py",
    "serve/http/test_schema.py",
    "kernels/test_grow.py",
    "round/test_capturable.py",
    "link/test_process.py",
    "link/test_service.py",
    "serve/http/test_structured.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist hands files out in the order of collection, not by how many tests they have. Tests of Ctrl-C need it
    in this process and in those that it starts, even if a shell has started this one with Ctrl-C ignored."""
    config.option.loadscopereorder = False
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    rank = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


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


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    """The command line in this process."""
    return Here(capsys)

"""One tiny model for all tests of the server, and one server for those that leave it as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro import LLM
from saguaro.model.tiny import write_tiny
from tests.serve.http.driver import Running, running, tiny_llm


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("served"), "llama", num_hidden_layers=4)


@pytest.fixture
def llm(folder: Path) -> LLM:
    """An engine that only the server under test uses."""
    return tiny_llm(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as found:
        yield found

"""A browser, pages in it, and a tiny model behind them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from bench.screenshots import BROWSER_FLAGS, CHROMIUM
from saguaro import LLM
from saguaro.model.tiny import write_tiny
from tests.serve.http.driver import Running, running, tiny_llm
from tests.serve.page.driver import Pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for one module: its event loop must not be there for other tests."""
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(CHROMIUM)} is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    """Opens pages; at the end none of them may have complained."""
    pages = Pages(browser)
    yield pages
    pages.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("shown"), "llama", num_hidden_layers=4)


@pytest.fixture
def llm(folder: Path) -> LLM:
    """An engine that only the server under test uses."""
    return tiny_llm(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as found:
        yield found

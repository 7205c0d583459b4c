"""A browser, pages in it, and a tiny model behind them."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from bench.screenshots import BROWSER_FLAGS, CHROMIUM
from tests.serve.http.conftest import folder, llm, server
from tests.serve.page.driver import Pages

__all__ = ["browser", "folder", "llm", "pages", "server"]  # a server is a server


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

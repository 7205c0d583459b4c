"""Screenshots of the web page for the docs: an answer (light), methods side by side (dark), tokens at phone width.

    python -m bench.screenshots --out docs

The server is `saguaro serve` on the default pair; the browser is an installed Chromium.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from bench.overhead import PROMPT, serving
from saguaro.errors import ConfigError

FLAGS = ["--link", "process", "--prepare", "always", "--fallback", "draft", "--nodes", "8", "--width", "2"]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# No sandbox: this may run as root in a container; the page is our own.
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
BROWSER_FLAGS += ["--disable-sync", "--no-first-run", "--disable-quic"]
DESK: ViewportSize = {"width": 1180, "height": 760}
PHONE: ViewportSize = {"width": 360, "height": 800}
SLOW = 120_000  # milliseconds for an answer
TEMPERATURE, SEED = "0", "1"
# Index of the last round whose tree has the longest accepted path, of those with another path beside it.
BUSHIEST = """one => {
  const worth = (round) => (round.drafted.some((node) => node.parent === -1 && !node.accepted) ? round.accepted : 0);
  const worths = one.answer.rounds.map(worth);
  return worths.lastIndexOf(Math.max(...worths));
}"""
CODE = "Write a Python function that adds two numbers. Then explain it in a short list."


@dataclass(frozen=True)
class Args:
    """What to write."""

    out: Path = Path("docs")
    max_tokens: int = 200


def main(args: Args) -> int:
    """Write the screenshots."""
    with serving([], FLAGS) as port, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=BROWSER_FLAGS)
        url = f"http://127.0.0.1:{port}/"
        light = open_page(browser, url, DESK, "light", args)
        ask(light, "Send", CODE)
        expect(light.locator(".foot")).to_contain_text("seed", timeout=SLOW)
        look(light)
        light.screenshot(path=args.out / "page-light.png")
        dark = open_page(browser, url, DESK, "dark", args)
        dark.get_by_label("Max tokens").fill(str(args.max_tokens // 5))
        ask(dark, "Side by side", PROMPT)
        expect(dark.locator(".verdict")).to_contain_text("identical output", timeout=SLOW)
        look(dark)
        dark.screenshot(path=args.out / "page-dark.png")
        narrow = open_page(browser, url, PHONE, "light", args)
        narrow.get_by_label("Max tokens").fill(str(args.max_tokens // 2))
        narrow.get_by_role("radio", name="Tokens").check()
        ask(narrow, "Send", PROMPT)
        expect(narrow.locator(".foot")).to_contain_text("seed", timeout=SLOW)
        look(narrow)
        narrow.screenshot(path=args.out / "page-narrow.png", full_page=True)
        browser.close()
    return 0


def find_chromium() -> str:
    """The path of Chromium; raises if it is not installed."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        raise ConfigError(f"none of {', '.join(CHROMIUM)} is installed; install Chromium")
    return found


def open_page(browser: Browser, url: str, size: ViewportSize, scheme: str, args: Args) -> Page:
    """Open the page with deterministic settings."""
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.get_by_label("Max tokens").fill(str(args.max_tokens))
    page.get_by_label("Temperature").fill(TEMPERATURE)
    page.get_by_label("Seed").fill(SEED)
    expect(page.get_by_role("button", name="Side by side")).to_be_visible()
    return page


def ask(page: Page, button: str, prompt: str) -> None:
    """Type a prompt and press a button."""
    page.get_by_label("Message").fill(prompt)
    page.get_by_role("button", name=button).click()


def look(page: Page) -> None:
    """Hover over a round of the last answer: see BUSHIEST. Any round, if no token of that one is shown."""
    answer = page.locator(".answer").last
    found = answer.locator(f".round[data-at='{answer.evaluate(BUSHIEST)}']:has(.token)")
    (found if found.count() else answer.locator(".round:has(.token)")).first.hover()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

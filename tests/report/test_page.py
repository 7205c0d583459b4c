"""The page in a browser: offline, in light and dark, on a narrow screen and on paper. Colours follow the page."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Request

from saguaro.report import chart
from saguaro.report.page import Chapter, Page, Plot, Section, Table, html
from tests.report.driver import loaded_from_outside, read_page, words
from tests.serve.page.conftest import browser

__all__ = ["browser"]
NASTY = '<b>&amp; "quoted"</b>'


def drawn(name: str) -> str:
    def draw(left: Any, right: Any) -> None:
        chart.line(left, 0, [1, 2], [1, 2], "a")
        right.plot([1, 2])

    return chart.plot(name, draw, panels=2)


@pytest.fixture(scope="module")
def text() -> str:
    pytest.importorskip("matplotlib")
    wide = Table(tuple(f"a long heading {n}" for n in range(12)), [["1"] * 12], NASTY)
    parts: list[Plot | Table] = [Plot(drawn("one"), "caption"), Plot(drawn("two"), NASTY), wide]
    section = Section(paper="p", found=[NASTY], differs=["d"], parts=parts)
    chapters = [Chapter(name="a", title="A", section=section, command="x"), Chapter(name="b", title="B", section=None)]
    return html(Page(title="T", lead=NASTY, facts=[("name", NASTY)], chapters=chapters))


def test_it_is_well_formed_and_needs_nothing(text: str) -> None:
    page = read_page(text)
    assert loaded_from_outside(page) == []
    assert words(page).count(NASTY) == 5, "lead, fact, text, caption and table: none is markup"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_plots_have_the_pages_colours(text: str) -> None:
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert "var(--c1)" in svg
    assert "var(--ink)" in svg
    assert not re.search(r"#[0-9a-fA-F]{6}", svg), "a colour that does not follow the page"
    style = text[text.index("<style>") : text.index("</style>")]
    for variable in chart.VARIABLES.values():
        assert style.count(f"{variable}: #") == 2, f"{variable} in light and in dark"


def test_the_same_data_are_the_same_text(text: str) -> None:
    assert drawn("one") in text


def _note(seen: list[str], what: Request | ConsoleMessage) -> None:
    seen.append(what.url if isinstance(what, Request) else what.text)


@pytest.mark.browser
def test_in_a_browser(text: str, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(text, encoding="utf-8")
    backgrounds, strokes = {}, {}
    for scheme in ("light", "dark"):
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 360, "height": 800})
        page = context.new_page()
        requests: list[str] = []
        complaints: list[str] = []
        page.on("request", partial(_note, requests))
        page.on("console", partial(_note, complaints))
        page.goto(file.as_uri())
        assert requests == [file.as_uri()]
        assert complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") == 360, "only tables and plots scroll sideways"
        backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        strokes[scheme] = page.evaluate("getComputedStyle(document.querySelector('svg path[style*=c1]')).stroke")
        if scheme == "dark":
            page.emulate_media(media="print")
            on_paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert on_paper == backgrounds["light"], "paper is white"
            assert page.pdf(format="A4").startswith(b"%PDF")
        context.close()
    assert backgrounds["light"] != backgrounds["dark"]
    assert strokes["light"] != strokes["dark"]

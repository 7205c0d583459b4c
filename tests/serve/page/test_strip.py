"""The strip, its axis and its legend; why nothing is prepared; how long an answer may be."""

import json
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from saguaro.serve.http.page import FILES, FOLDER
from tests.serve.http.driver import Running
from tests.serve.page.driver import NONE, Pages, answer_with, ask, bodies, chunk, finished, round_of

pytestmark = pytest.mark.browser

# Labels of the axis: where they begin and end on the screen; and the strip itself.
LABELS = """() => {
  const edges = (node) => { const box = node.getBoundingClientRect(); return [box.left, box.right, node.textContent]; };
  return [...document.querySelectorAll("#strip .tick")].map(edges);
}"""


def rounds(n: int, seconds: float, start: float) -> list[dict[str, Any]]:
    """Rounds of every kind."""
    found = []
    for at in range(n):
        begin = start + at * seconds
        verify = [begin, begin + 0.7 * seconds]
        spans = {"respond": [begin - 0.2 * seconds, begin], "prepare": [begin - seconds, begin - 0.3 * seconds]}
        kinds: list[dict[str, Any]] = [
            {"source": "cache", "hit": True, "draft": spans},
            {"source": "draft", "hit": False, "draft": spans},
            {"source": "ngram", "hit": False, "draft": spans},
            {"source": "suffix", "hit": False, "draft": spans},
            {"source": "random", "hit": False, "draft": {**spans, "prepare": None}},
            {"source": "empty", "hit": None, "drafted": [], "draft": spans},
        ]
        kind = kinds[at % len(kinds)]
        origin = kind["source"] if kind["source"] != "empty" else "target"
        found.append(round_of((" a", origin), (" b", "target"), number=at + 1, verify=verify, **kind))
    return found


def show(page: Page, *told: dict[str, Any]) -> None:
    answer_with(page, *(chunk(one, content=" a b") for one in told), chunk(finish="stop"))
    ask(page, "say it")
    finished(page)
    expect(page.locator("#strip g")).not_to_have_count(0)


@pytest.mark.parametrize(("seconds", "start"), [(0.013, 0.2), (0.05, 1.62), (0.3, 12.0), (1.7, 95.0), (0.0004, 0.001)])
def test_no_label_of_the_axis_is_cut_off(server: Running, pages: Pages, seconds: float, start: float) -> None:
    page = pages.open(server.url)
    show(page, *rounds(40, seconds, start))
    for width in (280, 320, 360, 414, 600, 768, 959, 961, 1180, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        box = page.locator("#strip").bounding_box()
        assert box is not None
        page.wait_for_function(
            "width => document.querySelector('#strip').viewBox.baseVal.width === width", arg=round(box["width"])
        )
        labels = page.evaluate(LABELS)
        assert len(labels) >= (1 if width < 400 else 2), f"at {width}: {labels}"
        assert labels[0][0] >= box["x"] - 0.5
        assert labels[-1][1] <= box["x"] + box["width"] + 0.5, f"at {width}: {labels}"
        assert all(one[1] < other[0] for one, other in pairwise(labels)), f"at {width}: {labels}"
        assert len({text for _, _, text in labels}) == len(labels)


def test_every_mark_is_in_the_legend(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    show(page, *rounds(40, 0.02, 0.1))
    tokens = "all => [...new Set(all.map(one => one.className))].sort()"
    drawn = page.locator(".answer .token").evaluate_all(tokens)
    assert drawn == page.locator("#legend .token").evaluate_all(tokens)
    assert len(drawn) == 6
    looks = """all => [...new Set(all.map((one) => {
      const { fill, stroke, strokeDasharray } = getComputedStyle(one);
      return [one.tagName, fill, stroke, strokeDasharray].join(" ");
    }))].sort()"""
    shapes = "rect, circle, path:not(.axis), .gain"
    strip = page.locator("#strip g").locator(shapes).evaluate_all(looks)
    legend = page.locator("#legend").locator(shapes).evaluate_all(looks)
    assert set(strip) == set(legend)
    assert len(strip) == 9
    page.locator(".answer .round").first.hover()
    background = "one => getComputedStyle(one).backgroundColor"
    current = page.locator(".answer .current").first.evaluate(background)
    assert current == page.locator("#legend .looked").evaluate(background)


def test_why_nothing_is_prepared(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    expect(page.locator("#why")).to_be_hidden()
    reason: list[str | None] = ["The draft has no core of its own <b>here</b>."]

    def meddle(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        body["data"][0]["speculation"]["why_not_prepared"] = reason[0]
        route.fulfill(response=answer, body=json.dumps(body))

    page.route("**/v1/models", meddle)
    page.reload()
    expect(page.locator("#why")).to_have_text(str(reason[0]))
    reason[0] = None
    page.get_by_label("Max tokens").fill("5")
    ask(page, "one")
    finished(page)
    expect(page.locator("#why")).to_be_hidden()


def test_an_answer_may_be_as_long_as_the_context(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    page.get_by_label("Temperature").fill("0")

    def endless(route: Route) -> None:
        route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    ask(page, "the end")
    finished(page)
    assert "max_tokens" not in asked[0]
    expect(page.locator(".foot")).to_contain_text("the context is full")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Max tokens").fill("7")
    ask(page, "the end")
    finished(page)
    assert asked[1]["max_tokens"] == 7
    expect(page.locator(".foot")).to_contain_text("7 tokens")
    expect(page.locator(".foot")).to_contain_text("at max tokens")


@pytest.mark.parametrize("width", [320, 360, 1180])
def test_no_hint_is_cut_off(server: Running, pages: Pages, width: int) -> None:
    page = pages.open(server.url, viewport={"width": width, "height": 800})
    too_long = """all => all.filter((one) => {
      const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(one);
      pen.font = style.font;
      const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      return pen.measureText(one.placeholder).width > room;
    }).map((one) => one.id)"""
    assert page.locator("#settings input:visible").evaluate_all(too_long) == []


def test_answers_that_come_at_once_have_no_rate(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer_with(
        page, chunk(round_of(("a", "target")), round_of(("b", "target"), number=2), content="ab", finish="stop")
    )
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    ask(page, "say it")
    finished(page)
    page.clock.run_for(100)
    expect(page.locator("#per-round")).to_have_text("1.00")
    expect(page.locator("#rate")).to_have_text(NONE)


def test_every_file_of_the_page_is_served(server: Running) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES.values())
    for path in FILES:
        assert server.client.get(path).status_code == 200

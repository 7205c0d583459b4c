"""The page for every hand, eye and screen: keys, names, contrast, dark, narrow, without motion."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from saguaro import LLM
from tests.serve.http.driver import Gate, Running, running
from tests.serve.page.driver import NONE, Pages, ask, finished, settle

pytestmark = pytest.mark.browser

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}

# Text that is seen, with its contrast to the first ground under it that is opaque (WCAG 2, 1.4.3).
CONTRASTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    throw new Error("no ground");
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((one) => one.nodeType === 3);
    const words = node.matches("input, textarea") ? node.value : own.map((one) => one.data).join("");
    const style = getComputedStyle(node);
    if (!words.trim() || !node.checkVisibility({ opacityProperty: true }) || node.closest(".gain")) continue;
    const [a, b] = [light(channels(node.closest("svg") ? style.fill : style.color)), light(ground(node))];
    found.push([words.trim().slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_written_can_be_read(server: Running, pages: Pages, scheme: Any) -> None:
    page = pages.open(server.url, color_scheme=scheme)
    settle(page, Max_tokens="30")
    ask(page, "the end")
    finished(page)
    ask(page, "the end", "Side by side")
    expect(page.locator(".verdict.good")).to_be_visible()
    page.get_by_label("Temperature").fill("")
    page.locator(".trio .round:has(.token)").first.hover()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 60
    assert {text: ratio for text, ratio in found if ratio < 4.5} == {}
    assert (background == "rgb(20, 24, 26)") == (scheme == "dark")
    page.get_by_role("button", name="Light" if scheme == "dark" else "Dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
    assert {text: ratio for text, ratio in page.evaluate(CONTRASTS) if ratio < 4.5} == {}
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background, "the choice is kept"


def test_origins_differ_without_colour(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    lines = page.locator("#legend .token").evaluate_all(
        "all => all.map(getComputedStyle).map(style => style.textDecorationLine + ' ' + style.textDecorationStyle)"
    )
    assert len(set(lines)) == 6


def test_a_phone_has_nothing_to_scroll_sideways(server: Running, pages: Pages) -> None:
    page = pages.open(server.url, **PHONE)
    settle(page, Max_tokens="20")
    assert fits(page)
    ask(page, "w" * 80)
    finished(page)
    assert fits(page)
    ask(page, "the end", "Side by side")
    expect(page.locator(".verdict.good")).to_be_visible()
    assert fits(page)
    lefts = page.locator(".trio section").evaluate_all("all => all.map(one => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == 1, "below each other"


def test_a_wide_page_has_columns_beside_each_other(server: Running, pages: Pages) -> None:
    page = pages.open(server.url, viewport={"width": 1200, "height": 800})
    settle(page)
    ask(page, "the end", "Side by side")
    expect(page.locator(".verdict.good")).to_be_visible()
    tops = page.locator(".trio section").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    assert fits(page)


def test_by_keyboard_alone(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    settle(page, Max_tokens="40")
    page.get_by_label("Message").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.get_by_label("Message")).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.locator(".user")).to_have_text("one\ntwo")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("radio", name="Text")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".answer .tokens")).to_be_visible()
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("radio", name="ssd-uniform")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("radio", name="sd", exact=True)).to_be_checked()
    outline = "one => getComputedStyle(one.nextElementSibling).outlineStyle"
    assert page.get_by_role("radio", name="sd", exact=True).evaluate(outline) == "solid"
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".answer")).to_be_focused()
    n_rounds = page.locator(".answer").evaluate("one => one.answer.rounds.length")
    for key, at in [("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)]:
        page.keyboard.press(key)
        expect(page.locator(f".round.current:not([data-at='{at}'])")).to_have_count(0)
        expect(page.locator("#strip g.current")).to_have_attribute("data-at", str(at))
        expect(page.locator("#round")).to_have_text(re.compile(r"^Round \d+: "))
    expect(page.locator(".round.current")).to_have_count(1)
    page.keyboard.press("End")
    expect(page.locator("#strip g.current")).to_have_attribute("data-at", str(n_rounds - 1))
    expect(page.locator("#strip g")).not_to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator(".answer .text").last).to_be_visible()
    expect(page.get_by_role("radio", name="Text")).to_be_checked()


def test_every_control_has_a_name_and_the_page_its_landmarks(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    page.locator("#key-field").evaluate("one => { one.hidden = false; }")
    settle(page)
    ask(page, "the end")
    finished(page)
    snapshot = page.locator("body").aria_snapshot()
    controls = re.findall(r"- (button|textbox|spinbutton|radio|img|group|region|complementary)\b(.*)", snapshot)
    assert len(controls) > 14
    assert [kind for kind, rest in controls if not rest.startswith(' "')] == []
    for landmark in ("- banner", "- main", '- region "Conversation"', '- complementary "Speculation"', "- status"):
        assert landmark in snapshot
    assert "- textbox" in snapshot
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#round").get_attribute("aria-live") == "polite"


def test_without_motion_the_strip_waits_for_the_end(llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        page = pages.open(server.url, reduced_motion="reduce")
        settle(page)
        ask(page, "the end")
        gate.let(8)
        expect(page.locator("#rate")).not_to_have_text(NONE)
        assert page.locator("#strip g").count() == 0
        gate.open()
        finished(page)
        expect(page.locator("#strip g")).not_to_have_count(0)
        page.close()

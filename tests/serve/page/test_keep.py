"""The conversation over a reload: kept in the tab, bounded, without the key, and dropped when it cannot be read."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from saguaro import LLM
from tests.serve.http.driver import Gate, Running, running
from tests.serve.page.driver import (
    NONE,
    Pages,
    answer_with,
    as_tokens,
    ask,
    bodies,
    chunk,
    finished,
    origins,
    round_of,
    settle,
)

pytestmark = pytest.mark.browser

STORED = "sessionStorage.getItem('conversation')"


def reload(page: Page) -> None:
    page.reload()
    expect(page.locator("#model:not(:text-is('…'))")).to_have_count(1)


def test_the_conversation_is_there_after_a_reload(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    settle(page, System_prompt="be brief", Max_tokens="20")
    ask(page, "one")
    finished(page)
    ask(page, "two", "Side by side")
    expect(page.locator(".verdict.good")).to_be_visible()
    finished(page)
    before = page.locator("#log").inner_html()
    marks = [origins(answer) for answer in page.locator(".answer").all()]
    reload(page)
    assert page.locator("#log").inner_html() == before
    assert [origins(answer) for answer in page.locator(".answer").all()] == marks
    expect(page.locator("#rate")).not_to_have_text(NONE)
    expect(page.get_by_label("System prompt")).to_have_value("be brief")
    expect(page.get_by_label("Max tokens")).to_have_value("20")
    page.locator(".answer").first.locator(".round").first.hover()
    expect(page.locator("#round")).to_contain_text("Round")
    ask(page, "three")
    finished(page)
    roles = [message["role"] for message in asked[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert asked[-1]["messages"][2:4] == asked[-2]["messages"][2:4]


def test_the_view_is_kept(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    settle(page, Max_tokens="5")
    ask(page, "one")
    finished(page)
    as_tokens(page)
    reload(page)
    expect(page.get_by_role("radio", name="Tokens")).to_be_checked()
    expect(page.locator(".answer .tokens")).to_be_visible()


def test_a_new_chat_forgets_it(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    settle(page, Max_tokens="5")
    ask(page, "something unheard of")
    finished(page)
    assert "unheard" in page.evaluate(STORED)
    page.get_by_role("button", name="New chat").click()
    assert "unheard" not in (page.evaluate(STORED) or "")
    reload(page)
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_another_tab_has_a_conversation_of_its_own(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    settle(page, Max_tokens="5")
    ask(page, "one")
    finished(page)
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator("#model:not(:text-is('…'))")).to_have_count(1)
    expect(other.locator(".turn")).to_have_count(0)


def test_the_key_is_never_stored(llm: LLM, pages: Pages) -> None:
    with running(llm, api_keys=["very secret"]) as server:
        page = pages.open(server.url)
        page.get_by_label("API key").fill("very secret")
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_role("alert")).to_be_hidden()
        settle(page, Max_tokens="5")
        ask(page, "one")
        finished(page)
        everything = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "one" in everything
        assert "secret" not in everything
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("API key")
        expect(page.locator(".turn")).to_have_count(1)
        pages.complaints.clear()  # of Chromium, about 401
        page.close()


def test_a_reload_while_it_answers_keeps_what_there_is(llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        page = pages.open(server.url)
        settle(page)
        ask(page, "the end")
        gate.let(6)
        expect(page.locator(".round")).not_to_have_count(0)
        page.reload()
        gate.open()
        expect(page.locator(".foot")).to_contain_text("stopped")
        expect(page.locator(".answer .token")).not_to_have_count(0)
        asked = bodies(page)
        settle(page, Max_tokens="5")
        ask(page, "go on")
        finished(page)
        assert [message["role"] for message in asked[0]["messages"]] == ["user", "assistant", "user"]
        page.close()


def stored(page: Page) -> Any:
    return json.loads(page.evaluate(STORED))


def spoil(page: Page, text: str) -> None:
    """Another text in the storage when the page opens next; leaving it must not write over that."""
    page.add_init_script(f"sessionStorage.setItem('conversation', {json.dumps(text)})")


TWISTS: dict[str, Any] = {
    "version": 99,
    "turns": [1],
    "turns.0.says": [],
    "turns.0.says.0.content": {"toString": 1},
    "turns.0.answers": [],
    "turns.0.answers.0.rounds": [{"tokens": None}],
    "turns.0.answers.0.rounds.0.tokens.0.origin": "x onload=1",
    "turns.0.answers.0.rounds.0.verify": [None, 1],
    "turns.0.answers.0.content.parts": [[0, 10**9]],
    "turns.0.answers.0.content.parts.0.0": 5,
    "turns.0.answers.0.content.text": 7,
    "turns.0.answers.0.calls": [None],
    "turns.0.verdict": ["x", "bad good"],
    "turns.0.feet": [],
    "settings": {"system": 3},
}


def twisted(value: Any, path: str, to: Any) -> str:
    *way, last = path.split(".")
    found = value
    for step in way:
        found = found[int(step) if step.isdecimal() else step]
    found[int(last) if last.isdecimal() else last] = to
    return json.dumps(value)


def test_what_cannot_be_read_is_dropped(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer_with(page, chunk(round_of(("a", "cache"), ("b", "target")), content="ab", finish="stop"))
    ask(page, "one")
    finished(page)
    sound = page.evaluate(STORED)
    texts = ["", "{", "null", "[]", '"x"', "3"] + [twisted(json.loads(sound), *one) for one in TWISTS.items()]
    for text in texts:
        spoil(page, text)
        reload(page)
        expect(page.locator(".turn"), text).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
    ask(page, "two")
    expect(finished(page)).to_have_text("ab")
    spoil(page, sound)
    reload(page)
    expect(page.locator(".turn"), "what was not spoiled is read").to_have_count(1)


def test_what_was_stored_is_text_too(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer_with(page, chunk(round_of(("a", "cache")), content="a", finish="stop"))
    ask(page, "one")
    finished(page)
    found = stored(page)
    evil = "<img src=x onerror=\"document.title='taken'\">"
    found["turns"][0]["says"][0]["content"] = found["turns"][0]["feet"][0] = evil
    spoil(page, json.dumps(found))
    reload(page)
    expect(page.locator(".user")).to_have_text(evil)
    assert page.locator("#log img").count() == 0
    assert page.title() == "Saguaro"


def test_it_is_bounded(server: Running, pages: Pages) -> None:
    """The oldest rounds are left out first, then the oldest turns."""
    page = pages.open(server.url)
    text = "word " * 24_000
    answer_with(page, chunk(round_of((text, "draft")), content=text, finish="stop"))
    kept = []
    for n in range(18):
        ask(page, f"number {n}")
        expect(page.locator(".foot")).to_have_count(n + 1)
        finished(page)
        kept.append(stored(page)["turns"])
        assert kept[-1][-1]["says"][0]["content"] == f"number {n}"
    assert len(page.evaluate(STORED)) < 2_100_000
    assert [len(turns) for turns in kept[:9]] == list(range(1, 10))
    assert [bool(turn["answers"][0]["rounds"]) for turn in kept[8]] == [False] * 6 + [True] * 3
    assert 9 < len(kept[-1]) < 18
    reload(page)
    expect(page.locator(".turn")).to_have_count(len(kept[-1]))


def test_a_browser_that_keeps_nothing(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    reload(page)
    settle(page, Max_tokens="5")
    ask(page, "one")
    expect(finished(page)).not_to_be_empty()
    expect(page.get_by_text("a reload loses it")).to_be_visible()

"""What goes wrong is told on the page, with what to do about it; and a server that does not speculate."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from saguaro import LLM
from saguaro.serve.http.limits import ServerLimits
from tests.serve.http.driver import Gate, Running, running, tiny_llm
from tests.serve.page.driver import CHAT, Pages, ask, finished, settle

pytestmark = pytest.mark.browser


def test_a_key_is_asked_for_and_then_sent(llm: LLM, pages: Pages) -> None:
    with running(llm, api_keys=["se cret"]) as server:
        page = pages.open(server.url)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        key.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("API key")
        assert page.locator("#methods label").count() == 0
        key.fill("se cret")
        key.press("Enter")
        expect(page.get_by_role("alert")).to_be_hidden()
        settle(page)
        ask(page, "the end")
        assert finished(page).text_content()
        assert all("401" in complaint for complaint in pages.complaints), "Chromium tells of those by itself"
        pages.complaints.clear()
        page.close()


def test_a_busy_server(llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    monkeypatch.setattr(llm.engine, "config", type(llm.engine.config)(max_batch_rows=1))
    with running(llm, ServerLimits(max_waiting=0)) as server:
        one, other = pages.open(server.url), pages.open(server.url)
        for page in (one, other):
            settle(page)
        ask(one, "the end")
        gate.wait()
        ask(other, "me too")
        expect(other.get_by_role("alert")).to_contain_text("The server is busy")
        expect(other.get_by_role("alert")).to_contain_text("Send again in 1 s")
        expect(other.get_by_label("Message")).to_have_value("me too")
        gate.open()
        finished(one)
        other.get_by_role("button", name="Send").click()
        expect(other.locator(".foot").last).to_contain_text("seed 7")
        expect(other.get_by_role("alert")).to_be_hidden()
        assert all("429" in complaint for complaint in pages.complaints)
        pages.complaints.clear()
        one.close()
        other.close()


def test_a_server_that_is_gone(folder: Path, pages: Pages) -> None:
    with running(tiny_llm(folder)) as server:
        page = pages.open(server.url)
    settle(page)
    ask(page, "the end")
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached. Check that `saguaro serve` still runs")
    expect(page.get_by_label("Message")).to_have_value("the end")
    expect(page.locator(".foot")).to_contain_text("broken off")
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in pages.complaints)
    pages.complaints.clear()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('data: {"choices": []}\n\ndata: {"cho', "The connection broke before the answer was complete"),
        (
            'data: {"error": {"message": "the engine could not go on"}}\n\ndata: [DONE]\n\n',
            "the engine could not go on",
        ),
    ],
)
def test_a_stream_that_breaks(server: Running, pages: Pages, body: str, message: str) -> None:
    page = pages.open(server.url)
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "the end")
    expect(page.get_by_role("alert")).to_contain_text(message)
    expect(page.locator(".foot")).to_contain_text("broken off")
    page.unroute_all()
    settle(page, Max_tokens="5")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".foot").last).to_contain_text("5 tokens")


def test_what_the_server_refuses_is_told_in_its_words(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    ask(page, "the end " * 200)
    expect(page.get_by_role("alert")).to_contain_text("The server refused (400)")
    expect(page.get_by_role("alert")).to_contain_text("256")
    expect(page.get_by_role("alert")).not_to_contain_text("New chat")
    settle(page, Max_tokens="150")
    ask(page, "the end")
    finished(page)
    ask(page, "the end")
    expect(page.get_by_role("alert")).to_contain_text("Or New chat, to begin anew.")
    assert all("400" in complaint for complaint in pages.complaints)
    pages.complaints.clear()


@pytest.mark.parametrize(
    ("settings", "methods"),
    [({"method": "ar", "draft": None}, []), ({"method": "ngram", "draft": None}, ["ar", "ngram"])],
)
def test_only_what_the_server_can_do_is_offered(
    folder: Path, pages: Pages, settings: dict[str, str | None], methods: list[str]
) -> None:
    with running(tiny_llm(folder, **settings)) as server:
        page = pages.open(server.url)
        assert page.locator("#methods label").all_text_contents() == methods or not methods
        expect(page.get_by_role("button", name="Side by side")).to_be_visible(visible=bool(methods))
        expect(page.get_by_role("group", name="Method")).to_be_visible(visible=bool(methods))
        settle(page, Max_tokens="30")
        ask(page, "the end")
        expect(finished(page)).not_to_be_empty()
        if methods:
            ask(page, "the end", "Side by side")
            expect(page.locator(".verdict.good")).to_contain_text("identical output")
            assert page.locator(".trio h3").all_text_contents() == methods
        page.close()


def test_rejection_keeps_the_law_and_not_the_text(folder: Path, pages: Pages) -> None:
    with running(tiny_llm(folder, method="saguaro")) as server:
        page = pages.open(server.url)
        settle(page, Temperature="1")
        ask(page, "the end", "Side by side")
        expect(page.locator(".verdict")).to_contain_text("different output, as expected")
        expect(page.locator(".verdict.bad")).to_have_count(0)
        page.close()

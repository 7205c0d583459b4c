"""A conversation on the page: tokens marked by origin as they come, methods, stopping, side by side."""

import json
import re

import pytest
from playwright.sync_api import Route, expect

from saguaro import LLM
from tests.serve.http.driver import Gate, Running, running
from tests.serve.page.driver import CHAT, NONE, Pages, as_tokens, ask, bodies, finished, origins, say, settle

pytestmark = pytest.mark.browser


def test_marked_tokens_come_before_the_answer_has_ended(
    llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        page = pages.open(server.url)
        settle(page)
        ask(page, "the end")
        gate.let(8)
        expect(page.locator(".round")).not_to_have_count(0)
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        expect(page.locator("[aria-busy=true]")).to_have_count(1)
        expect(page.locator("#announce")).to_be_empty()
        expect(page.locator("#rate")).to_have_text(re.compile(r"^\d+\.\d$"))
        gate.open()
        answer = finished(page)
        assert origins(answer) == {"cache", "draft", "target"}
        expect(page.locator("#per-round")).to_have_text(re.compile(r"^[1-4]\.\d\d$"))
        expect(page.locator("#hits")).to_have_text(re.compile(r"^\d+ %$"))
        expect(page.locator("#first")).to_have_text(re.compile(r" m?s$"))
        expect(page.locator("#strip")).to_have_attribute("aria-label", re.compile(r"\d+ hits, \d+ misses. The target"))
        expect(page.locator("#announce")).to_contain_text("tok/s")
        expect(page.locator(".foot")).to_have_text("ssd-uniform · 100 tokens · seed 7 · at max tokens")
        page.close()


def test_the_text_is_what_the_server_says(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    as_tokens(page)
    settle(page)
    ask(page, "the end")
    said = server.chat("the end", temperature=0, max_tokens=100)["choices"][0]["message"]["content"]
    assert finished(page).text_content() == said


@pytest.mark.parametrize("how", ["button", "Escape", "New chat"])
def test_stop(llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        page = pages.open(server.url)
        settle(page)
        asked = bodies(page)
        ask(page, "the end")
        gate.let(5)
        expect(page.locator(".round")).not_to_have_count(0)
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="New chat" if how == "New chat" else "Stop").click()
        finished(page)
        while server.front.n_rows:  # the server notices that nobody listens
            server.client.get("/version")
        gate.open()
        if how != "New chat":
            expect(page.locator(".foot")).to_contain_text("stopped")
        expect(page.locator(".answer")).to_have_count(0 if how == "New chat" else 1)
        expect(page.get_by_label("Message")).to_be_focused()
        ask(page, "go on")
        finished(page)
        roles = [message["role"] for message in asked[-1]["messages"]]
        assert roles == (["user"] if how == "New chat" else ["user", "assistant", "user"])
        page.close()


def test_history_system_prompt_and_settings_are_sent(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    as_tokens(page)
    asked = bodies(page)
    settle(page, System_prompt="be brief", Max_tokens="9", Temperature="0.5", Seed="3")
    ask(page, "one")
    first = finished(page).text_content()
    settle(page, Seed="", Max_tokens="4")
    ask(page, "two")
    finished(page)
    assert asked[0]["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert asked[1]["messages"][1:] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    assert (asked[0]["max_tokens"], asked[0]["temperature"], asked[0]["seed"]) == (9, 0.5, 3)
    expect(page.locator(".foot").last).to_contain_text(f"seed {asked[1]['seed']}")
    page.get_by_label("Temperature").fill("-1")
    ask(page, "three")
    expect(page.locator("#temperature:invalid")).to_be_focused()
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("method", "marks"),
    [("ar", {"target"}), ("sd", {"draft", "target"}), ("ssd-uniform", {"cache", "draft", "target"})],
)
def test_a_switch_of_methods(server: Running, pages: Pages, method: str, marks: set[str]) -> None:
    page = pages.open(server.url)
    settle(page)
    expect(page.get_by_role("radio", name="ssd-uniform")).to_be_checked()
    page.get_by_role("radio", name=method, exact=True).check()
    ask(page, "the end")
    assert origins(finished(page)) == marks
    expect(page.locator(".foot")).to_contain_text(f"{method} · 100 tokens")
    if method != "ssd-uniform":
        expect(page.locator("#hits")).to_have_text(NONE)


def never_ending(route: Route) -> None:
    """With a seed that nobody chose, a random model may say the end of text at any token."""
    route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "ignore_eos": True}))


def test_side_by_side_one_after_the_other(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    page.route(f"**{CHAT}", never_ending)
    settle(page, Temperature="1", Seed="")
    ask(page, "the end", "Side by side")
    expect(page.locator(".verdict.good")).to_contain_text("✓ identical output: 100 tokens")
    assert page.locator(".trio h3").all_text_contents() == ["ar", "sd", "ssd-uniform"]
    texts = page.locator(".trio .answer").all_text_contents()
    assert texts[0] == texts[1] == texts[2] != ""
    marks = [origins(answer) for answer in page.locator(".trio .answer").all()]
    assert marks[0] == {"target"}  # how often a draft is right depends on the seed, which is a fresh one here
    assert {"target"} <= marks[1] <= {"draft", "target"}
    assert {"target"} <= marks[2] <= {"cache", "draft", "target"}
    assert [body["max_tokens"] for body in asked] == [1, 100, 100, 100]
    assert len({body["seed"] for body in asked}) == 1
    expect(page.locator("#announce")).to_contain_text("identical output")


def test_outputs_that_differ_are_told_loudly(server: Running, pages: Pages) -> None:
    """Speculative decoding is made to differ: on its way to the server its request gets another seed."""
    page = pages.open(server.url)

    def meddle(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        if body.get("prepare") is False:
            body["seed"] += 1
        route.continue_(post_data=json.dumps(body))

    page.route(f"**{CHAT}", meddle)
    settle(page, Temperature="1")
    ask(page, "the end", "Side by side")
    expect(page.locator(".verdict.bad")).to_have_text(re.compile(r"OUTPUTS DIFFER at token \d+: ar has .*, sd has .*"))


def test_a_comparison_that_is_stopped_has_no_verdict(llm: LLM, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        page = pages.open(server.url)
        settle(page)
        ask(page, "the end", "Side by side")
        gate.let(6)
        expect(page.locator(".round")).not_to_have_count(0)
        page.keyboard.press("Escape")
        finished(page)
        gate.open()
        expect(page.locator(".verdict")).to_have_text("stopped: no verdict")
        page.close()


EVIL = "<img src=x onerror=\"document.title='taken'\"><b>bold</b> & <script>1</script>"


def test_what_looks_like_html_is_text(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    settle(page)
    say(page, EVIL)
    ask(page, EVIL)
    expect(page.locator(".user").last).to_have_text(EVIL)
    assert finished(page).text_content() == EVIL
    assert page.locator("#log img, #log b:not(#welcome b), #log script").count() == 0
    page.locator(".round").first.hover()
    expect(page.locator("#round")).to_contain_text(EVIL)
    assert page.locator("#round *").count() == 0
    assert page.title() == "Saguaro"

"""Reasoning and tool calls on the page, and what the user answers to them."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from saguaro.model.tiny import write_tiny
from tests.serve.http.driver import Running, running, tiny_llm
from tests.serve.page.driver import CHAT, Pages, answer_with, as_tokens, ask, bodies, chunk, finished, round_of, settle

pytestmark = pytest.mark.browser

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
RAW = ["<tool_call>", '{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}', "</tool_call>"]


def delta(at: int, arguments: str, **first: Any) -> dict[str, Any]:
    name = {"name": first.pop("name")} if "name" in first else {}
    return {"index": at, **first, "function": {**name, "arguments": arguments}}


def calls() -> list[dict[str, Any]]:
    """Two calls, the arguments in pieces."""
    begin = {"type": "function"}
    return [
        chunk(round_of((RAW[0], "draft"), (RAW[1], "target")), role="assistant", content=None),
        chunk(tool_calls=[delta(0, "", id="call_1", name="add", **begin)]),
        chunk(tool_calls=[delta(0, '{"a": 1, "b"')]),
        chunk(tool_calls=[delta(0, ": [2, 3]}")]),
        chunk(
            round_of((RAW[2], "cache"), number=2), tool_calls=[delta(1, "{not", id="call_2", name="<b>x</b>", **begin)]
        ),
        chunk(finish="tool_calls"),
    ]


def answers(page: Page, *each: list[dict[str, Any]]) -> None:
    """A server that gives these answers one after the other."""
    left = list(each)

    def fulfil(route: Route) -> None:
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in left.pop(0)) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route(f"**{CHAT}", fulfil)


def test_calls_are_shown_and_their_results_sent(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    answers(page, calls(), [chunk(round_of(("six", "target")), content="six", finish="stop")])
    page.get_by_text("Tools", exact=True).click()
    page.locator("#tools").fill(json.dumps(TOOLS))
    ask(page, "add them")
    answer = finished(page)
    assert asked[0]["tools"] == TOOLS
    boxes = answer.get_by_role("region", name="Tool call")
    expect(boxes).to_have_count(2)
    expect(boxes.nth(0).locator(".name")).to_have_text("calls add")
    assert boxes.nth(0).locator("code").text_content() == json.dumps({"a": 1, "b": [2, 3]}, indent=2)
    expect(boxes.nth(1).locator(".name")).to_have_text("calls <b>x</b>")
    expect(boxes.nth(1).locator("code")).to_have_text("{not")
    expect(page.locator(".foot")).to_contain_text("calls tools")
    page.get_by_label("Result of add").fill("6")
    page.get_by_label("Result of <b>x</b>").fill("none")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".answer")).to_have_count(2)
    expect(finished(page)).to_have_text("six")
    said, called, *results = asked[1]["messages"]
    assert said == {"role": "user", "content": "add them"}
    assert called["content"] is None
    first = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, 3]}'}}
    assert called["tool_calls"][0] == first
    assert results == [
        {"role": "tool", "tool_call_id": "call_1", "content": "6"},
        {"role": "tool", "tool_call_id": "call_2", "content": "none"},
    ]
    expect(page.locator(".results")).to_have_count(0)
    as_tokens(page)
    assert page.locator(".answer").first.text_content() == "".join(RAW), "tokens show what the model wrote"


PICK = {
    "type": "object",
    "properties": {"n": {"enum": ["one", "two"]}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_a_call_that_the_server_enforces(tmp_path: Path, pages: Pages) -> None:
    """A random model calls only because it must; the page leaves that choice to the server."""
    folder = write_tiny(tmp_path, "llama", num_hidden_layers=4, max_position_embeddings=2048)
    choices = ["required", "none"]

    def meddle(route: Route) -> None:
        body = {**(route.request.post_data_json or {}), "tool_choice": choices.pop(0), "parallel_tool_calls": False}
        route.continue_(post_data=json.dumps(body))

    with running(tiny_llm(folder, kv_memory="16MiB")) as server:
        page = pages.open(server.url)
        page.route(f"**{CHAT}", meddle)
        settle(page, Max_tokens="")
        page.get_by_text("Tools", exact=True).click()
        page.locator("#tools").fill(
            json.dumps([{"type": "function", "function": {"name": "pick", "parameters": PICK}}])
        )
        ask(page, "pick one")
        box = finished(page).get_by_role("region", name="Tool call pick")
        assert json.loads(box.locator("code").text_content() or "")["n"] in ("one", "two")
        settle(page, Max_tokens="5")
        page.get_by_label("Result of pick").fill("done")
        page.get_by_role("button", name="Send result").click()
        expect(page.locator(".foot")).to_have_count(2)
        expect(finished(page)).not_to_be_empty()
        expect(page.get_by_role("alert")).to_be_hidden()
        page.close()


def test_calls_without_results_do_not_end_the_conversation(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    answers(page, calls(), [chunk(round_of(("ok", "target")), content="ok", finish="stop")])
    ask(page, "add them")
    finished(page)
    page.reload()
    expect(page.get_by_label("Result of add")).to_be_visible()
    expect(page.get_by_role("region", name="Tool call")).to_have_count(2)
    ask(page, "never mind")
    expect(page.locator(".answer")).to_have_count(2)
    finished(page)
    roles = [(one["role"], one.get("tool_call_id")) for one in asked[1]["messages"]]
    assert roles == [("user", None), ("assistant", None), ("tool", "call_1"), ("tool", "call_2"), ("user", None)]


@pytest.mark.parametrize(("text", "message"), [("[{", "not JSON"), ('{"a": 1}', "a JSON list")])
def test_tools_that_are_none_are_not_sent(server: Running, pages: Pages, text: str, message: str) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    page.get_by_text("Tools", exact=True).click()
    page.locator("#tools").fill(text)
    page.get_by_text("Tools", exact=True).click()
    ask(page, "add them")
    expect(page.locator("#tools:invalid")).to_be_focused()
    assert message in page.locator("#tools").evaluate("one => one.validationMessage")
    assert asked == []
    expect(page.get_by_label("Message")).to_have_value("add them")


def test_reasoning_is_in_a_box_of_its_own(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    asked = bodies(page)
    thoughts = round_of(("<think>", "target"), ("Add **1**", "cache"), ("</think>", "draft"))
    answer_with(
        page,
        chunk(thoughts, reasoning_content="Add **1**"),
        chunk(round_of(("\n\nIt is *2*.", "ngram"), number=2), content="It is *2*.", finish="stop"),
    )
    settle(page)
    ask(page, "add")
    answer = finished(page)
    box = answer.locator("details.reasoning")
    expect(box).not_to_have_attribute("open", "")
    expect(box.locator("strong")).to_be_hidden()
    expect(answer.locator("em")).to_have_text("2")
    expect(answer.locator("em .token.ngram")).to_have_text("2")
    box.locator("summary").click()
    expect(box.locator("strong .token.cache")).to_have_text("1")
    ask(page, "again")
    expect(page.locator(".answer")).to_have_count(2)
    finished(page)
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "It is *2*."}, "reasoning is not sent back"
    page.reload()
    expect(page.locator("details.reasoning")).to_have_count(2)
    as_tokens(page)
    assert page.locator(".answer").first.text_content() == "<think>Add **1**</think>\n\nIt is *2*."


def test_reasoning_is_open_while_the_model_thinks(server: Running, pages: Pages) -> None:
    """An answer that is cut off while it thinks has nothing else to show."""
    page = pages.open(server.url)
    body = f"data: {json.dumps(chunk(round_of(('hm', 'target')), reasoning_content='hm'))}\n\n"
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "add")
    expect(page.get_by_role("alert")).to_contain_text("The connection broke")
    expect(page.locator("details.reasoning .text")).to_be_visible()

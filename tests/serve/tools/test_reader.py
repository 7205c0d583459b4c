"""Outputs of every format, whole and cut in every way."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.serve.tools.events import CallArguments, CallEnd, CallStart, ContentDelta, gather
from saguaro.serve.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, THINKING, Format
from tests.serve.tools.driver import calls, events, read

THINK = THINKING["deepseek_r1"]
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'
BOTH = [("get_weather", '{"city": "Paris"}'), ("add", '{"a": 1, "b": [2, {"c": null}]}')]

# Text, format, content, calls: as the formats are written.
WRITTEN: list[tuple[str, Format, str | None, Sequence[tuple[str, str]]]] = [
    (f"<tool_call>\n{PARIS}\n</tool_call>", HERMES, None, BOTH[:1]),
    (f"I look.\n<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", HERMES, "I look.", BOTH),
    (f"<tool_call>[{PARIS}, {ADD}]</tool_call>", HERMES, None, BOTH),
    (f"<tool_call>{PARIS}</tool_call>\n\nThat is all. ", HERMES, "That is all. ", BOTH[:1]),
    (f"One, <tool_call>{PARIS}</tool_call> two", HERMES, "One, two", BOTH[:1]),
    ('<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "add"}</tool_call>', HERMES, None, [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "now"}</tool_call>', HERMES, None, [("now", "{}")]),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', HERMES, None, [("unknown", "{}")]),
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', LLAMA3, None, BOTH[:1]),
    ('<|python_tag|>{"name": "now", "parameters": {}}', LLAMA3, None, [("now", "{}")]),
    ('{"type": "function", "name": "now", "parameters": {}}', LLAMA3, None, [("now", "{}")]),
    (f'{{"name": "get_weather", "parameters": {{"city": "Paris"}}}}; {ADD}', LLAMA3, None, BOTH),
    (f"[TOOL_CALLS][{PARIS}, {ADD}]", MISTRAL, None, BOTH),
    (f"[TOOL_CALLS] [{PARIS}]", MISTRAL, None, BOTH[:1]),
    ('[TOOL_CALLS]get_weather{"city": "Paris"}', MISTRAL, None, BOTH[:1]),
    ('Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', MISTRAL, "Well.",
     [*BOTH[:1], ("now", "{}")]),
    ('[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}', MISTRAL, None, [("now", "{}")]),
    (f"{PARIS}\n{ADD}", JSON, None, BOTH),
    (f"[{PARIS},\n {ADD}]\n", JSON, None, BOTH),
    (f"```json\n{PARIS}\n```", JSON, None, BOTH[:1]),
    (f"```\n{PARIS}\n```\nDone.", JSON, "Done.", BOTH[:1]),
    (f"<tool_call>[{PARIS}]</tool_call>", JSON, None, BOTH[:1]),
]  # fmt: skip

# What is no call is content, every character of it.
PLAIN: list[tuple[str, Format]] = [
    ("Hello there.\n", HERMES),
    ("", HERMES),
    ("a < b <tool> <tool_cal", HERMES),
    ("<tool_call>", HERMES),
    ("<tool_call>\nnothing</tool_call>", HERMES),
    ('<tool_call>{"name": 5}</tool_call>', HERMES),
    ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', HERMES),
    ('<tool_call>{"name": "add", "argu', HERMES),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', HERMES),
    ('<tool_call>{"arguments": {}}</tool_call>', HERMES),
    ("<tool_call>{{}}", HERMES),
    ('{"name": "stranger", "parameters": {}}', LLAMA3),
    ('{"answer": 42}', LLAMA3),
    ('So: {"name": "add", "parameters": {}}', LLAMA3),
    ("[1] is a reference", JSON),
    ('```json\n{"answer": 42}\n```\n', JSON),
    ("```python\nprint()\n```", JSON),
    ("[TOOL_CALLS] and so on.", MISTRAL),
    ("[TOOL_CALLS]", MISTRAL),
    ('{"name": "Bob", "age": 7}', JSON),
]


@pytest.mark.parametrize(("text", "format", "content", "found"), WRITTEN)
def test_calls_are_found(text: str, format: Format, content: str | None, found: Sequence[tuple[str, str]]) -> None:
    parsed = read(text, format)
    assert calls(parsed) == list(found)
    assert parsed.content == content
    assert parsed.ends_with_calls


@pytest.mark.parametrize(("text", "format"), PLAIN)
def test_what_is_no_call_is_content(text: str, format: Format) -> None:
    parsed = read(text, format)
    assert (parsed.content or "", parsed.calls) == (text, [])


@pytest.mark.parametrize("text", [*(one[0] for one in WRITTEN), *(one[0] for one in PLAIN)])
def test_without_a_format_everything_is_content(text: str) -> None:
    assert (read(text, None).content or "") == text


def test_arguments_come_as_they_are_written() -> None:
    told = events(['<tool_call>{"name": "add", ', '"arguments": {"a": ', "12", "34}", "}</tool_call>"], HERMES)
    assert told == [
        CallStart(0, "c0", "add"),
        CallArguments(0, '{"a": '),
        CallArguments(0, "12"),
        CallArguments(0, "34}"),
        CallEnd(0),
    ]


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    told = events(["Let ", "me <", "b> see <tool", "_box> now"], HERMES)
    assert told == [ContentDelta("Let"), ContentDelta(" me"), ContentDelta(" <b> see"), ContentDelta(" <tool_box> now")]


def test_a_json_answer_is_not_held_back() -> None:
    told = events(['{"answer":', " 42", "}"], JSON)
    assert told == [ContentDelta('{"answer":'), ContentDelta(" 42"), ContentDelta("}")]


def test_a_call_that_is_cut_off_is_no_complete_one() -> None:
    parsed = read('<tool_call>{"name": "add", "arguments": {"a": 1', HERMES)
    assert calls(parsed) == [("add", '{"a": 1')]
    assert not parsed.ends_with_calls


@pytest.mark.parametrize("cut", ["", "\n", "\n</", "</tool_call"])
def test_a_call_whose_end_is_cut_off_is_complete(cut: str) -> None:
    parsed = read(f"<tool_call>{PARIS}{cut}", HERMES)
    assert (calls(parsed), parsed.content, parsed.ends_with_calls) == (BOTH[:1], None, True)


@pytest.mark.parametrize(
    ("text", "format", "arguments", "content"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": oh}}</tool_call> more', HERMES, '{"a": oh}}', "more"),
        ('{"name": "add", "parameters": {"a": oh}} more', LLAMA3, '{"a": oh}} more', None),
        ('[TOOL_CALLS]add{"a": oh}[TOOL_CALLS]now{}', MISTRAL, '{"a": oh}', None),
    ],
)
def test_arguments_that_go_wrong_are_told_as_they_are(
    text: str, format: Format, arguments: str, content: str | None
) -> None:
    parsed = read(text, format)
    assert (parsed.calls[0].arguments, parsed.content) == (arguments, content)


def test_control_characters_in_arguments_are_escaped() -> None:
    parsed = read('<tool_call>{"name": "add", "arguments": {"a":\n"x\ny\tz"}}</tool_call>', HERMES)
    assert json.loads(parsed.calls[0].arguments) == {"a": "x\ny\tz"}


REASONED = [
    ("<think>\nWell, 2.\n</think>\n\nTwo.", False, "Well, 2.", "Two."),
    ("Well, 2.\n</think>\n\nTwo.", True, "Well, 2.", "Two."),
    ("\nWell, 2.", True, "Well, 2.", None),
    ("<think>\n\n</think>\n\nTwo.", False, None, "Two."),
    ("Two. <think>no</think>", False, None, "Two. <think>no</think>"),
    ("<thin", False, None, "<thin"),
    (" <b>Two</b>", False, None, " <b>Two</b>"),
    ("", True, None, None),
]


@pytest.mark.parametrize(("text", "is_thinking", "reasoning", "content"), REASONED)
def test_reasoning_is_split_off(text: str, is_thinking: bool, reasoning: str | None, content: str | None) -> None:
    parsed = read(text, None, thinking=THINK, is_thinking=is_thinking)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_a_call_in_the_reasoning_is_none() -> None:
    text = f"<think>I could <tool_call>{ADD}</tool_call>.</think>\n<tool_call>{PARIS}</tool_call>"
    parsed = read(text, HERMES, thinking=THINK)
    assert (calls(parsed), parsed.reasoning) == (BOTH[:1], f"I could <tool_call>{ADD}</tool_call>.")


def test_a_bare_call_follows_the_reasoning() -> None:
    assert calls(read(f"<think>Hm.</think>\n{PARIS}", JSON, thinking=THINK)) == BOTH[:1]


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```", "\n", " ", "{", "}",
    "[", "]", ",", ";", '"', ":", '"name"', '"arguments"', '"parameters"', '"add"', "add", "now", "<think>", "</think>",
    "1", "-", "null", "x", "\\", "<", "é", PARIS, ADD, '{"name": "add", "arguments": {"a": "',
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in pieces."""
    whole = [*(one[0] for one in WRITTEN), *(one[0] for one in PLAIN), *(one[0] for one in REASONED)]
    text = draw(st.sampled_from(whole) | st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8 if len(text) > 8 else None)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.sampled_from([None, HERMES, LLAMA3, MISTRAL, JSON]), st.booleans(), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_cuts_do_not_matter_and_nothing_is_lost(
    pieces: list[str], format: Format | None, thinks: bool, is_thinking: bool
) -> None:
    text, thinking = "".join(pieces), THINK if thinks else None
    whole = events([text], format, thinking=thinking, is_thinking=is_thinking)
    cut = events(pieces, format, thinking=thinking, is_thinking=is_thinking)
    by_character = events(list(text), format, thinking=thinking, is_thinking=is_thinking)
    assert gather(cut) == gather(whole) == gather(by_character)
    parsed = gather(whole)
    if not parsed.calls and not thinks:
        assert (parsed.content or "") == text
    assert all(call.arguments.startswith("{") for call in parsed.calls)

"""Tools as clients declare them."""

from typing import Any

import pytest

from saguaro.errors import ConfigError
from saguaro.serve.tools.declared import MAX_TOOLS, declare
from saguaro.serve.tools.messages import name_results, read_calls, shorten_ids


def tool(name: Any = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([tool("a b")], None, "tools[0].function.name is 'a b'; it must be 1 to 64 letters"),
        ([tool("x" * 65)], None, "tools[0].function.name is"),
        ([tool(""), tool()], None, "tools[0].function.name is ''"),
        ([tool(), tool("sub", parameters=[])], None, "tools[1].function.parameters is []; it must be a JSON schema"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters is {'type': 'array'}"),
        ([tool(description=5)], None, "tools[0].function.description is 5"),
        ([tool(strict="yes")], None, "tools[0].function.strict is 'yes'"),
        ([{"type": "custom", "function": {"name": "x"}}], None, "tools[0].type is 'custom'; only functions"),
        ([5], None, "tools[0] is 5"),
        ([tool(), tool()], None, "tools names 'add' twice"),
        ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], None, "tools is a list of 129; at most 128"),
        ([tool(parameters={"description": "x" * 2**18})], None, "at most 262144 are shown"),
        ([tool()], named("sub"), "tool_choice is 'sub', which is no declared tool; there are: add"),
        ([tool()], "any", "tool_choice is 'any'; it must be auto, none, required"),
        ([tool()], {"type": "function"}, "tool_choice is {'type': 'function'}"),
        ([], "required", "tool_choice is 'required', and tools is empty"),
        (None, "auto", "tool_choice is 'auto', and tools is empty"),
        (None, named("add"), "tool_choice is {'type'"),
    ],
)
def test_what_cannot_be_declared_is_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        declare(tools, choice)
    assert message in str(e.value)


def test_choices() -> None:
    tools = [tool(), tool("sub")]
    assert declare(tools, "none") is None
    assert declare([], "none") is None
    assert declare(None) is None
    for choice, mode, names in [(None, "auto", 2), ("required", "required", 2), (named("sub"), "named", 1)]:
        declared = declare(tools, choice)
        assert declared is not None
        assert (declared.mode, len(declared.callable), declared.is_parallel) == (mode, names, True)
    one = declare(tools, "auto", False)
    assert one is not None
    assert not one.is_parallel


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (5, "tool_calls[0] is 5"),
        ({"id": "c", "type": "custom", "function": {}}, "tool_calls[0] is"),
        ({"type": "function", "function": {"name": "f", "arguments": "{}"}}, "tool_calls[0].id is None"),
        ({"id": "c", "function": {"name": "", "arguments": "{}"}}, "tool_calls[0].function.name is ''"),
        ({"id": "c", "function": {"name": "f", "arguments": 5}}, "tool_calls[0].function.arguments is 5"),
    ],
)
def test_calls_that_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        read_calls([call])
    assert message in str(e.value)


def test_arguments_that_are_no_object_stay_text() -> None:
    for text in ("[1]", "{oh", "5", "[" * 100_000):
        (call,) = read_calls([{"id": "c", "function": {"name": "f", "arguments": text}}])
        assert call["function"]["arguments"] == text


def test_results_are_named_and_ids_shortened() -> None:
    calls = read_calls([{"id": "call_1", "function": {"name": "f", "arguments": "{}"}}])
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
        {"role": "tool", "content": "6", "tool_call_id": "call_2"},
    ]
    named_turns = name_results(turns)
    assert [turn.get("name") for turn in named_turns] == [None, "f", None]
    short = shorten_ids(turns)
    assert short[0]["tool_calls"][0]["id"] == short[1]["tool_call_id"] != short[2]["tool_call_id"]
    assert len(short[1]["tool_call_id"]) == 9
    assert shorten_ids(short) == short

"""Turns with tool calls: from the client's format to that of chat templates, or to plain text for templates
without tools."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from saguaro.errors import ConfigError
from saguaro.serve.tools.declared import Declared
from saguaro.serve.tools.formats import Format

Turn = dict[str, Any]
MAX_CALLS = 256  # per turn


def read_calls(given: Sequence[Any]) -> list[Turn]:
    """The calls of an assistant turn, with arguments as mappings, as templates expect.

    >>> read_calls([{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}])
    [{'id': 'c1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    if len(given) > MAX_CALLS:
        raise ConfigError(f"tool_calls is a list of {len(given)}; at most {MAX_CALLS} can be in a message")
    return [_call(f"tool_calls[{at}]", each) for at, each in enumerate(given)]


def _call(place: str, given: Any) -> Turn:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        raise ConfigError(f'{place} is {given!r:.80}; it must be {{"id", "type": "function", "function"}}')
    name, arguments, id = function.get("name"), function.get("arguments", "{}"), given.get("id")
    for part, value in (("id", id), ("function.name", name)):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{place}.{part} is {value!r:.80}; it must be text")
    if not isinstance(arguments, str | Mapping):
        raise ConfigError(f"{place}.function.arguments is {arguments!r:.80}; it must be JSON text")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(given: str | Mapping[str, Any]) -> Any:
    """Parse arguments into a mapping; other text is kept as it is."""
    if not isinstance(given, str):
        return dict(given)
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def name_results(turns: Sequence[Turn]) -> list[Turn]:
    """Add the function's name to every result."""
    names: dict[str, str] = {}
    named = []
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        known = turn["role"] == "tool" and "name" not in turn and names.get(turn.get("tool_call_id", ""))
        named.append({**turn, "name": known} if known else turn)
    return named


def one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Split turns of several calls into turns of one call and its result, for templates without parallel calls."""
    changed: list[Turn] = []
    moved: set[int] = set()  # indices of results that were moved behind their calls
    for at, turn in enumerate(turns):
        calls = turn.get("tool_calls", ())
        if at in moved:
            continue
        if len(calls) < 2:
            changed.append(turn)
            continue
        results = list(takewhile(lambda pair: pair[1]["role"] == "tool", enumerate(turns[at + 1 :], at + 1)))
        for place, call in enumerate(calls):
            changed.append({**turn, "content": "" if place else turn["content"], "tool_calls": [call]})
            found = {index: turn for index, turn in results if turn.get("tool_call_id") == call["id"]}
            changed += found.values()
            moved |= set(found)
    return changed


def shorten_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Replace call ids by nine letters and digits, which Mistral's templates require."""

    def short(id: str) -> str:
        return id if re.fullmatch(r"[a-zA-Z0-9]{9}", id) else hashlib.sha256(id.encode()).hexdigest()[:9]

    changed = []
    for turn in turns:
        new = dict(turn)
        if "tool_calls" in turn:
            new["tool_calls"] = [{**call, "id": short(call["id"])} for call in turn["tool_calls"]]
        if "tool_call_id" in turn:
            new["tool_call_id"] = short(turn["tool_call_id"])
        changed.append(new)
    return changed


def in_words(turns: Sequence[Turn], format: Format, declared: Declared | None) -> list[Turn]:
    """Write a conversation for a template without tools: tools are listed in the system text, calls become
    assistant text, results become user text."""
    spoken: list[Turn] = []
    is_result = False  # of the last turn: user text after results is merged into it, because turns alternate
    for turn in turns:
        if turn["role"] == "tool":
            text = f"Result of {turn.get('name', 'the call')}:\n{turn['content']}"
        elif turn.get("tool_calls"):
            written = write_calls(turn["tool_calls"], format)
            text = f"{turn['content']}\n{written}" if turn["content"] else written
        else:
            text = turn["content"]
        role = "user" if turn["role"] == "tool" else turn["role"]
        if role == "user" and is_result:
            spoken[-1]["content"] += f"\n\n{text}"
        else:
            kept = {key: value for key, value in turn.items() if key in ("name", "reasoning_content")}
            spoken.append({"role": role, "content": text, **(kept if turn["role"] == role else {})})
            is_result = turn["role"] == "tool"
    return spoken if declared is None else _told(spoken, list_tools(declared, format))


def _told(turns: list[Turn], text: str) -> list[Turn]:
    """Add text at the beginning of the system turn."""
    if turns and turns[0]["role"] in ("system", "developer"):
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def list_tools(declared: Declared, format: Format) -> str:
    """The description of tools for templates without tools."""
    listed = "\n".join(json.dumps(tool.plain()["function"], ensure_ascii=False) for tool in declared.tools)
    example = {"function": {"name": "function_name", "arguments": {"parameter": "value"}}}
    lines = [
        f"You can call functions. They are, one per line, with JSON schemas of their parameters:\n{listed}",
        f"To call a function, answer with nothing but its name and arguments:\n{write_calls([example], format)}",
    ]
    if declared.is_parallel and declared.mode != "named":
        lines.append("To call several, write one after the other.")
    last = {
        "auto": "If no function is needed, answer in plain text.",
        "required": "Answer with a function call.",
        "named": f"Answer with a call of {declared.named}.",
    }
    lines.append(last[declared.mode])
    return "\n\n".join(lines)


def write_calls(calls: Sequence[Mapping[str, Any]], format: Format) -> str:
    """Write calls in this format.

    >>> from saguaro.serve.tools.formats import JSON
    >>> print(write_calls([{"function": {"name": "add", "arguments": {"a": 1}}}] * 2, JSON))
    {"name": "add", "arguments": {"a": 1}}
    {"name": "add", "arguments": {"a": 1}}
    """
    objects = [
        json.dumps(
            {"name": call["function"]["name"], format.arguments: call["function"]["arguments"]}, ensure_ascii=False
        )
        for call in calls
    ]
    if format.is_bare:
        return "\n".join(objects)
    opener = format.openers[0]
    if not opener.end:
        return f"{opener.begin}[{', '.join(objects)}]"
    return "\n".join(f"{opener.begin}\n{each}\n{opener.end}" for each in objects)

r"""Grammars, in llguidance's Lark, of outputs that must be calls, and of outputs that begin with reasoning.

start: thought? calls                      reasoning is free; what must have a form comes after it
calls: <[7]> "\n" call "\n" <[8]>          a marker that is one token is written as that token
call: "{\"name\": \"add\", \"arguments\": " a0 "}" | ...
a0: %json {...}                            the tool's own schema
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saguaro.config import Structured
from saguaro.errors import ConfigError
from saguaro.model.compiler import WHITESPACE
from saguaro.serve.tools.declared import Declared, Tool
from saguaro.serve.tools.formats import Format, Thinking

# Like json.dumps, in whose format models learn calls. Free whitespace would let small models write it endlessly.
_WRITTEN: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Limit for outputs that must be calls: otherwise a model may write calls endlessly.
MAX_CALLS = 16
_MORE = f" ({{}}){{{{0,{MAX_CALLS - 1}}}}}"


@dataclass(frozen=True)
class Marks:
    """How a tokenizer and a template write the markers of a format."""

    ids: Mapping[str, int]  # of texts that are one added token
    template: str = ""

    def write(self, text: str) -> str:
        """A marker as part of a grammar.

        >>> Marks({"<tool_call>": 7}).write("<tool_call>"), Marks({}).write("<tool_call>")
        ('<[7]>', '"<tool_call>"')
        """
        return f"<[{self.ids[text]}]>" if text in self.ids else _quote(text)


@dataclass(frozen=True)
class Thought:
    """The reasoning that may begin an output."""

    thinking: Thinking
    is_open: bool  # the prompt has already opened it


def calls_grammar(format: Format, declared: Declared, marks: Marks, thought: Thought | None) -> Structured:
    """A grammar for outputs that consist of calls only, each of a declared tool and matching its schema."""
    tools = declared.callable
    is_many = declared.mode == "required" and declared.is_parallel and format.is_parallel
    rules = [*_calls(format, marks, is_many), *_call_rules(format, tools, [*map(_schema, tools)], marks)]
    return _with_thought("calls", rules, marks, thought)


def strict_grammar(format: Format, declared: Declared, marks: Marks, thought: Thought | None) -> Structured | None:
    """A grammar for any text in which calls of strict tools match their schemas. None if no tool is strict, or if the
    format does not support it because its opener is not one token."""
    tools, opener = declared.callable, format.openers[0].begin
    if not any(tool.is_strict for tool in tools) or not (format.is_bare or opener in marks.ids):
        return None
    schemas = [_schema(tool) if tool.is_strict else {"type": "object"} for tool in tools]
    is_many = declared.is_parallel and not _is_opened_each(format, marks)
    rules = [*_calls(format, marks, is_many), *_call_rules(format, tools, schemas, marks)]
    no_call = rf"(.|\n)*{_escape(opener)}(.|\n)*"
    if format.is_bare:
        no_call += r"|\s*[{\[`](.|\n)*"
        start = "answer: TEXT | calls"
    else:
        start = f"answer: TEXT? (calls TEXT?){'*' if declared.is_parallel else '?'}"
    return _with_thought("answer", [start, rf"TEXT: /(.|\n)*/ & ~/{no_call}/", *rules], marks, thought)


def after_thought(structured: Structured, marks: Marks, thought: Thought) -> Structured:
    """The same constraint, after the reasoning."""
    match structured.kind:
        case "json":
            schema = json.loads(structured.text)
            schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
            body = f"%json {json.dumps(schema)}"
        case "choice":
            body = " | ".join(_quote(way) for way in json.loads(structured.text))
        case "regex":
            body = f"/{_escape_slashes(structured.text)}/"
        case _:
            if thought.is_open:
                message = "structured.grammar is a grammar of the whole output, and this prompt begins reasoning"
                raise ConfigError(f"{message}; use json, regex or choice, or switch the reasoning off")
            return structured
    return _with_thought("form", [f"form: {body}"], marks, thought)


def _with_thought(body: str, rules: Sequence[str], marks: Marks, thought: Thought | None) -> Structured:
    if thought is None:
        return Structured(grammar="\n".join([f"start: {body}", *rules]))
    begin, end = thought.thinking.begin, thought.thinking.end
    if end in marks.ids:
        inner = [f"thought: THOUGHT? {marks.write(end)} GAP?", r"THOUGHT: /(.|\n)+/"]
    else:
        inner = ["thought: until GAP?", rf"until[suffix={_quote(end)}]: /(.|\n)*/"]
    start = f"start: thought {body}" if thought.is_open else f"start: ({marks.write(begin)} thought)? {body}"
    return Structured(grammar="\n".join([start, *inner, r"GAP: /[ \n]{1,4}/", *rules]))


def _calls(format: Format, marks: Marks, is_many: bool) -> list[str]:
    """The rule `calls` and the rules it uses."""
    opener = format.openers[0]
    begin = marks.write(opener.begin)
    if format.is_bare:
        return [f"calls: call{_MORE.format('NEXT call') if is_many else ''}", r'NEXT: "\n"']
    if opener.end:
        one = rf'{begin} "\n" call "\n" {marks.write(opener.end)}'
        return [f"calls: one{_MORE.format('NEXT one') if is_many else ''}", f"one: {one}", r'NEXT: "\n"']
    if _is_named(format, marks):
        return [f"calls: one{_MORE.format('one') if is_many else ''}", f"one: {begin} call"]
    space = '" ["' if "[TOOL_CALLS] [" in marks.template else '"["'
    return [f'calls: {begin} {space} call{_MORE.format("NEXT call") if is_many else ""} "]"', 'NEXT: ", "']


def _is_opened_each(format: Format, marks: Marks) -> bool:
    """Whether every call has its own opener, instead of one for all."""
    return bool(format.openers[0].end and not format.is_bare) or _is_named(format, marks)


def _is_named(format: Format, marks: Marks) -> bool:
    return format.is_named and "[ARGS]" in marks.template


def _call_rules(format: Format, tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]], marks: Marks) -> list[str]:
    rules = [f"call: {' | '.join(f'c{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        if _is_named(format, marks):
            rules.append(f"c{at}: {_quote(tool.name)} {marks.write('[ARGS]')} a{at}")
        else:
            head = f'{{"name": {json.dumps(tool.name)}, "{format.arguments}": '
            rules.append(f'c{at}: {_quote(head)} a{at} "}}"')
    return rules + [
        f"a{at}: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}" for at, schema in enumerate(schemas)
    ]


def _schema(tool: Tool) -> dict[str, Any]:
    """A tool's schema. Additional properties are forbidden unless the schema allows them."""
    schema = {"type": "object", **(tool.parameters or {"properties": {}})}
    is_open = any(key in schema for key in ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf"))
    return schema if is_open or "properties" not in schema else {**schema, "additionalProperties": False}


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    return _escape_slashes(re.escape(text))


def _escape_slashes(pattern: str) -> str:
    r"""Escape a regular expression for use between slashes.

    >>> print(_escape_slashes("a/b"), _escape_slashes(r"a\/b"))
    a\/b a\/b
    """
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)

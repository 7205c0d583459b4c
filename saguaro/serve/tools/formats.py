"""Formats of tool calls and reasoning: their markers, and how to detect the format of a chat template.

The names are vLLM's if the format is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from saguaro.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Opener:
    """The markers around calls. Without an end marker, calls continue until other text follows."""

    begin: str
    end: str = ""
    is_first: bool = False  # only at the beginning of the answer


@dataclass(frozen=True)
class Format:
    """The format of a model's calls: JSON objects (or a list of them) after an opener."""

    name: str
    openers: tuple[Opener, ...]
    is_bare: bool = False  # calls may begin the answer without an opener
    is_named: bool = False  # name and arguments may replace the object: f{...}, f[ARGS]{...}
    arguments: str = "arguments"  # their name in the object
    is_parallel: bool = True  # whether models of this format write several calls

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that may be special tokens and must be visible in the text."""
        named = ("[ARGS]", "[CALL_ID]") if self.is_named else ()
        return (*(text for one in self.openers for text in (one.begin, one.end) if text), *named)


@dataclass(frozen=True)
class Thinking:
    """The markers around reasoning, at the beginning of an output."""

    name: str
    begin: str
    end: str


_TOOL_CALL = Opener("<tool_call>", "</tool_call>")

HERMES = Format("hermes", (_TOOL_CALL,))
LLAMA3 = Format("llama3_json", (Opener("<|python_tag|>"),), is_bare=True, arguments="parameters", is_parallel=False)
MISTRAL = Format("mistral", (Opener("[TOOL_CALLS]"),), is_named=True)
JSON = Format("json", (_TOOL_CALL, Opener("```json", "```", True), Opener("```", "```", True)), is_bare=True)

FORMATS: Mapping[str, Format] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen3": HERMES,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "mistral": MISTRAL,
    "json": JSON,
}

_THINK = Thinking("deepseek_r1", "<think>", "</think>")
_MISTRAL_THINK = Thinking("mistral", "[THINK]", "[/THINK]")

THINKING: Mapping[str, Thinking] = {"deepseek_r1": _THINK, "qwen3": _THINK, "mistral": _MISTRAL_THINK}


def find_format(name: str, template: str) -> Format:
    """The format of this name; auto: detected from the chat template, else JSON.

    >>> find_format("auto", "{{ '<tool_call>' }}").name, find_format("auto", "").name
    ('hermes', 'json')
    """
    if name != "auto":
        return _named("tool_call_parser", name, FORMATS)
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|python_tag|>" in template or ('"parameters": ' in template and "tools" in template):
        return LLAMA3
    return JSON


def find_thinking(name: str, template: str) -> Thinking | None:
    """The reasoning format of this name; none: disabled; auto: detected from the chat template.

    >>> find_thinking("auto", "{{ '<think>' }}").name, find_thinking("auto", "") is None
    ('deepseek_r1', True)
    """
    if name == "none":
        return None
    if name != "auto":
        return _named("reasoning_parser", name, {"none": None, **THINKING})
    return next((one for one in (_THINK, _MISTRAL_THINK) if one.begin in template or one.end in template), None)


def _named(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(f"{what} is {name!r}; it must be auto or one of {', '.join(known)}")
    return known[name]

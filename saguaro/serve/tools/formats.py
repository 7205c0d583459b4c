"""How models write tool calls and reasoning: the markers of each format, and which format a chat template has.

The names are vLLM's where the format is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from saguaro.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Opener:
    """What calls stand between; without an end, they go on as long as they are calls."""

    begin: str
    end: str = ""
    is_first: bool = False  # only where the answer begins


@dataclass(frozen=True)
class Format:
    """How a model writes its calls: JSON objects (or a list of them) after an opener."""

    name: str
    openers: tuple[Opener, ...]
    is_bare: bool = False  # calls may begin the answer without any opener
    is_named: bool = False  # a name and its arguments may stand in place of an object: f{...}, f[ARGS]{...}
    arguments: str = "arguments"  # what they are called in the object
    is_parallel: bool = True  # whether models were taught to write several calls

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer and must be seen all the same."""
        named = ("[ARGS]", "[CALL_ID]") if self.is_named else ()
        return (*(text for one in self.openers for text in (one.begin, one.end) if text), *named)


@dataclass(frozen=True)
class Thinking:
    """What reasoning stands between, at the beginning of an output."""

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
    """The format of this name; auto: the one that a chat template writes, JSON where none is known.

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
    """The reasoning of this name; none: not looked for; auto: as the chat template has it.

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

"""The tools that a request declares, and which of them may or must be called."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from saguaro.errors import ConfigError

MAX_TOOLS = 128
MAX_DECLARED = 2**18  # characters of all declarations, as JSON
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class Tool:
    """A function that the client can call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = field(default=None, hash=False)  # a JSON schema of an object
    is_strict: bool = False  # calls must match the schema even if the model chooses to call

    def plain(self) -> dict[str, Any]:
        """The tool in the format of chat templates.

        >>> Tool("now").plain()["function"]
        {'name': 'now', 'description': '', 'parameters': {'type': 'object', 'properties': {}}}
        """
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Declared:
    """The tools of a request. If one is named, only it can be called."""

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    named: str | None = None
    is_parallel: bool = True  # whether several calls are allowed

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))


def declare(tools: Sequence[Any] | None, choice: Any = None, is_parallel: bool | None = None) -> Declared | None:
    """Parse the tools of a request in OpenAI's format; None: no tool may be called.

    >>> declare([{"type": "function", "function": {"name": "now"}}], "required").mode
    'required'
    """
    if not tools:
        if choice not in (None, "none"):
            raise ConfigError(
                f"tool_choice is {_short(choice)}, and tools is empty; declare the tools, or leave it out"
            )
        return None
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"tools is a list of {len(tools)}; at most {MAX_TOOLS} can be declared: leave some out")
    found = tuple(_tool(f"tools[{at}]", each) for at, each in enumerate(tools))
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"tools names {name!r} twice; give each function a name of its own")
    _check_size(tools)
    mode, named = _choice(choice, names)
    return None if mode is None else Declared(found, mode, named, is_parallel is not False)


def _tool(place: str, given: Any) -> Tool:
    if not isinstance(given, Mapping) or not isinstance(given.get("function"), Mapping):
        raise ConfigError(f'{place} is {_short(given)}; it must be {{"type": "function", "function": {{"name": ...}}}}')
    if given.get("type", "function") != "function":
        raise ConfigError(f"{place}.type is {_short(given['type'])}; only functions can be called")
    function, place = given["function"], f"{place}.function"
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        limit = "1 to 64 letters, digits, underscores and dashes"
        raise ConfigError(f"{place}.name is {_short(name)}; it must be {limit}")
    if description is not None and not isinstance(description, str):
        raise ConfigError(f"{place}.description is {_short(description)}; it must be text")
    if strict is not None and not isinstance(strict, bool):
        raise ConfigError(f"{place}.strict is {_short(strict)}; it must be true or false")
    is_object = isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
    if parameters is not None and not is_object:
        raise ConfigError(f"{place}.parameters is {_short(parameters)}; it must be a JSON schema of type object")
    return Tool(name, description, parameters or None, bool(strict))


def _check_size(tools: Sequence[Any]) -> None:
    try:
        n = len(json.dumps(tools, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"tools cannot be written as JSON ({e}); simplify the schemas") from e
    if n > MAX_DECLARED:
        raise ConfigError(f"tools has {n} characters; at most {MAX_DECLARED} are shown to a model: shorten it")


def _choice(choice: Any, names: Sequence[str]) -> tuple[Mode | None, str | None]:
    if choice in (None, "auto"):
        return "auto", None
    if choice == "none":
        return None, None
    if choice == "required":
        return "required", None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        known = 'auto, none, required, or {"type": "function", "function": {"name": ...}}'
        raise ConfigError(f"tool_choice is {_short(choice)}; it must be {known}")
    if name not in names:
        raise ConfigError(f"tool_choice is {_short(name)}, which is no declared tool; there are: {_listed(names)}")
    return "named", name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

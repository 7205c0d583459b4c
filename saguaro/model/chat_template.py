"""Chat templates: render a conversation to text, in jinja2's sandbox.

A template comes with the model, so it is untrusted code. It sees messages, tools and variables, and returns text; it
can neither import nor call anything that is not listed here. The environment is the one that templates on the Hub
expect: blocks are trimmed, `tojson` does not escape HTML, `raise_exception` and `strftime_now` exist.

A template may also never terminate. A server runs it in another process (`run`), which receives plain values only.
"""

import json
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saguaro.errors import ConfigError, RequestError, ServiceError, TimedOut

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Run = Callable[[str, dict[str, Any]], str]  # a template and its variables to text

ROLES = ("system", "developer", "user", "assistant", "tool")


def run_here(source: str, given: dict[str, Any]) -> str:
    """Render a template in this process."""
    return _compiled(source).render(given)


def runner(core_seconds: float | None) -> Run:
    """For a separate process: a function that renders templates and raises their errors as RequestError.

    It raises TimedOut if a rendering takes more than core_seconds. Compiling is not counted, as it happens once.
    """

    def run(source: str, given: dict[str, Any]) -> str:
        try:
            template = _compiled(source)
            return template.render(given) if core_seconds is None else _render_within(core_seconds, template, given)
        except (MemoryError, TimedOut):
            raise
        except Exception as e:
            raise RequestError(str(e)[:500]) from e

    return run


@dataclass(frozen=True)
class ChatTemplate:
    """A template and its constant variables (bos_token, eos_token, ...)."""

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = "the model"  # owner of the template, for messages
    run: Run = field(default=run_here, compare=False)

    @property
    def names(self) -> frozenset[str]:
        """The variables that the template reads.

        >>> sorted(ChatTemplate("{% for m in messages %}{{ eos_token }}{% endfor %}{{ tools }}").names)
        ['eos_token', 'messages', 'tools']
        """
        try:
            return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))
        except jinja2.TemplateError as e:
            raise RequestError(f"the chat template of {self.name} cannot be read: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text, ready for the assistant's next turn, or ending inside its last turn to continue it.

        >>> chat = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}")
        >>> chat.render([{"role": "user", "content": "Hi"}])
        '[user] Hi '
        >>> chat.render([{"role": "assistant", "content": "One, two"}], continue_final_message=True)
        '[assistant] One, two'
        """
        end = ""
        if continue_final_message:
            end = f"\U000f0002{secrets.token_hex(8)}\U000f0002"
            messages = [*messages[:-1], _marked(messages[-1], end)]
        given = {
            **self.variables,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self.run(self.source, given)
        except ServiceError:
            raise
        except Exception as e:  # a template is code and may raise anything
            raise RequestError(f"the chat template of {self.name} refuses this conversation: {str(e)[:500]}") from e
        if not end:
            return text
        before, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(f"the chat template of {self.name} leaves the last message out: it cannot be continued")
        return before


def read_template(given: str) -> str:
    """A template given inline or as a file name; ConfigError if it is not valid.

    >>> read_template("{{ messages }}")
    '{{ messages }}'
    """
    is_inline = "{{" in given or "{%" in given
    try:
        source = given if is_inline else Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"chat_template is {given!r:.200}, which is no jinja2 text and no file: {e}") from e
    try:
        _environment().parse(source)
    except jinja2.TemplateError as e:
        raise ConfigError(f"chat_template is not a jinja2 template: {e}; correct it") from e
    return source


def check_messages(messages: Sequence[Message]) -> None:
    """Check a conversation: a non-empty list of {"role": ..., "content": ...}, with roles from ROLES."""
    if not messages:
        raise ConfigError("messages is empty; give at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ConfigError(f"a message is {message!r:.200}; it must be a mapping with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise ConfigError(f"role is {message['role']!r:.100}; it must be one of {', '.join(ROLES)}")


def _marked(message: Message, mark: str) -> dict[str, Any]:
    """A message whose content ends with a mark."""
    if not isinstance(message["content"], str):
        raise ConfigError("the last message has no text; it cannot be continued")
    return {**message, "content": message["content"] + mark}


class _Interrupt(BaseException):
    """A rendering's time is over. Not an Exception, so jinja2 does not catch it."""


def _render_within(core_seconds: float, template: jinja2.Template, given: dict[str, Any]) -> str:
    """Render in the main thread. Unlike a process's limit, this one needs no new process."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise _Interrupt

    signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, core_seconds, core_seconds)  # again, if a finalizer swallows the first
        try:
            return template.render(given)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Interrupt:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # it may have come before the other one
        raise TimedOut(f"more than {core_seconds:g} seconds of processor time") from None


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks the assistant's text for training. Here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _time_now}
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _time_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

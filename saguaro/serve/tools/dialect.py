"""The served model's dialect: its chat template, its format of calls and reasoning, and its special tokens.

Turns a conversation with tools into a prompt, an output constraint and a reader of the output.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from saguaro.config import Structured
from saguaro.errors import ConfigError
from saguaro.model.chat_template import ChatTemplate, Run, check_messages
from saguaro.model.tokenizer import Tokenizer
from saguaro.serve.tools.declared import Declared
from saguaro.serve.tools.formats import MISTRAL, find_format, find_thinking
from saguaro.serve.tools.grammar import Marks, Thought, after_thought, calls_grammar, strict_grammar
from saguaro.serve.tools.messages import Turn, in_words, name_results, one_by_one, shorten_ids
from saguaro.serve.tools.parsers import Parsers
from saguaro.serve.tools.reader import OutputReader, new_call_id

MAX_VARIABLES, MAX_VARIABLE_CHARS = 32, 2**14
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_VARIABLE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Conversation:
    """A conversation to answer."""

    turns: Sequence[Turn]
    declared: Declared | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    options: Mapping[str, Any] = field(default_factory=dict)  # of ChatTemplate.render
    parse_special: bool = False  # whether special tokens written in turns are parsed as tokens
    add_special: bool = False  # whether to add the special tokens that the model expects around a text


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation."""

    tokens: list[int]
    structured: Structured | None  # the constraint of the output
    shows_special: bool  # whether the output's text must include special tokens, because some markers are
    new_reader: Callable[[], OutputReader]


class Dialect:
    """The dialect of one model."""

    def __init__(self, tokenizer: Tokenizer, parsers: Parsers, template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self.template = template or tokenizer.chat_template
        source = self.template.source
        self.format = find_format(parsers.tool_call_parser, source)
        self.thinking = find_thinking(parsers.reasoning_parser, source)
        self._allows_auto = parsers.enable_auto_tool_choice
        self.knows_tools = self.format.name != "json" and "tools" in self.template.names
        markers = [*self.format.markers, *((self.thinking.begin, self.thinking.end) if self.thinking else ())]
        added = tokenizer.added_tokens
        self.marks = Marks({text: added[text].id for text in markers if text in added}, source)
        self._special = {text for text in self.marks.ids if added[text].is_special}

    def prompt(
        self,
        text: str,
        declared: Declared | None,
        structured: Structured | None = None,
        add_special: bool = False,
    ) -> Prompt:
        """Build a prompt from a rendered conversation; structured: the requested constraint."""
        thought = self._thought(text)
        names = [tool.name for tool in declared.callable] if declared else []
        reader = partial(
            OutputReader,
            self.format if declared else None,
            self.thinking,
            is_thinking=bool(thought and thought.is_open),
            names=frozenset(names),
            max_calls=None if declared is None or declared.is_parallel else 1,
            new_id=new_short_id if self.format is MISTRAL else new_call_id,
        )
        return Prompt(
            tokens=self._tokenizer.encode_rendered(text, add_special),
            structured=self._form(declared, structured, thought),
            shows_special=self._shows(declared),
            new_reader=reader,
        )

    def render(self, conversation: Conversation, run: Run | None = None) -> str:
        """Render a conversation. The text contains the marks of Tokenizer.hide; `run` replaces the template's."""
        check_messages(conversation.turns)
        if conversation.declared is not None and conversation.declared.mode == "auto" and not self._allows_auto:
            raise ConfigError("tool_choice is 'auto', which this server does not allow; use none, required or a name")
        turns, tools = name_results(conversation.turns), None
        if not self.knows_tools:
            turns = in_words(turns, self.format, conversation.declared)
        elif conversation.declared is not None:
            tools = [tool.plain() for tool in conversation.declared.tools]
        if self.knows_tools and self.format is MISTRAL:
            turns = shorten_ids(turns)
        if self.knows_tools and not self.format.is_parallel:
            turns = one_by_one(turns)
        given = {"tools": tools, **conversation.variables}
        if not conversation.parse_special:
            turns, given = self._tokenizer.hide(turns), self._tokenizer.hide(given)
        template = self.template if run is None else replace(self.template, run=run)
        return template.render(turns, **given, **conversation.options)

    def count_reasoning(self, tokens: Sequence[int], reasoning: str | None) -> int:
        """How many of an output's tokens are reasoning, including its markers."""
        if self.thinking is None or reasoning is None:
            return 0
        end = self.marks.ids.get(self.thinking.end)
        if end is not None:
            return tokens.index(end) + 1 if end in tokens else len(tokens)
        low, high = 0, len(tokens)  # the text of the first `high` tokens has the marker, or there is none
        while low < high:
            middle = (low + high) // 2
            if self.thinking.end in self._tokenizer.decode(tokens[:middle], special=True):
                high = middle
            else:
                low = middle + 1
        return high

    def effort(self, effort: str | None) -> dict[str, Any]:
        """`reasoning_effort` as variables of the template. Raises if the template has none."""
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise ConfigError(f"reasoning_effort is {effort!r:.80}; it must be one of {', '.join(EFFORTS)}")
        names = self.template.names
        if "reasoning_effort" in names:
            return {"reasoning_effort": effort}
        if "enable_thinking" in names:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and self.thinking is None:
            return {}
        raise ConfigError(f"reasoning_effort is {effort!r}; the model's chat template does not have it: leave it out")

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Check `chat_template_kwargs`."""
        if len(given or {}) > MAX_VARIABLES:
            raise ConfigError(
                f"chat_template_kwargs has {len(given or {})} names; at most {MAX_VARIABLES} are passed on"
            )
        for name in given or {}:
            if name in RESERVED or name in self.template.variables or not _VARIABLE.fullmatch(name):
                raise ConfigError(f"chat_template_kwargs names {name!r:.80}, which a request cannot set; leave it out")
        if len(json.dumps(given)) > MAX_VARIABLE_CHARS:
            raise ConfigError(f"chat_template_kwargs has more than {MAX_VARIABLE_CHARS} characters; shorten it")
        return dict(given or {})

    def _thought(self, text: str) -> Thought | None:
        """The reasoning that may begin the answer to this prompt; None also if the prompt closed it."""
        if self.thinking is None or text.rstrip().endswith(self.thinking.end):
            return None
        return Thought(self.thinking, text.rstrip().endswith(self.thinking.begin))

    def _form(self, declared: Declared | None, wanted: Structured | None, thought: Thought | None) -> Structured | None:
        if declared is not None and declared.mode != "auto":
            return calls_grammar(self.format, declared, self.marks, thought)
        if wanted is not None:
            return after_thought(wanted, self.marks, thought) if thought else wanted
        return strict_grammar(self.format, declared, self.marks, thought) if declared else None

    def _shows(self, declared: Declared | None) -> bool:
        markers = self.format.markers if declared else ()
        thinking = (self.thinking.begin, self.thinking.end) if self.thinking else ()
        return not self._special.isdisjoint((*markers, *thinking))


def new_short_id() -> str:
    """An id in the format of Mistral's templates: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))

"""Request bodies. The decoding parameters are derived from the fields of SamplingParams.

Invariant: every parameter is applied or refused. An unsupported parameter is refused by name, unless its value has no
effect.
"""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from saguaro.config import SamplingParams, build
from saguaro.errors import ConfigError, short
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.neutral import IGNORED, NEUTRAL
from saguaro.serve.tools.declared import Declared, declare
from saguaro.serve.tools.messages import Turn, read_calls

# Fields of SamplingParams that have another format in requests, or combine several parameters.
WRITTEN_OTHERWISE = (
    *("max_tokens", "stop", "stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs", "n", "structured"),
)


def field_help(kind: type) -> dict[str, str]:
    """The docstrings below a class's fields."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for one, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
            found[one.target.id] = str(ast.literal_eval(after.value))
    return found


def _derived() -> dict[str, Any]:
    """Fields of SamplingParams as fields of a body. The defaults are those of SamplingParams."""
    hints, words = get_type_hints(SamplingParams), field_help(SamplingParams)
    return {
        name: (hint | None, Field(default=None, description=words[name]))
        for name, hint in hints.items()
        if name not in WRITTEN_OTHERWISE
    }


DERIVED = tuple(_derived())

MAX_BIASES = 1024  # checked for every token: more would delay all requests


def _fail_fast(schema: Any) -> None:
    """Let every list in a schema stop at its first invalid item: a million errors take as long as a million items."""
    parts = (
        schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list | tuple) else ()
    )
    for name, part in parts:
        if name != "metadata":
            _fail_fast(part)
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        message = f"logit_bias has {len(value)} tokens; at most {MAX_BIASES} are changed"
        raise APIError(400, message, param="logit_bias")
    return value


class Body(BaseModel):
    """A body: numbers are numbers and text is text. The first bad item of a list is the only one looked at."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def check_extra(self, known: Collection[str] = ()) -> None:
        """Refuse unsupported parameters with an effect, except for `known`."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or name in known:
                continue
            if name in NEUTRAL:
                if not any(type(value) is type(none) and value == none for none in NEUTRAL[name]):
                    raise APIError(
                        400, f"{name} is {short(value)}; Saguaro does not support it: leave it out", param=name
                    )
                continue
            near = difflib.get_close_matches(name[:100], type(self).model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise APIError(400, f"unknown parameter {short(name)}; {hint}", param=name)


class StreamOptions(Body):
    """What a stream tells."""

    include_usage: bool | None = None
    """Whether a last chunk tells how many tokens there were."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk tells how many tokens its choice has had so far."""


class JsonSchema(Body):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the output must look like, as the OpenAI API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """What the output must look like, as vLLM has it; one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Asking(Body):
    """What requests for text have in common."""

    model: str | None = None
    """A name of the served model; without it, the one there is."""
    stream: bool | None = None
    """Whether the text comes piece by piece, as server-sent events."""
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    """How many outputs for one prompt."""
    stop: str | list[str] | None = None
    """Strings that end the output; not part of it."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output, beside the model's own."""
    allowed_token_ids: list[int] | None = None
    """Generate nothing but these tokens."""
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = None
    """Add to the logits of these token ids."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    """structured_outputs.json by its former name."""
    guided_regex: str | None = None
    """structured_outputs.regex by its former name."""
    guided_choice: list[str] | None = None
    """structured_outputs.choice by its former name."""
    guided_grammar: str | None = None
    """structured_outputs.grammar by its former name."""
    return_speculation: bool | None = None
    """Whether every choice tells what was speculated, round by round."""
    return_token_ids: bool | None = None
    """Whether the token ids of prompt and output are told beside the text."""

    def sampling(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """The sampling parameters, with the model's defaults. Raises if they are invalid."""
        named = (*DERIVED, "stop_token_ids", "allowed_token_ids", "logit_bias", "n")
        given = {name: getattr(self, name) for name in named}
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        said = {name: value for name, value in (given | own).items() if name in own or value is not None}
        return build(SamplingParams, **{**defaults, **said})


if TYPE_CHECKING:

    class Sampling(Asking):
        """Asking, and the fields of SamplingParams that are written as they are."""

        prompt_logprobs: int | None
        truncate_prompt_tokens: int | None
        skip_special_tokens: bool | None

else:
    Sampling = create_model("Sampling", __base__=Asking, **_derived())


class TextPart(Body):
    """Text in a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    """What an assistant called."""
    tool_call_id: str | None = None
    """Of which call a tool's content is the result."""
    reasoning_content: str | None = None
    """What an assistant thought before."""
    reasoning: str | None = None
    """Another name of reasoning_content."""

    def plain(self) -> Turn:
        """The turn in the format of chat templates."""
        if self.content is None and not self.tool_calls:
            raise APIError(400, f"a message of {self.role!r:.100} has no text; give it content", param="messages")
        if self.role == "tool" and self.tool_call_id is None:
            raise APIError(400, "a message of 'tool' has no tool_call_id; give the id of the call", param="messages")
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        turn: Turn = {"role": "system" if self.role == "developer" else self.role, "content": text}
        others = {
            "name": self.name,
            "tool_calls": read_calls(self.tool_calls) if self.tool_calls and self.role == "assistant" else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return turn | {name: value for name, value in others.items() if value is not None}


class ChatRequest(Sampling):
    """A conversation to be answered."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    """Most tokens to generate; without it, what the context has room for."""
    logprobs: bool | None = None
    """Whether each token's log-probability is reported."""
    top_logprobs: int | None = None
    """So many alternatives are reported with it."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn; without it, it does."""
    continue_final_message: bool | None = None
    """Whether the last message goes on, instead of being answered."""
    add_special_tokens: bool | None = None
    """Whether the conversation gets the special tokens that the model puts around a text, beside the template's."""
    parse_special_tokens: bool | None = None
    """Whether special tokens that messages spell out, such as <|im_end|>, are tokens; otherwise they are text."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """auto, none, required (at least one call), or the function that must be called."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls; true without it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """How much to think, where the chat template has it."""
    include_reasoning: bool | None = None
    """Whether the reasoning is part of the response; true without it."""

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters. Raises if they are invalid."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {n for n in (self.max_tokens, self.max_completion_tokens) if n is not None}
        if len(limits) > 1:
            raise ConfigError("max_completion_tokens and max_tokens differ; give one of them")
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, max_tokens=limits.pop() if limits else None, logprobs=top)

    def options(self) -> dict[str, Any]:
        """How the rendered text ends (ChatTemplate.render)."""
        if self.continue_final_message and self.add_generation_prompt:
            raise APIError(
                400,
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
                param="continue_final_message",
            )
        is_open = self.add_generation_prompt is not False
        return {"add_generation_prompt": is_open, "continue_final_message": bool(self.continue_final_message)}

    def turns(self) -> list[Turn]:
        """The turns in the format of chat templates."""
        return [message.plain() for message in self.messages]

    def declared(self) -> Declared | None:
        """The tools that may be called."""
        forms = (self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        is_text = self.response_format is None or self.response_format.type == "text"
        is_formed = not is_text or any(form is not None for form in forms)
        if self.tools and is_formed and self.tool_choice != "none":
            message = "tools and response_format both say what the output is; give one of them, or tool_choice none"
            raise APIError(400, message, param="response_format")
        return declare(self.tools, self.tool_choice, self.parallel_tool_calls)


class CompletionRequest(Sampling):
    """Prompts to be continued."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text, token ids, or several of either."""
    max_tokens: int | None = 16
    """Most tokens to generate."""
    logprobs: int | None = None
    """Report each token's log-probability and so many alternatives."""
    echo: bool | None = None
    """Whether the output begins with the prompt; with max_tokens 0 it is the prompt alone."""
    add_special_tokens: bool | None = None
    """Whether a text gets the special tokens that the model puts around one; without it, it does."""

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters. Raises if they are invalid."""
        scored = self.prompt_logprobs
        if scored is None and self.echo:
            scored = 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs
        own = {"max_tokens": self.max_tokens, "logprobs": self.logprobs, "prompt_logprobs": scored}
        return self.sampling(defaults, **own)

    def prompts(self) -> list[str | list[int]]:
        """All prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise APIError(400, "prompt is empty; give at least one", param="prompt")
        is_one = isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[arg-type, list-item]


class TokenizeRequest(Body):
    """A text or a conversation to be cut into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    add_special_tokens: bool | None = None
    """Whether a text gets the special tokens that the model puts around one."""
    parse_special_tokens: bool | None = None
    """Whether special tokens that messages spell out are tokens; otherwise they are text."""
    return_token_strs: bool | None = None
    """Whether the tokens are also told as text."""


class DetokenizeRequest(Body):
    """Tokens to be put together."""

    model: str | None = None
    tokens: list[int]

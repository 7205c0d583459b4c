"""Request bodies of the OpenAI Responses API, and their conversion to chat requests."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import Body, ChatRequest
from saguaro.serve.http.turn import as_chat

Turn = dict[str, Any]


class InputText(Body):
    """Text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class InputMessage(Body):
    """A turn of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]


class FunctionCall(Body):
    """A call by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class Reasoning(Body):
    """What the assistant thought."""

    type: Literal["reasoning"]
    summary: list[InputText] | None = None
    content: list[InputText] | None = None


def _kind(item: Any) -> str:
    """The type of an item; optional for messages."""
    return str((item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message")


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Models here have no such setting; it changes nothing."""


class ReasoningConfig(Body):
    """How much to think."""

    effort: str | None = None
    summary: str | None = None
    """Reasoning is told as it is, never summarised."""


class ResponsesRequest(Body):
    """A conversation to be answered, as the Responses API has it."""

    model: str | None = None
    input: str | list[Item] = Field(min_length=1)
    """A user's text, or the turns of a conversation."""
    instructions: str | None = None
    """The system's text."""
    max_output_tokens: int | None = None
    """Most tokens to generate; without it, what the context has room for."""
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    """Whether events tell of the answer as it grows."""
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls; true without it."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None
    """Nothing is stored; the response says so."""
    previous_response_id: str | None = None
    """Refused: nothing is stored. Send the whole conversation."""
    truncation: Literal["disabled"] | None = None
    include: list[str] | None = None
    """What more is told: nothing here."""
    metadata: dict[str, str] | None = None
    """Told again in the response."""
    stream_options: dict[str, Any] | None = None
    """Nothing is padded."""

    def chat(self) -> ChatRequest:
        """Convert to a chat request."""
        if self.previous_response_id is not None:
            message = "previous_response_id: responses are not stored here; send the whole conversation as input"
            raise APIError(400, message, param="previous_response_id")
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
        return as_chat(
            self,
            model=self.model,
            messages=self._turns(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=named if self.tools else None,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format if self.text else None),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
        )

    def _turns(self) -> list[Turn]:
        turns: list[Turn] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for item in self.input:
            _add(turns, item)
        return [turn if "tool_calls" in turn else {"content": "", **turn} for turn in turns]


def _add(turns: list[Turn], item: InputMessage | FunctionCall | FunctionCallOutput | Reasoning) -> None:
    """Add an item. Consecutive reasoning, text and calls of the assistant are one turn."""
    match item:
        case InputMessage(role="assistant"):
            turn = _assistant(turns, ("content", "tool_calls"))
            turn["content"] = _text(item.content)
        case InputMessage():
            turns.append({"role": item.role, "content": _text(item.content)})
        case Reasoning():
            turn = _assistant(turns, ("reasoning_content", "content", "tool_calls"))
            turn["reasoning_content"] = _text(item.content or item.summary or [])
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            turn = _assistant(turns, ())
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case FunctionCallOutput():
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _assistant(turns: list[Turn], without: Sequence[str]) -> Turn:
    """The assistant's current turn, if it has none of these fields; else a new one."""
    if not turns or turns[-1]["role"] != "assistant" or any(name in turns[-1] for name in without):
        turns.append({"role": "assistant"})
    return turns[-1]


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}

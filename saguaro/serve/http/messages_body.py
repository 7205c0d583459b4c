"""Request bodies of Anthropic's Messages API, and their conversion to chat requests."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from saguaro.errors import short
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import Body, ChatRequest
from saguaro.serve.http.turn import as_chat

Turn = dict[str, Any]


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """What another model thought, unreadable here: it is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Body):
    """A call by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class MessageParam(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessageToolChoice(Body):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to think before the answer, where the chat template leaves the choice."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Not enforced."""


class OutputFormat(Body):
    """A JSON schema that the answer matches."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer must look like."""

    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """A conversation whose tokens are counted."""

    model: str | None = None
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self, thinks: bool | None, **fields: Any) -> ChatRequest:
        """Convert to a chat request; thinks: the template's variable, None: not set."""
        format_ = self.output_config.format if self.output_config else None
        schema = {"type": "json_schema", "json_schema": {"schema": format_.schema_}} if format_ else None
        last = self.messages[-1]
        return as_chat(
            self,
            model=self.model,
            messages=[*_system(self.system), *(turn for message in self.messages for turn in _turns(message))],
            # A last turn of the assistant is the beginning of the answer.
            continue_final_message=True if last.role == "assistant" else None,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            response_format=schema,
            chat_template_kwargs=None if thinks is None else {"enable_thinking": thinks},
            **_choice(self.tool_choice),
            **fields,
        )


class MessagesRequest(CountTokensRequest):
    """A conversation to be answered, as Anthropic's API has it."""

    max_tokens: int
    """Most tokens to generate."""
    stop_sequences: list[str] | None = None
    """Strings that end the answer."""
    stream: bool | None = None
    """Whether the answer comes piece by piece, as server-sent events."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def whole_chat(self, thinks: bool | None) -> ChatRequest:
        """Convert to a chat request."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return self.chat(thinks, stop=self.stop_sequences, **{name: getattr(self, name) for name in names})


def _system(system: str | Sequence[TextBlock] | None) -> list[Turn]:
    text = system if isinstance(system, str) else _text(system or ())
    return [{"role": "system", "content": text}] if text else []


def _text(blocks: Sequence[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _turns(message: MessageParam) -> list[Turn]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return [_assistant(message.content)] if message.role == "assistant" else _user(message.role, message.content)


def _assistant(blocks: Sequence[Block]) -> Turn:
    """One turn: reasoning, text and calls."""
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            raise _misplaced(block.type, "assistant", "user")
    turn: Turn = {"role": "assistant", "content": _text([block for block in blocks if isinstance(block, TextBlock)])}
    if thought:
        turn["reasoning_content"] = thought
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    return turn


def _user(role: str, blocks: Sequence[Block]) -> list[Turn]:
    """A turn per result, and turns for the text between them."""
    turns: list[Turn] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = block.content if isinstance(block.content, str) else _text(block.content or ())
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += block.text
            else:
                turns.append({"role": role, "content": block.text})
        else:
            raise _misplaced(block.type, role, "assistant")
    return turns


def _misplaced(kind: str, role: str, other: str) -> APIError:
    message = f"a message of {short(role)} has a block of type {kind}, which belongs to {other!r}; move it"
    return APIError(400, message, param="messages")


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    given = {"description": tool.description, "strict": tool.strict}
    function |= {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise APIError(400, "tool_choice has no name; give the name of the tool", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice.type]
    return {"tool_choice": wanted, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}

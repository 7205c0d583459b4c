"""POST /v1/messages and /v1/messages/count_tokens, in the format of Anthropic's API."""

import json
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from saguaro.serve.http.answer import read, render
from saguaro.serve.http.blocks import Block, Change, Closed, Grew, Opened
from saguaro.serve.http.chat import converse
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.messages_body import CountTokensRequest, MessagesRequest
from saguaro.serve.http.messages_errors import anthropic_error
from saguaro.serve.http.service import Service
from saguaro.serve.http.turn import Data, Ended, answer_turn, new_id

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessagesVoice:
    """Formats a turn."""

    def __init__(self, model: str) -> None:
        self._id, self._model = new_id("msg"), model

    def begin(self, n_prompt: int) -> list[Data]:
        """The message without its content."""
        usage = {"input_tokens": n_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, None, usage)}, {"type": "ping"}]

    def change(self, change: Change) -> list[Data]:
        """The start, a delta or the end of a block."""
        index = change.block.index
        match change:
            case Opened(block):
                return [{"type": "content_block_start", "index": index, "content_block": _block(block, is_empty=True)}]
            case Grew(block, text):
                kind, name = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
                return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}]
            case Closed():
                return [{"type": "content_block_stop", "index": index}]

    def end(self, ended: Ended) -> list[Data]:
        """The stop reason and the usage."""
        reason, sequence = _stop(ended)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [{"type": "message_delta", "delta": delta, "usage": _usage(ended)}, {"type": "message_stop"}]

    def fail(self, error: APIError) -> list[Data]:
        """An error event, which ends the stream."""
        return [anthropic_error(error.status, str(error))]

    def whole(self, ended: Ended) -> Data:
        """The message. A call that was cut off is omitted: its arguments are not JSON."""
        content = [_block(block) for block in ended.blocks if block.is_complete]
        return self._message(content, *_stop(ended), _usage(ended)) | {"seed": ended.result.outputs[0].seed}

    def _message(self, content: list[Data], reason: str | None, sequence: str | None, usage: Data) -> Data:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": sequence, "usage": usage}


async def messages(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    chat = body.whole_chat(_thinks(service, body))
    return await answer_turn(service, chat, request, MessagesVoice(body.model or service.names[0]))


async def count_tokens(service: Service, body: CountTokensRequest, request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    service.check_model(body.model)
    conversation = converse(service.dialect, body.chat(_thinks(service, body)))
    with service.front.ticket(0, service.limits.request_timeout) as ticket:
        text = await render(service, request, ticket, conversation)
        tokens = await read(service, request, ticket, service.tokenizer.encode_rendered, text)
        return JSONResponse({"input_tokens": len(tokens)})


def _thinks(service: Service, body: CountTokensRequest) -> bool | None:
    """The value of `thinking` for the chat template; None if the template has no such variable."""
    if body.thinking is None or "enable_thinking" not in service.dialect.template.names:
        return None
    return body.thinking.type != "disabled"


def _block(block: Block, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else block.text
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": json.loads(text or "{}")}


def _stop(ended: Ended) -> tuple[str, str | None]:
    """stop_reason and stop_sequence."""
    sequence = ended.result.outputs[0].stop_reason
    if ended.reason == "stop" and isinstance(sequence, str):
        return "stop_sequence", sequence
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(ended.reason, "end_turn"), None


def _usage(ended: Ended) -> Data:
    (output,) = ended.result.outputs
    n_cached = output.timings.n_cached
    return {
        "input_tokens": len(ended.result.prompt_token_ids) - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": len(output.token_ids),
    }

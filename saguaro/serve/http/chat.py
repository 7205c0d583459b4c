"""POST /v1/chat/completions: a conversation is answered."""

from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from saguaro.model.tokenizer import Tokenizer
from saguaro.serve.http.answer import Choice, Question, read, respond
from saguaro.serve.http.checks import check_asking
from saguaro.serve.http.logprobs import chat_logprobs
from saguaro.serve.http.protocol import ChatRequest
from saguaro.serve.http.service import Service
from saguaro.serve.results import Completion, Delta


class ChatShape:
    """How a chat's outputs are worded."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self._tokenizer, self._wants_logprobs = tokenizer, wants_logprobs

    def opening(self) -> Choice:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, at: int, delta: Delta) -> Choice:
        """What a delta adds."""
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._wants_logprobs else None
        said: dict[str, Any] = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        choice = {"delta": said, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return {**choice, "stop_reason": delta.stop_reason} if delta.finish_reason else choice

    def output(self, output: Completion) -> Choice:
        """A finished output."""
        logprobs = chat_logprobs(self._tokenizer, output.logprobs) if output.logprobs is not None else None
        message = {"role": "assistant", "content": output.text, "refusal": None}
        ended = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return {"message": message, "logprobs": logprobs, **ended}


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    params, messages = check_asking(service, body, 1), body.conversation()
    with ExitStack() as stack:
        ticket = stack.enter_context(service.front.ticket(params.n, service.limits.request_timeout))
        special = bool(body.parse_special_tokens)
        tokens = await read(service, request, ticket, service.encode_chat, messages, params, special)
        shape = ChatShape(service.tokenizer, params.logprobs is not None)
        return await respond(service, Question(request, body, params, [tokens], shape), stack, ticket)

"""One assistant turn, for endpoints with other formats than chat completions: /v1/responses and /v1/messages.

Their requests are converted to chat requests, so tools, reasoning, structured output and all limits are the same.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from saguaro import rng
from saguaro.engine.results import Result
from saguaro.serve.front import Done, Failed, Piece, Ticket
from saguaro.serve.http.answer import GRACE, broken
from saguaro.serve.http.blocks import Block, Blocks, Change
from saguaro.serve.http.body import validation_error
from saguaro.serve.http.chat import ask
from saguaro.serve.http.errors import APIError, api_error
from saguaro.serve.http.protocol import DERIVED, Body, ChatRequest
from saguaro.serve.http.service import Service
from saguaro.serve.http.sse import EventStream, unless_gone
from saguaro.serve.tools.dialect import Prompt

Data = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A turn that has ended."""

    result: Result
    blocks: Sequence[Block]
    n_reasoning: int  # output tokens

    @property
    def reason(self) -> str:
        """The finish reason: stop, length or tool_calls."""
        calls = [block for block in self.blocks if block.kind == "call"]
        is_called = bool(calls) and all(block.is_complete for block in calls)
        reason = self.result.outputs[0].finish_reason
        return "tool_calls" if reason == "stop" and is_called else reason


class Voice(Protocol):
    """How an endpoint formats a turn. An event's name is its `type`."""

    def begin(self, n_prompt: int) -> list[Data]:
        """The events before the first change."""

    def change(self, change: Change) -> list[Data]:
        """The events of a change."""

    def end(self, ended: Ended) -> list[Data]:
        """The last events."""

    def fail(self, error: APIError) -> list[Data]:
        """The last events of a failed turn."""

    def whole(self, ended: Ended) -> Data:
        """The response without streaming."""


def new_id(prefix: str) -> str:
    """A new id for a response or a part of one."""
    return f"{prefix}_{uuid.uuid4().hex}"


def as_chat(body: Body, **fields: Any) -> ChatRequest:
    """Build a chat request from these fields and our own parameters that the endpoint's API lacks."""
    ours = {name: value for name, value in (body.model_extra or {}).items() if name in DERIVED}
    given = {name: value for name, value in (ours | fields).items() if value is not None}
    body.check_extra(ours)
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as e:
        raise validation_error(e.errors(include_url=False, include_input=False, include_context=False)) from e


async def answer_turn(service: Service, chat: ChatRequest, request: Request, voice: Voice) -> Response:
    """Generate an answer and format it."""
    with ExitStack() as stack:
        ticket, prompt, params = await ask(service, chat, request, stack)
        seed = params.seed if params.seed is not None else rng.fresh_seed()
        ticket.submit([prompt.tokens], [replace(params, seed=seed)], wants_pieces=bool(chat.stream))
        turn = _Turn(service, prompt, ticket, voice)
        if chat.stream:
            return EventStream(turn.stream(), stack.pop_all().close, service.limits.request_timeout + GRACE)
        return JSONResponse(await unless_gone(request.receive, turn.whole()))


class _Turn:
    def __init__(self, service: Service, prompt: Prompt, ticket: Ticket, voice: Voice) -> None:
        self._service, self._prompt, self._ticket, self._voice = service, prompt, ticket, voice
        self._reader, self._blocks = prompt.new_reader(), Blocks()

    async def whole(self) -> Data:
        while True:
            for event in await self._ticket.events():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Done):
                    (output,) = event.results[0].outputs
                    if output.finish_reason == "error":
                        raise broken(output.stop_reason)
                    self._read(output.text, is_last=True)
                    return self._voice.whole(self._ended(event.results[0]))

    async def stream(self) -> AsyncIterator[bytes]:
        is_begun = is_over = False
        while not is_over:
            told: list[Data] = []
            for event in await self._ticket.events():
                if not is_begun:
                    told += self._voice.begin(len(self._prompt.tokens))
                    is_begun = True
                new, is_over = self._tell(event)
                told += new
                if is_over:
                    break
            if told:
                yield b"".join(map(_event, told))

    def _tell(self, event: Piece | Done | Failed) -> tuple[list[Data], bool]:
        match event:
            case Failed(error):
                return self._voice.fail(api_error(error)), True
            case Done(results):
                return self._voice.end(self._ended(results[0])), True
            case Piece(delta=delta):
                if delta.finish_reason == "error":
                    return self._voice.fail(broken(delta.stop_reason)), True
                changes = self._read(delta.text, delta.finish_reason is not None)
                return [data for change in changes for data in self._voice.change(change)], False

    def _read(self, text: str, is_last: bool) -> list[Change]:
        changes = self._blocks.add(self._reader.push(text))
        if is_last:
            changes += self._blocks.add(self._reader.finish()) + self._blocks.finish()
        return changes

    def _ended(self, result: Result) -> Ended:
        thought = "".join(block.text for block in self._blocks.found if block.kind == "reasoning") or None
        n = self._service.dialect.count_reasoning(result.outputs[0].token_ids, thought)
        return Ended(result, self._blocks.found, n)


def _event(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()


def now() -> int:
    """Unix time in seconds."""
    return int(time.time())

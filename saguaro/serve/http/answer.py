"""Responses of chat and completions, whole or streamed. A Shape has the differences between the two."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from saguaro import rng
from saguaro.config import SamplingParams
from saguaro.engine.results import Completion, Delta, Result
from saguaro.serve.front import Done, Event, Failed, Piece, Ticket
from saguaro.serve.http.errors import APIError, api_error
from saguaro.serve.http.protocol import Asking
from saguaro.serve.http.service import Service
from saguaro.serve.http.speculation import Narrator
from saguaro.serve.http.sse import DONE, EventStream, sse, unless_gone
from saguaro.serve.tools.dialect import Conversation
from saguaro.target.scheduler import NOT_FINITE

GRACE = 10.0  # seconds after the time limit until a client that does not read is dropped

T = TypeVar("T")
Choice = dict[str, Any]


class Shape(Protocol):
    """How an endpoint formats its output."""

    prefix: str  # of ids
    whole: str  # `object` of a response
    chunk: str  # `object` of a chunk

    def opening(self) -> Choice | None:
        """The content of an output's first chunk, before any text."""

    def pieces(self, at: int, delta: Delta, is_wanted: bool) -> list[Choice]:
        """What a delta adds to output `at`, as choices; none if it adds nothing and is not wanted."""

    def output(self, at: int, output: Completion, result: Result) -> Choice:
        """Output `at`, finished."""

    def beside(self, results: Sequence[Result]) -> dict[str, Any]:
        """Fields of a whole response other than its choices."""

    def usage(self, outputs: Sequence[Completion]) -> dict[str, Any]:
        """Additional usage fields for these outputs."""


@dataclass(frozen=True)
class Question:
    """A request and its parsed parameters."""

    request: Request
    body: Asking
    params: SamplingParams
    prompts: Sequence[Sequence[int]]
    shape: Shape


class Answer:
    """One response under construction. Output `at` belongs to prompt at // n."""

    def __init__(self, service: Service, question: Question, ticket: Ticket) -> None:
        self._service, self._ticket = service, ticket
        self._shape, self._body = question.shape, question.body
        self._n, self._prompts = question.params.n, question.prompts
        seeds = [question.params.seed if question.params.seed is not None else rng.fresh_seed() for _ in self._prompts]
        self._seeds = [rng.derive_seed(seed, index) for seed in seeds for index in range(self._n)]
        self._id, self._created = f"{self._shape.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._narrators: list[Narrator] = []
        self._rounds: list[list[Any]] = [[] for _ in self._seeds]
        self._n_told = [0] * len(self._seeds)  # reported tokens of each output
        if question.body.return_speculation:
            tokenizer, arrived = service.tokenizer, ticket.arrived
            self._narrators = [Narrator(tokenizer, prompt, arrived) for prompt in self._prompts for _ in range(self._n)]
        params = [replace(question.params, seed=seed) for seed in seeds]
        ticket.submit(self._prompts, params, wants_pieces=bool(self._body.stream or self._narrators))

    async def whole(self) -> dict[str, Any]:
        """Wait for the whole response."""
        while True:
            for event in await self._ticket.events():
                match event:
                    case Piece():
                        self._narrate(event)
                    case Failed(error):
                        raise error
                    case Done(results):
                        return self._response(results)

    async def stream(self) -> AsyncIterator[bytes]:
        """The events; the last is [DONE], after an error event if the response failed."""
        wants_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        usage: dict[str, Any] = {"usage": None} if wants_usage else {}
        is_begun = is_over = False
        while not is_over:
            events = await self._ticket.events()
            # Sent with the first text, as clients take the first chunk for the first token.
            chunks = [] if is_begun else [sse({**chunk, **usage}) for chunk in self._openings()]
            is_begun = True
            for event in events:
                found, is_over = self._chunks(event, wants_usage)
                for chunk in found:
                    chunks.append(sse({**chunk, **usage} if "choices" in chunk and "usage" not in chunk else chunk))
                if is_over:
                    chunks.append(DONE)
                    break
            if chunks:
                yield b"".join(chunks)

    def _openings(self) -> Iterator[dict[str, Any]]:
        for at in range(len(self._seeds)):
            opening = self._shape.opening()
            if opening is not None:
                yield {**self._head(self._shape.chunk), "choices": [{"index": at, **opening}]}

    def _chunks(self, event: Event, wants_usage: bool) -> tuple[list[dict[str, Any]], bool]:
        """The chunks of an event, and whether it is the last."""
        match event:
            case Failed(error):
                return [api_error(error).body()], True
            case Done(results):
                tail = {**self._head(self._shape.chunk), "choices": [], "usage": self._usage(results)}
                return [tail] if wants_usage else [], True
            case Piece(delta=delta):
                if delta.finish_reason == "error":
                    return [broken(delta.stop_reason).body()], True
                at = event.prompt * self._n + delta.index
                rounds, tells_ids = self._narrate(event), bool(self._body.return_token_ids)
                self._n_told[at] += len(delta.token_ids)
                is_wanted = bool(delta.logprobs or delta.finish_reason or rounds or tells_ids)
                choices = [{"index": at, **choice} for choice in self._shape.pieces(at, delta, is_wanted)]
                for place, choice in enumerate(choices):
                    if self._narrators:
                        choice["speculation"] = rounds if place == 0 else []
                    if tells_ids:
                        choice["token_ids"] = delta.token_ids if place == 0 else []
                    if choice["finish_reason"] is not None:
                        choice["seed"] = self._seeds[at]
                head = {**self._head(self._shape.chunk), **self._usage_so_far(at)}
                return [{**head, "choices": [choice]} for choice in choices], False

    def _usage_so_far(self, at: int) -> dict[str, Any]:
        options = self._body.stream_options
        if options is None or not options.continuous_usage_stats:
            return {}
        n_prompt, n_output = len(self._prompts[at // self._n]), self._n_told[at]
        counted = {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output}
        return {"usage": counted}

    def _narrate(self, piece: Piece) -> list[Any]:
        if not self._narrators:
            return []
        at = piece.prompt * self._n + piece.delta.index
        rounds = self._narrators[at].tell(piece)
        if not self._body.stream:
            self._rounds[at] += rounds
        return rounds

    def _response(self, results: list[Result]) -> dict[str, Any]:
        outputs = [(output, result) for result in results for output in result.outputs]
        for output, _ in outputs:
            if output.finish_reason == "error":
                raise broken(output.stop_reason)
        choices = []
        for at, (output, result) in enumerate(outputs):
            choice = {"index": at, **self._shape.output(at, output, result), "seed": output.seed}
            if self._narrators:
                choice["speculation"] = self._rounds[at]
            if self._body.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        whole = {**self._head(self._shape.whole), "choices": choices, "usage": self._usage(results)}
        return {**whole, **self._shape.beside(results)}

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        return usage_of(results) | self._shape.usage([output for result in results for output in result.outputs])

    def _head(self, kind: str) -> dict[str, Any]:
        name = self._body.model or self._service.names[0]
        head = {"id": self._id, "object": kind, "created": self._created, "model": name}
        return {**head, "system_fingerprint": None}


async def respond(service: Service, question: Question, stack: ExitStack, ticket: Ticket) -> Response:
    """The response to a question. The stack is closed after it was sent."""
    answer = Answer(service, question, ticket)
    if question.body.stream:
        seconds = service.limits.request_timeout + GRACE
        return EventStream(answer.stream(), stack.pop_all().close, seconds)
    with stack:
        return JSONResponse(await unless_gone(question.request.receive, answer.whole()))


async def read(service: Service, request: Request, ticket: Ticket, function: Callable[..., T], *args: object) -> T:
    """Run a function in a reader thread, while the client is connected and the ticket is valid."""
    return await unless_gone(request.receive, ticket.wait_for(service.read(function, *args)))


async def render(service: Service, request: Request, ticket: Ticket, conversation: Conversation) -> str:
    """A conversation as text, checked for its length, while the client is connected and the ticket is valid."""
    text = await unless_gone(request.receive, ticket.wait_for(service.render(conversation)))
    service.check_text(text)
    return text


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    """The token counts."""
    n_prompt = sum(len(result.prompt_token_ids) for result in results)
    n_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    n_cached = sum(result.outputs[0].timings.n_cached for result in results)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def broken(reason: str | int | None) -> APIError:
    """The error of an output that failed. It has a reason if the request or the model caused it."""
    if isinstance(reason, str):
        return APIError(500 if reason == NOT_FINITE else 400, reason)
    return APIError(500, "the engine could not go on with this request; the server's log says why")

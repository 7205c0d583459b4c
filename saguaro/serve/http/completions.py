"""POST /v1/completions: prompts are continued."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from saguaro.model.tokenizer import Tokenizer
from saguaro.serve.http.answer import Choice, Question, read, respond
from saguaro.serve.http.checks import check_asking
from saguaro.serve.http.logprobs import completion_logprobs
from saguaro.serve.http.protocol import CompletionRequest
from saguaro.serve.http.service import Service
from saguaro.serve.results import Completion, Delta


class CompletionShape:
    """How a completion's outputs are worded."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self._tokenizer, self._wants_logprobs = tokenizer, wants_logprobs
        self._offset: dict[int, int] = defaultdict(int)  # characters of each output whose tokens were told

    def opening(self) -> None:
        """A completion begins with its text."""

    def pieces(self, at: int, delta: Delta, is_wanted: bool) -> list[Choice]:
        """What a delta adds."""
        if not (delta.text or is_wanted):
            return []  # half a character
        logprobs = None
        if self._wants_logprobs:
            logprobs = completion_logprobs(self._tokenizer, delta.logprobs, self._offset[at])
            self._offset[at] += sum(map(len, logprobs["tokens"]))
        choice = {"text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return [{**choice, "stop_reason": delta.stop_reason} if delta.finish_reason else choice]

    def output(self, output: Completion) -> Choice:
        """A finished output."""
        logprobs = completion_logprobs(self._tokenizer, output.logprobs) if output.logprobs is not None else None
        ended = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return {"text": output.text, "logprobs": logprobs, **ended}

    def usage(self, outputs: Sequence[Completion]) -> dict[str, Any]:
        """Nothing more."""
        return {}


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Continue prompts; the outputs of the first come first."""
    prompts = body.prompts()
    params = check_asking(service, body, len(prompts))
    with ExitStack() as stack:
        ticket = stack.enter_context(service.front.ticket(len(prompts) * params.n, service.limits.request_timeout))
        tokens = [await read(service, request, ticket, service.encode, prompt, params) for prompt in prompts]
        shape = CompletionShape(service.tokenizer, params.logprobs is not None)
        return await respond(service, Question(request, body, params, tokens, shape), stack, ticket)

"""POST /v1/completions."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from saguaro.engine.results import Completion, Delta, Result
from saguaro.serve.http.answer import Choice, Question, read, respond
from saguaro.serve.http.checks import check_asking
from saguaro.serve.http.logprobs import completion_logprobs, n_characters, prompt_logprobs
from saguaro.serve.http.protocol import CompletionRequest
from saguaro.serve.http.service import Service
from saguaro.types import TokenLogprobs

Scored = Sequence[TokenLogprobs | None]


class CompletionShape:
    """Formats the outputs of a completion. Output `at` belongs to prompt at // n."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
        self._tokenizer, self._body, self._prompts = service.tokenizer, body, prompts
        self._n = body.n or 1
        self._n_outputs = len(prompts) * self._n
        self._offset = [0] * self._n_outputs  # characters of each output whose tokens were reported
        self._is_begun = [False] * self._n_outputs

    def opening(self) -> None:
        """None: a completion begins with its text."""

    def pieces(self, at: int, delta: Delta, is_wanted: bool) -> list[Choice]:
        """The choice of a delta; the first includes the echoed prompt."""
        is_first = not self._is_begun[at]
        echo = self._echo(at) if is_first and self._body.echo else ""
        if not (echo or delta.text or is_wanted):
            return []  # half a character
        self._is_begun[at] = True
        logprobs = None
        if self._body.logprobs is not None:
            scored = delta.prompt_logprobs if is_first and self._body.echo else None
            logprobs = self._logprobs(at, scored, delta.logprobs, self._offset[at])
            echoed = self._prompts[at // self._n] if scored is not None else []
            self._offset[at] += n_characters(self._tokenizer, [*echoed, *delta.token_ids])
        choice: Choice = {"text": echo + delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if is_first and self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[at // self._n]
        return [{**choice, "stop_reason": delta.stop_reason} if delta.finish_reason else choice]

    def output(self, at: int, output: Completion, result: Result) -> Choice:
        """A finished output."""
        body, scored = self._body, result.prompt_logprobs
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(at, scored if body.echo else None, output.logprobs)
        choice: Choice = {"text": (self._echo(at) if body.echo else "") + output.text, "logprobs": logprobs}
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if body.prompt_logprobs is not None and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, scored)
        return {**choice, "prompt_token_ids": result.prompt_token_ids} if body.return_token_ids else choice

    def beside(self, results: Sequence[Result]) -> dict[str, Any]:
        """Empty: all fields are in the choices."""
        return {}

    def _echo(self, at: int) -> str:
        """A prompt's text: the original, unless it came as tokens or was truncated."""
        given = self._body.prompts()[at // self._n]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._tokenizer.decode(self._prompts[at // self._n], self._body.skip_special_tokens is False)

    def _logprobs(
        self, at: int, scored: Scored | None, found: Sequence[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any]:
        """Logprobs of the output's tokens, after those of the echoed prompt; the first prompt token has none."""
        if scored is None:
            return completion_logprobs(self._tokenizer, found, offset)
        first = TokenLogprobs(self._prompts[at // self._n][0], 0.0, ())
        told = completion_logprobs(self._tokenizer, [one or first for one in scored] + list(found), offset)
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def usage(self, outputs: Sequence[Completion]) -> dict[str, Any]:
        """Empty."""
        return {}


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Continue prompts. Outputs are ordered by prompt."""
    prompts, special = body.prompts(), body.add_special_tokens is not False
    params = check_asking(service, body, len(prompts))
    with ExitStack() as stack:
        ticket = stack.enter_context(service.front.ticket(len(prompts) * params.n, service.limits.request_timeout))
        tokens = [await read(service, request, ticket, service.encode, prompt, params, special) for prompt in prompts]
        shape = CompletionShape(service, body, tokens)
        return await respond(service, Question(request, body, params, tokens, shape), stack, ticket)

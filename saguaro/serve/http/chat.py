"""POST /v1/chat/completions."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from saguaro.config import SamplingParams
from saguaro.engine.results import Completion, Delta, Result
from saguaro.errors import ConfigError
from saguaro.model.tokenizer import Tokenizer
from saguaro.serve.front import Ticket
from saguaro.serve.http.answer import Choice, Question, read, render, respond
from saguaro.serve.http.checks import check_asking
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.logprobs import chat_logprobs, prompt_logprobs
from saguaro.serve.http.protocol import ChatRequest
from saguaro.serve.http.service import Service
from saguaro.serve.tools.dialect import Conversation, Dialect, Prompt
from saguaro.serve.tools.events import CallArguments, CallStart, ContentDelta, Event, Parsed, ReasoningDelta
from saguaro.serve.tools.reader import OutputReader, parse


class ChatShape:
    """Formats the outputs of a chat."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, prompt: Prompt, body: ChatRequest) -> None:
        self._tokenizer, self._dialect, self._prompt = tokenizer, dialect, prompt
        self._wants_logprobs, self._wants_reasoning = bool(body.logprobs), body.include_reasoning is not False
        self._tells_ids = bool(body.return_token_ids)
        self._readers: dict[int, OutputReader] = {}  # by output
        self._parsed: dict[int, Parsed] = {}  # the parsed outputs

    def opening(self) -> Choice:
        """The role of the speaker."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def pieces(self, at: int, delta: Delta, is_wanted: bool) -> list[Choice]:
        """The choices of a delta: content, reasoning and the beginning of each call, one by one."""
        if at not in self._readers:
            self._readers[at], self._parsed[at] = self._prompt.new_reader(), Parsed()
        reader, parsed = self._readers[at], self._parsed[at]
        events = [*reader.push(delta.text), *(reader.finish() if delta.finish_reason is not None else ())]
        for event in events:
            parsed.add(event)
        said = [self._said(event) for event in events]
        choices = [_choice(each) for each in said if each]
        if not choices and is_wanted:
            choices = [_choice({})]
        if choices and self._wants_logprobs:
            choices[0]["logprobs"] = chat_logprobs(self._tokenizer, delta.logprobs)
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, parsed)
            choices[-1] |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return choices

    def output(self, at: int, output: Completion, result: Result) -> Choice:
        """A finished output."""
        logprobs = chat_logprobs(self._tokenizer, output.logprobs) if output.logprobs is not None else None
        parsed = self._parsed[at] = parse(output.text, self._prompt.new_reader())
        is_silent = bool(parsed.calls) or parsed.reasoning is not None
        content = parsed.content if parsed.content is not None or is_silent else ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning is not None and self._wants_reasoning:
            message |= _reasoning(parsed.reasoning)
        if parsed.calls:
            calls = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in parsed.calls]
            message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in calls]
        reason = _finish_reason(output.finish_reason, parsed)
        return {"message": message, "logprobs": logprobs, "finish_reason": reason, "stop_reason": output.stop_reason}

    def usage(self, outputs: Sequence[Completion]) -> dict[str, Any]:
        """The number of reasoning tokens, if the model may reason."""
        if self._dialect.thinking is None:
            return {}
        read = [(output.token_ids, self._parsed[at].reasoning) for at, output in enumerate(outputs)]
        n = sum(self._dialect.count_reasoning(tokens, reasoning) for tokens, reasoning in read)
        return {"completion_tokens_details": {"reasoning_tokens": n}}

    def _said(self, event: Event) -> dict[str, Any]:
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return _reasoning(text) if self._wants_reasoning else {}
            case CallStart(index, id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                return {}

    def beside(self, results: Sequence[Result]) -> dict[str, Any]:
        """The prompt's tokens and their log-probabilities, if requested."""
        (result,) = results
        scored = result.prompt_logprobs
        told: dict[str, Any] = {"prompt_token_ids": result.prompt_token_ids} if self._tells_ids else {}
        return told if scored is None else {**told, "prompt_logprobs": prompt_logprobs(self._tokenizer, scored)}


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    with ExitStack() as stack:
        ticket, prompt, params = await ask(service, body, request, stack)
        shape = ChatShape(service.tokenizer, service.dialect, prompt, body)
        return await respond(service, Question(request, body, params, [prompt.tokens], shape), stack, ticket)


async def ask(
    service: Service, body: ChatRequest, request: Request, stack: ExitStack
) -> tuple[Ticket, Prompt, SamplingParams]:
    """A ticket for a conversation, which the stack closes, its prompt and its parameters."""
    params = check_asking(service, body, 1)
    conversation = converse(service.dialect, body)
    ticket = stack.enter_context(service.front.ticket(params.n, service.limits.request_timeout))
    text = await render(service, request, ticket, conversation)
    return ticket, *await read(service, request, ticket, prepare, service, text, conversation, params)


def converse(dialect: Dialect, body: ChatRequest) -> Conversation:
    """Parse a request. Raises if it is invalid."""
    variables = dialect.effort(body.reasoning_effort) | dialect.variables(body.chat_template_kwargs)
    return Conversation(
        body.turns(),
        body.declared(),
        variables,
        body.options(),
        parse_special=bool(body.parse_special_tokens),
        add_special=bool(body.add_special_tokens),
    )


def prepare(
    service: Service, text: str, conversation: Conversation, params: SamplingParams
) -> tuple[Prompt, SamplingParams]:
    """The prompt and parameters of a rendered conversation, checked."""
    prompt = service.dialect.prompt(text, conversation.declared, params.structured, conversation.add_special)
    params = replace(params, structured=prompt.structured)
    if prompt.shows_special:
        params = replace(params, skip_special_tokens=False)
    try:
        return replace(prompt, tokens=service.check(prompt.tokens, params)), params
    except ConfigError as e:
        if conversation.declared is None or not str(e).startswith("structured."):
            raise
        raise APIError(
            400, f"no grammar can be made of the tools' parameters; simplify them: {e}", param="tools"
        ) from e


def _choice(said: dict[str, Any]) -> Choice:
    return {"delta": said, "logprobs": None, "finish_reason": None}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(reason: str, parsed: Parsed) -> str:
    return "tool_calls" if reason == "stop" and parsed.ends_with_calls else reason

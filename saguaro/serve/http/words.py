"""POST /tokenize and /detokenize, in vLLM's format."""

from typing import Any

from fastapi import Request

from saguaro.serve.http.answer import read, render
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import DetokenizeRequest, TokenizeRequest
from saguaro.serve.http.service import Service
from saguaro.serve.tools.declared import declare
from saguaro.serve.tools.dialect import Conversation

MAX_TOKENS = 2**17  # tokens per call: more would delay other requests


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Tokens of a text or a conversation."""
    service.check_model(body.model)
    body.check_extra()
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", param="prompt")
    with service.front.ticket(0, service.limits.request_timeout) as ticket:
        text = None if body.messages is None else await render(service, request, ticket, _conversation(service, body))
        return await read(service, request, ticket, _tokenize, service, body, text)


def _conversation(service: Service, body: TokenizeRequest) -> Conversation:
    turns = [message.plain() for message in body.messages or []]
    variables = service.dialect.variables(body.chat_template_kwargs)
    return Conversation(turns, declare(body.tools), variables, parse_special=bool(body.parse_special_tokens))


def _tokenize(service: Service, body: TokenizeRequest, rendered: str | None) -> dict[str, Any]:
    words = service.tokenizer
    if rendered is not None:
        tokens = words.encode_rendered(rendered)
    else:
        assert body.prompt is not None
        service.check_text(body.prompt)
        tokens = words.encode(body.prompt, body.add_special_tokens is not False)
    spelled = [words.spelling.get(token, "") for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.max_model_len,
        "tokens": tokens,
        "token_strs": spelled,
    }


async def detokenize(service: Service, body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Text of tokens, special ones included."""
    service.check_model(body.model)
    body.check_extra()
    with service.front.ticket(0, service.limits.request_timeout) as ticket:
        return await read(service, request, ticket, _detokenize, service, body.tokens)


def _detokenize(service: Service, tokens: list[int]) -> dict[str, Any]:
    if len(tokens) > MAX_TOKENS:
        raise APIError(400, f"tokens has {len(tokens)} ids; at most {MAX_TOKENS} at a time: ask twice", param="tokens")
    n_vocab = service.engine.loaded.model.spec.n_vocab
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise APIError(400, f"tokens names token {token}; ids go from 0 to {n_vocab - 1}", param="tokens")
    return {"prompt": service.tokenizer.decode(tokens, True)}

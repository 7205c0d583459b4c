"""Log-probabilities as the chat and the completions API word them."""

import math
from collections.abc import Sequence
from typing import Any

from saguaro.model.tokenizer import Tokenizer
from saguaro.types import TokenLogprobs

LEAST = -9999.0  # what JSON cannot say: minus infinity


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = [
        {**_entry(tokenizer, one.token, one.logprob), "top_logprobs": [_entry(tokenizer, *top) for top in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
    """`logprobs` of a completion's choice, whose text begins at this character of the output."""
    tokens = [_text(tokenizer, one.token) for one in found]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in found],
        "top_logprobs": [
            {_text(tokenizer, token): _finite(value) for token, value in ((one.token, one.logprob), *one.top)}
            for one in found
        ],
        "text_offset": offsets[: len(tokens)],
    }


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM words it: by token id, the prompt's own token and the likeliest."""
    return [None if one is None else _ranked(tokenizer, one) for one in found]


def _ranked(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, Any]:
    ranked = [(one.token, one.logprob, one.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1) if token != one.token]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(tokenizer, token)}
        for token, logprob, rank in ranked
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], special=True)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST

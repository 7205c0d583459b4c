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


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], special=True)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST

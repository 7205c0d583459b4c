"""Log-probabilities in the formats of the chat and completions APIs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from saguaro.model.token_bytes import n_begun, spell
from saguaro.model.tokenizer import Tokenizer
from saguaro.types import TokenLogprobs

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {**_entry(tokenizer, one.token, one.logprob), "top_logprobs": [_entry(tokenizer, *top) for top in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
    """`logprobs` of a completion choice, whose text begins at this character of the output."""
    offsets = [offset]
    for one in found:
        offsets.append(offsets[-1] + n_characters(tokenizer, [one.token]))
    return {
        "tokens": [spell(tokenizer.bytes.of(one.token)) for one in found],
        "token_logprobs": [_finite(one.logprob) for one in found],
        "top_logprobs": [_by_text(tokenizer, one) for one in found],
        "text_offset": offsets[:-1],
    }


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's format: by token id, the prompt's own token and the most likely ones."""
    return [None if one is None else _ranked(tokenizer, one) for one in found]


def _ranked(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, Any]:
    ranked = [(one.token, one.logprob, one.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1) if token != one.token]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spell(tokenizer.bytes.of(token))}
        for token, logprob, rank in ranked
    }


def n_characters(tokenizer: Tokenizer, tokens: Iterable[int]) -> int:
    """How many characters of the text begin in these tokens."""
    return sum(n_begun(tokenizer.bytes.of(token)) for token in tokens)


def _by_text(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, float]:
    """The token and its alternatives. If two have the same text, the second is keyed by its id."""
    found: dict[str, float] = {}
    for token, logprob in dict(((one.token, one.logprob), *one.top)).items():
        text = spell(tokenizer.bytes.of(token))
        found[text if text not in found else f"token_id:{token}"] = _finite(logprob)
    return found


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.bytes.of(token)
    return {"token": spell(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST

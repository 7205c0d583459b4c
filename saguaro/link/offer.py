"""What a draft service serves, as it tells its clients, and what they make sure of.

A client takes any service with its vocabulary: tokens mean the same to both. The service sends a checksum of every
token's spelling, so that the client counts the tokens that differ, as it does with a draft in a folder.

    |bytes of words 8|number of tokens 8|words: JSON|checksums: 2 bytes a token, 0: there is no such token|
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from saguaro.config import build
from saguaro.draft.load import MOST_ODD
from saguaro.errors import ConfigError, DraftError
from saguaro.link.frame import Array, WireError

MOST_TOKENS = 2**20  # of a vocabulary
MOST_WORDS = 2**14  # bytes

_SIZES = struct.Struct("<QQ")
_SUM = np.dtype("<u2")


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target, by which one model is told from another of its family."""

    n_layers: int
    hidden: int
    n_vocab: int

    def __str__(self) -> str:
        return f"{self.n_layers} layers of {self.hidden} and {self.n_vocab} tokens"


@dataclass(frozen=True)
class Terms:
    """What a service serves, and how much of it a session may have."""

    model: str  # its name, not its path
    n_vocab: int
    max_rows: int
    max_tokens: int  # of KV memory
    target: TargetShape | None = None  # of the target whose weights the draft uses


@dataclass(frozen=True)
class Offer:
    """Terms, and the vocabulary."""

    terms: Terms
    sums: Array = field(repr=False)  # [n] uint16; empty: no tokenizer is known


@dataclass(frozen=True)
class Expected:
    """What a client needs."""

    model: str | None  # the only name that will do
    n_vocab: int  # tokens that its target can emit
    target: TargetShape
    spelling: Mapping[int, str]


def sums_of(spelling: Mapping[int, str]) -> Array:  # [n] uint16
    """A checksum of every token's spelling, never 0; 0 where there is no token.

    >>> sums_of({0: "a", 2: "b"}).astype(bool).tolist()
    [True, False, True]
    """
    sums = np.zeros(min(max(spelling, default=-1) + 1, MOST_TOKENS), _SUM)
    for token, text in spelling.items():
        if 0 <= token < len(sums):
            sums[token] = 1 + zlib.crc32(text.encode(errors="surrogatepass")) % 65535
    return sums


def encode_offer(offer: Offer) -> bytes:
    """As a message's body."""
    words = json.dumps(asdict(offer.terms)).encode()
    return _SIZES.pack(len(words), len(offer.sums)) + words + offer.sums.astype(_SUM).tobytes()


def decode_offer(body: Array) -> Offer:
    """Decode what a service serves, and check every number."""
    data = body.tobytes()
    if len(data) < _SIZES.size:
        raise WireError(f"an offer of {len(data)} bytes; it has at least {_SIZES.size}")
    n_words, n_sums = _SIZES.unpack_from(data)
    if n_words > MOST_WORDS or n_sums > MOST_TOKENS or len(data) != _SIZES.size + n_words + 2 * n_sums:
        raise WireError(f"an offer of {len(data)} bytes with {n_words} bytes of words and {n_sums} tokens")
    try:
        words: dict[str, Any] = json.loads(data[_SIZES.size : _SIZES.size + n_words])
        target = words.pop("target", None)
        terms = build(Terms, **words, target=None if target is None else build(TargetShape, **target))
    except (ValueError, TypeError, AttributeError, RecursionError, ConfigError) as e:
        raise WireError(f"these are no words of an offer: {e}") from e
    numbers = [terms.n_vocab, terms.max_rows, terms.max_tokens]
    numbers += [] if terms.target is None else asdict(terms.target).values()
    if not isinstance(terms.model, str) or not all(type(each) is int and 0 <= each < 2**53 for each in numbers):
        raise WireError(f"an offer of {terms.model!r} with the numbers {numbers}")
    return Offer(terms, np.frombuffer(data, _SUM, n_sums, _SIZES.size + n_words))


def check_offer(offer: Offer, expected: Expected) -> None:
    """Raise DraftError unless this is what a client needs."""
    terms = offer.terms
    if expected.model is not None and terms.model != expected.model:
        raise DraftError(
            f"it serves the model {terms.model!r}, and {expected.model!r} is asked for; check the address, or leave "
            "the model's name out of it"
        )
    remedy = "a draft must have the target's vocabulary: serve a smaller model of the target's family"
    if terms.n_vocab < expected.n_vocab:
        raise DraftError(
            f"its model {terms.model!r} knows {terms.n_vocab} tokens, the target says {expected.n_vocab}; {remedy}"
        )
    if terms.target is not None and terms.target != expected.target:
        raise DraftError(
            f"its model {terms.model!r} is made from a target of {terms.target}, and this target has "
            f"{expected.target}; give the service this target (--target), or another draft"
        )
    _check_spelling(offer, expected.spelling, remedy)


def _check_spelling(offer: Offer, spelling: Mapping[int, str], remedy: str) -> None:
    if not len(offer.sums) or not spelling:
        return  # weights without a tokenizer, made for this target
    ours = sums_of(spelling)
    theirs = np.zeros_like(ours)
    n = min(len(ours), len(offer.sums))
    theirs[:n] = offer.sums[:n]
    odd = np.flatnonzero((ours != 0) & (theirs != ours))
    if len(odd) > MOST_ODD * len(spelling):
        first = int(odd[0])
        raise DraftError(
            f"{len(odd)} of {len(spelling)} tokens mean something else to its model {offer.terms.model!r} than to the "
            f"target (the first is token {first}, {spelling[first]!r} to the target); {remedy}"
        )

"""The bytes of each token, independent of its context.

A character may be split over several tokens; each of these alone decodes to the same replacement character. The bytes
follow from the vocabulary's spelling and the tokenizer's decoder:

    byte-level BPE      one letter per byte            "Ġthe" is " the"
    SentencePiece       "▁" is a space, and <0xE2> a byte without a token
"""

import json
import re
from collections.abc import Mapping
from typing import Any

KNOWN = ("ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip")


class TokenBytes:
    """Token ids to bytes, for one transformers tokenizer."""

    def __init__(self, inner: Any, spelling: Mapping[int, str]) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        self._inner, self._spelling = inner, spelling
        self._steps = _steps(backend.decoder) if backend is not None else None  # None: use the tokenizer
        self._added = {token: str(added) for token, added in inner.added_tokens_decoder.items()}
        self._byte = {letter: byte for byte, letter in enumerate(byte_letters())}

    def of(self, token: int) -> bytes:
        """The bytes of a token; for an added token those of its name."""
        if token in self._added:
            return self._added[token].encode()
        if self._steps is None:
            return str(self._inner.decode([token])).encode()
        text = self._spelling.get(token, "")
        for step in self._steps:
            if step["type"] == "ByteLevel" and all(letter in self._byte for letter in text):
                return bytes(self._byte[letter] for letter in text)
            if step["type"] == "ByteFallback" and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
                return bytes([int(text[3:5], 16)])
            if step["type"] == "Metaspace":
                text = text.replace(step["replacement"], " ")
            elif step["type"] == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
        return text.encode()


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level tokenizers.

    >>> letters = byte_letters()
    >>> letters[ord("a")], letters[ord(" ")]
    ('a', 'Ġ')
    """
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]


def spell(token: bytes) -> str:
    r"""A token's bytes as text; if they are not whole characters, in the OpenAI API's format.

    >>> spell(b" the"), spell(b"\xe2\x80")
    (' the', 'bytes:\\xe2\\x80')
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def n_begun(token: bytes) -> int:
    """How many characters begin in a token; summed over a text's tokens, its number of characters.

    >>> n_begun("é".encode()[:1]), n_begun("é".encode()[1:]), n_begun("éa".encode())
    (1, 0, 2)
    """
    return sum(byte & 0xC0 != 0x80 for byte in token)


def _steps(decoder: Any) -> list[dict[str, Any]] | None:
    """The steps of a decoder, in order; None if one of them is unknown."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    is_known = all(
        step["type"] in KNOWN and (step["type"] != "Replace" or "String" in step["pattern"]) for step in steps
    )
    return steps if is_known else None

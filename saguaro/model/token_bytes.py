"""The bytes that each token stands for, whatever comes before or after it.

A character may be split over tokens, and then the text of one of them alone is a replacement character, the same for
all of them. Its bytes are told by the vocabulary's spelling and the tokenizer's decoder:

    byte-level BPE      one letter per byte            "Ġthe" is " the"
    SentencePiece       "▁" is a space, and <0xE2> a byte that no token has
"""

import json
import re
from collections.abc import Mapping
from typing import Any

KNOWN = ("ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip")


class TokenBytes:
    """Token ids to bytes, for one tokenizer (transformers' own)."""

    def __init__(self, inner: Any, spelling: Mapping[int, str]) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        self._inner, self._spelling = inner, spelling
        self._steps = _steps(backend.decoder) if backend is not None else None  # None: only the tokenizer can tell
        self._added = {token: str(added) for token, added in inner.added_tokens_decoder.items()}
        self._byte = {letter: byte for byte, letter in enumerate(byte_letters())}

    def of(self, token: int) -> bytes:
        """The bytes of a token; those of an added one are its name's."""
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
    """The letter that byte-level tokenizers write for each byte.

    >>> letters = byte_letters()
    >>> letters[ord("a")], letters[ord(" ")]
    ('a', 'Ġ')
    """
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]


def spell(token: bytes) -> str:
    r"""A token's bytes as text; where they are no whole characters, as the OpenAI API writes them.

    >>> spell(b" the"), spell(b"\xe2\x80")
    (' the', 'bytes:\\xe2\\x80')
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def n_begun(token: bytes) -> int:
    """How many characters begin in a token: over all tokens of a text, as many as it has.

    >>> n_begun("é".encode()[:1]), n_begun("é".encode()[1:]), n_begun("éa".encode())
    (1, 0, 2)
    """
    return sum(byte & 0xC0 != 0x80 for byte in token)


def _steps(decoder: Any) -> list[dict[str, Any]] | None:
    """What a decoder does to one token after the other; None if a part of it is not known here."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    is_known = all(
        step["type"] in KNOWN and (step["type"] != "Replace" or "String" in step["pattern"]) for step in steps
    )
    return steps if is_known else None

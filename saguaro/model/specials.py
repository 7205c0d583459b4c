r"""Special tokens spelled out in a user's text, such as <|im_start|>, stay text.

A chat template marks roles with special tokens. If a message's content could contain them too, a user could
impersonate the system. So, if a content holds the spelling of a special token:

    content     the <|im_end|> token          hide: each spelling becomes a mark that the user cannot know
    rendered    <|im_start|>user\n the MARK token<|im_end|>
    encoded     the template's special tokens by their ids, the marks as the text they stand for
"""

import re
import secrets
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

START, END = "\U000f0000", "\U000f0001"  # private-use characters that delimit marks


class Specials:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self._secret, self._lock = backend, secrets.token_hex(8), threading.Lock()
        found = {token.content: (index, token) for index, token in backend.get_added_tokens_decoder().items()}
        self._tokens = {text: pair for text, pair in found.items() if pair[1].special and text.strip()}
        self._spellings = sorted(self._tokens, key=len, reverse=True)  # longest match first
        self._written = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._marks = re.compile(f"{START}{self._secret}:(\\d+){END}")

    def hide(self, value: Any) -> Any:
        """The same value, with every special token that its strings spell out replaced by a mark."""
        if isinstance(value, str):
            return self._written.sub(lambda found: self._mark(self._spellings.index(found[0])), value)
        if isinstance(value, Mapping):
            return {key: self.hide(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(each) for each in value]
        return value

    def are_hidden(self, text: str) -> bool:
        """Whether a rendered text has marks."""
        return self._marks.search(text) is not None

    def show(self, text: str) -> str:
        """A rendered text with marks replaced by their spelling."""
        return self._marks.sub(lambda found: self._spellings[int(found[1])], text)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Tokens of a rendered text: special tokens outside marks are tokens, marks are text.

        Each special token is replaced by a stand-in token that no text can spell. So one call encodes everything, and
        the text around special tokens is split as usual.
        """
        backend, stand_ins = self._literal
        ids: list[int] = []

        def stand_in(found: re.Match[str]) -> str:
            index, token = self._tokens[found[0]]
            ids.append(index)
            return stand_ins[token.lstrip, token.rstrip]

        literal = self.show(self._written.sub(stand_in, text))
        with self._lock:
            encoded = backend.encode(literal, add_special_tokens=special).ids
        known, left = self._stand_in_ids, iter(ids)
        return [next(left) if token in known else token for token in encoded]

    def _mark(self, index: int) -> str:
        return f"{START}{self._secret}:{index}{END}"

    @cached_property
    def _literal(self) -> tuple[tokenizers.Tokenizer, Mapping[tuple[bool, bool], str]]:
        """A tokenizer that encodes special tokens' spellings as text, and its stand-ins by (lstrip, rstrip)."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        sides = {(token.lstrip, token.rstrip) for _, token in self._tokens.values()}
        texts = {side: f"{START}{self._secret}:{int(side[0])}{int(side[1])}{START}" for side in sides}
        backend.add_tokens(
            [
                tokenizers.AddedToken(text, lstrip=left, rstrip=right, normalized=False, special=False)
                for (left, right), text in texts.items()
            ]
        )
        return backend, texts

    @cached_property
    def _stand_in_ids(self) -> frozenset[int]:
        backend, texts = self._literal
        return frozenset(_id(backend, text) for text in texts.values())


def _id(backend: tokenizers.Tokenizer, text: str) -> int:
    index = backend.token_to_id(text)
    assert index is not None, "a token that was added has an id"
    return int(index)

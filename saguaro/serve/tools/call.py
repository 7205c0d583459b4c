"""One tool call as a model writes it, parsed character by character. Its arguments are available as they grow."""

import json
import re
from collections.abc import Collection
from typing import Protocol

from saguaro.serve.tools.json_scan import SPACE, JsonScan

ARGUMENTS = ("arguments", "parameters")  # the names that models use
_KNOWN = ("name", *ARGUMENTS, "type", "id")
_HEAD = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(\[CALL_ID\]\s*\w*)?\s*(\[ARGS\])?\s*")
_HEAD_CHARS = re.compile(r"[a-zA-Z0-9_.\-\[\]\s]")
_MAX_HEAD = 256


class CallScan(Protocol):
    """A call under construction."""

    @property
    def name(self) -> str | None:
        """Its name, once the name is known and the arguments have begun: from then on it is a call."""

    @property
    def is_done(self) -> bool:
        """Whether the call is complete."""

    def feed(self, text: str) -> int:
        """Consume the characters that belong to the call, and return how many. If some are left and the call is not
        done, it is no call."""

    def take(self) -> str:
        """The arguments since the last call of take."""


class Arguments:
    """A JSON object. Control characters in its strings, which JSON forbids, are escaped."""

    def __init__(self) -> None:
        self._scan, self._new = JsonScan(), list[str]()

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._scan.is_done

    def feed(self, text: str, at: int) -> int:
        """Consume characters from position `at`. Returns the position after them."""
        while True:
            end = self._scan.feed(text, at)
            self._new.append(text[at:end])
            is_control = end < len(text) and self._scan.is_string and text[end] < " "
            if not is_control or not self._scan.push(text[end]):
                return end
            self._new.append(json.dumps(text[end])[1:-1])
            at = end + 1

    def take(self) -> str:
        """The new part of the arguments."""
        new, self._new = "".join(self._new), []
        return new


class ObjectCall:
    """`{"name": "f", "arguments": {...}}`, in any order, optionally with a type and an id.

    names: the allowed function names; None: any. A bare call is found in ordinary text, so it must have a known name
    and no other fields.
    """

    def __init__(self, names: Collection[str] | None, is_bare: bool) -> None:
        self.is_done = False
        self._name: str | None = None
        self._names, self._is_bare = names, is_bare
        self._state = self._open
        self._key = self._word = ""
        self._value = JsonScan()
        self._arguments: Arguments | None = None
        self._growing: Arguments | None = None  # the arguments, while they are parsed

    @property
    def name(self) -> str | None:
        """Its name, once it is a call."""
        return self._name if self.is_done or self._arguments is not None else None

    def feed(self, text: str) -> int:
        """Consume characters."""
        at = 0
        while at < len(text) and not self.is_done:
            if self._growing is not None:
                at = self._growing.feed(text, at)
                if not self._growing.is_done:
                    break
                self._growing = None
            elif self._state(text[at]):
                at += 1
            elif self._growing is None:
                break
        return at

    def take(self) -> str:
        """The arguments since the last call of take; {} for a call without arguments."""
        if self._arguments is None:
            if not self.is_done:
                return ""
            self._arguments = Arguments()
            return "{}"
        return self._arguments.take()

    def _open(self, c: str) -> bool:
        self._state = self._first_key
        return c == "{"

    def _first_key(self, c: str) -> bool:
        if c in SPACE:
            return True
        self._state, self._value, self._word = self._in_key, JsonScan(), ""
        return c == '"' and self._in_key(c)

    def _in_key(self, c: str) -> bool:
        is_taken = self._value.push(c)
        self._word += c
        if self._value.is_done:
            self._key, self._state = _text(self._word), self._colon
            return not self._is_bare or self._key in _KNOWN
        return is_taken

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._state = self._first_of_value
        return c == ":" or c in SPACE

    def _first_of_value(self, c: str) -> bool:
        if c in SPACE:
            return True
        if self._key in ARGUMENTS and self._arguments is None:
            if c == "{":  # part of the arguments
                self._arguments = self._growing = Arguments()
                self._state = self._after_value
            return False
        self._value, self._word, self._state = JsonScan(), "", self._in_value
        is_name = self._key == "name" and self._name is None
        return (c == '"' or not is_name) and self._in_value(c)

    def _in_value(self, c: str) -> bool:
        is_taken = self._value.push(c)
        if is_taken:
            self._word += c
        if not self._value.is_done:
            return is_taken
        self._state = self._after_value
        if self._key == "name" and self._name is None and not self._is_named(_text(self._word)):
            return False
        return is_taken or self._after_value(c)  # a number ends before the next character

    def _is_named(self, name: str) -> bool:
        is_name = 0 < len(name) <= _MAX_HEAD and name.isprintable() and (self._names is None or name in self._names)
        self._name = name if is_name else None
        return is_name

    def _after_value(self, c: str) -> bool:
        if c == ",":
            self._state = self._first_key
        elif c == "}":
            self.is_done = self._name is not None
            return self.is_done
        return c == "," or c in SPACE


class NamedCall:
    """`f{...}` or `f[ARGS]{...}`, the format of newer Mistral models."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._head, self._arguments = "", Arguments()

    @property
    def is_done(self) -> bool:
        """Whether the arguments are complete."""
        return self._arguments.is_done

    def feed(self, text: str) -> int:
        """Consume characters."""
        at = 0
        while self.name is None and at < len(text):
            if text[at] == "{":
                head = _HEAD.fullmatch(self._head)
                if head is None:
                    break
                self.name = head[1]
            elif _HEAD_CHARS.match(text[at]) is None or len(self._head) == _MAX_HEAD:
                break
            else:
                self._head += text[at]
                at += 1
        return at if self.name is None else self._arguments.feed(text, at)

    def take(self) -> str:
        """The arguments since the last call of take."""
        return self._arguments.take()


def _text(word: str) -> str:
    """Decode a JSON string that may contain control characters."""
    return str(json.loads(word, strict=False))

"""An incremental JSON scanner: accepts characters of a JSON value and finds its end."""

import re

SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # within a string
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class JsonScan:
    """One JSON value as it grows. Accepts control characters in strings, because models write them.

    >>> scan = JsonScan()
    >>> [scan.push(c) for c in '{"a": [1, 2]}'] == [True] * 13, scan.is_done
    (True, True)
    >>> JsonScan().push("]")
    False
    """

    def __init__(self) -> None:
        self.is_done = False
        self._ends: list[str] = []  # of the open objects and arrays
        self._state, self._word, self._is_key, self._n_hex = self._value, "", False, 0

    @property
    def is_string(self) -> bool:
        """Whether the next character is inside a string."""
        return self._state in (self._string, self._escape)

    def feed(self, text: str, at: int) -> int:
        """Consume the characters from position `at` that belong to the value, and return the position after them.
        Stops at a control character in a string; the caller may push it."""
        while at < len(text) and not self.is_done:
            if self._state == self._string:
                plain = _PLAIN.match(text, at)
                if plain is not None:
                    at = plain.end()
                    continue
                if text[at] < " ":
                    break
            if not self._state(text[at]):
                break
            at += 1
        return at

    def push(self, c: str) -> bool:
        """Consume a character. False: the value is complete without it, or it is not JSON."""
        return not self.is_done and self._state(c)

    def _value(self, c: str) -> bool:
        if c in SPACE:
            return True
        if c == "{":
            self._ends.append("}")
            self._state = self._first_key
        elif c == "[":
            self._ends.append("]")
            self._state = self._first_item
        elif c == '"':
            self._state, self._is_key = self._string, False
        elif c in "-0123456789":
            self._state, self._word = self._number, c
        elif c in "tfn":
            self._state, self._word = self._literal, c
        else:
            return False
        return True

    def _first_key(self, c: str) -> bool:
        return self._close() if c == "}" else self._key(c)

    def _key(self, c: str) -> bool:
        if c == '"':
            self._state, self._is_key = self._string, True
        return c in '"' + SPACE

    def _first_item(self, c: str) -> bool:
        return self._close() if c == "]" else self._value(c)

    def _string(self, c: str) -> bool:
        if c == "\\":
            self._state, self._n_hex = self._escape, 0
        elif c == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._after_value()
        return True

    def _escape(self, c: str) -> bool:
        if self._n_hex:
            self._n_hex -= 1
            if not self._n_hex:
                self._state = self._string
            return c in "0123456789abcdefABCDEF"
        if c == "u":
            self._n_hex = 4
        else:
            self._state = self._string
        return c in '"\\/bfnrtu'

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._state = self._value
        return c in ":" + SPACE

    def _number(self, c: str) -> bool:
        if c in "0123456789+-.eE":
            self._word += c
            return True
        if not _NUMBER.fullmatch(self._word):
            return False
        self._after_value()
        return self.push(c)

    def _literal(self, c: str) -> bool:
        self._word += c
        if self._word in _LITERALS:
            self._after_value()
        return any(literal.startswith(self._word) for literal in _LITERALS)

    def _after_item(self, c: str) -> bool:
        if c == ",":
            self._state = self._key if self._ends[-1] == "}" else self._value
        elif c == self._ends[-1]:
            return self._close()
        return c in "," + SPACE

    def _close(self) -> bool:
        self._ends.pop()
        self._after_value()
        return True

    def _after_value(self) -> None:
        self._state, self.is_done = self._after_item, not self._ends

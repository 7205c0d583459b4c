"""Grammars of a tokenizer's tokens, compiled by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF.

Invariant: the state of an output is a function of its tokens. It is moved from one text to another by taking back what
differs, so speculated tokens, rejections and preemption need no path of their own.

llguidance is imported when the first grammar is asked for.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from saguaro.config import Structured
from saguaro.errors import ConfigError
from saguaro.model.one_of import settle
from saguaro.model.tokenizer import Tokenizer

T = TypeVar("T")

# Beside llguidance's own: a state takes 1 to 2 kB.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
MAX_CACHED = 64  # compiled grammars kept
MAX_RENEWALS = 8  # times one output may have its grammar compiled anew
MAX_TRIED = 200  # parts of a schema that are looked at to say where it is wrong
# A space, or a line and its indentation. Whitespace without end is what small models get lost in; a schema may ask for
# other whitespace by "x-guidance".
WHITESPACE = r"( |\n[ \t]{0,32})"


class Grammars:
    """Compiles grammars for one tokenizer, each once, and starts outputs. Any thread may use it."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], n_vocab: int, ends: Collection[int]) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab  # asked for when the first grammar is
        self._ends = sorted(token for token in ends if token < n_vocab)
        self._compiled: OrderedDict[Structured, Any] = OrderedDict()  # the last used is the last
        self._lock = threading.Lock()  # held to look up, never to compile

    def start(self, structured: Structured) -> "Matcher":
        """The grammar of an output of which nothing is written yet; raises where there can be none."""
        return Matcher(self.compile(structured), partial(self._renew, structured), self._ends, self._n_vocab)

    def compile(self, structured: Structured) -> Any:
        """llguidance's matcher at the beginning, never moved; ConfigError names what is wrong with a grammar."""
        with self._lock:
            found = self._compiled.get(structured)
            if found is not None:
                self._compiled.move_to_end(structured)
                return found
        matcher = self._new(structured)
        with self._lock:
            self._compiled[structured] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def _renew(self, structured: Structured) -> Any:
        """Compile once more: outputs share the states that a grammar has come through, and so their limit."""
        with self._lock:
            self._compiled.pop(structured, None)
        return self.compile(structured)

    def _new(self, structured: Structured) -> Any:
        matcher, why = self._try(structured.kind, structured.text)
        if matcher is not None:
            return matcher
        if structured.kind == "json":
            why = f"{self._where(json.loads(structured.text), why)}{why}"
        raise ConfigError(f"structured.{structured.kind} cannot be served: {_short(why)}")

    def _try(self, kind: str, text: str) -> tuple[Any, str]:
        """A compiled grammar, or None and what is wrong."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(kind, text)
        except (ValueError, RecursionError) as e:
            return None, str(e)
        matcher = LLMatcher(self._words, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            return None, matcher.get_error().strip()
        matcher.compute_bitmask()
        return (None, "no text matches it") if matcher.is_error() else (matcher, "")

    def _where(self, schema: Any, why: str) -> str:
        """The innermost part of a schema that is wrong in this very way, as `at properties.age: `."""
        for path, part in _parts(schema)[-MAX_TRIED:][::-1]:
            if self._try("json", json.dumps(part))[1] == why:
                return f"at {'.'.join(path)}: " if path else ""
        return ""

    @cached_property
    def _words(self) -> Any:
        """llguidance's tokenizer."""
        import llguidance.hf

        if not self._ends:
            raise ConfigError("structured output needs a model with an end-of-text token, and this one has none")
        tokenizer = self._tokenizer()
        try:
            return llguidance.hf.from_tokenizer(tokenizer.inner, n_vocab=self._n_vocab, eos_token=self._ends)
        except ValueError as e:
            raise ConfigError(f"structured output cannot read the tokenizer {tokenizer.name}: {e}") from e


def _grammar(kind: str, text: str) -> str:
    """What llguidance reads."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(settle(text), defaults={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        ways = " | ".join(json.dumps(way, ensure_ascii=False) for way in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {ways}")
    return grammar_from("grammar", text)


def _short(why: str) -> str:
    """Both ends of a message: some quote the whole grammar in between."""
    return why if len(why) <= 1000 else f"{why[:500]} ... {why[-500:]}"


class Matcher:
    """The grammar of one output (saguaro.engine.grammar.Grammar)."""

    def __init__(self, beginning: Any, renew: Callable[[], Any], ends: Sequence[int], n_vocab: int) -> None:
        self._renew, self._n_renewals, self._ends = renew, MAX_RENEWALS, frozenset(ends)
        bits = np.zeros(-(-n_vocab // 8) * 8, np.uint8)
        bits[list(ends)] = 1
        self._only_end: NDArray[Any] = np.packbits(bits, bitorder="little")
        self._state, self._text, self._is_exhausted = beginning.deep_copy(), list[int](), False

    def mask(self, output: Sequence[int]) -> NDArray[Any]:  # [V / 8] uint8
        """Which tokens may follow; the end alone after what the grammar does not allow, and where a limit is hit."""
        return self._ask(self._look, output, self._only_end)

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end of text, is complete."""
        return self._ask(lambda text: self._reach(text) and bool(self._state.is_accepting()), output, False)

    def _ask(self, question: Callable[[Sequence[int]], T], output: Sequence[int], otherwise: T) -> T:
        """The answer, from a grammar compiled anew if a limit is hit: others may have used it up."""
        for _ in range(2):
            answer = question(output)
            if not (self._state.is_error() or self._is_exhausted):
                return answer
            if self._n_renewals == 0:
                break
            self._n_renewals -= 1
            self._state, self._text = self._renew().deep_copy(), []
        return otherwise

    def _look(self, output: Sequence[int]) -> NDArray[Any]:
        return self._bits() if self._reach(output) else self._only_end

    def _bits(self) -> NDArray[Any]:
        return np.frombuffer(self._state.compute_bitmask(), np.uint8)[: len(self._only_end)]

    def _reach(self, output: Sequence[int]) -> bool:
        """Move to this text: take back what differs, then go on as far as the grammar allows; whether to its end."""
        n = min(len(self._text), len(output))
        while self._text[:n] != output[:n]:  # texts differ in what was speculated, at their ends
            n -= 1
        if n < len(self._text):
            self._state.rollback(len(self._text) - n)
            del self._text[n:]
        new = output[n:]
        until = next((at for at, token in enumerate(new) if token in self._ends), len(new))
        n_taken = self._state.try_consume_tokens(list(new[:until]))
        self._text += new[:n_taken]
        # At its limit llguidance refuses a token without an error, though its mask allows it.
        self._is_exhausted = n_taken < until and bool(self._bits()[new[n_taken] // 8] >> (new[n_taken] % 8) & 1)
        return len(self._text) == len(output)


def _parts(schema: Any) -> list[tuple[list[str], Any]]:
    """Every object in a schema with the way to it, outer ones before inner ones.

    >>> _parts({"items": [{"type": "null"}]})
    [([], {'items': [{'type': 'null'}]}), (['items', '0'], {'type': 'null'})]
    """
    found: list[tuple[list[str], Any]] = []
    ahead: list[tuple[list[str], Any]] = [([], schema)]
    while ahead:
        path, part = ahead.pop()
        if isinstance(part, dict):
            found.append((path, part))
        inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        ahead += [([*path, str(key)], value) for key, value in inner]
    return found

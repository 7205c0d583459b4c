"""Grammars of a tokenizer's tokens, compiled by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF.

Invariant: the state of an output is a function of its tokens. To move to another text, the differing end is rolled
back, so speculated tokens, rejections and preemption need no special case.

llguidance is imported when the first grammar is compiled.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from saguaro.config import Structured
from saguaro.errors import ConfigError
from saguaro.model.compiler import Compiler, is_too_ambiguous
from saguaro.model.tokenizer import Tokenizer

T = TypeVar("T")

MAX_CACHED = 64  # compiled grammars kept
MAX_RENEWALS = 8  # times one output may recompile a grammar that hit a limit
SLOW_SECONDS = 0.02  # CPU time of one mask above which a row counts as slow


class Grammars:
    """Compiles and caches grammars for one tokenizer, and starts outputs. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], n_vocab: int, ends: Collection[int]) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab  # called when the first grammar is compiled
        self._ends = sorted(token for token in ends if token < n_vocab)
        self._compiled: OrderedDict[Structured, Any] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # held for look-up, not for compilation

    def start(self, structured: Structured) -> "Matcher":
        """The matcher of an empty output; raises if the grammar cannot be compiled."""
        return Matcher(self.compile(structured), partial(self._renew, structured), self._ends, self._n_vocab)

    def compile(self, structured: Structured) -> Any:
        """llguidance's matcher in its initial state, which callers copy; ConfigError says what is wrong."""
        with self._lock:
            found = self._compiled.get(structured)
            if found is not None:
                self._compiled.move_to_end(structured)
                return found
        matcher = self._compiler(structured.kind, structured.text)
        with self._lock:
            self._compiled[structured] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def has(self, structured: Structured) -> bool:
        """Whether a grammar is in the cache; marks it as recently used."""
        with self._lock:
            is_there = structured in self._compiled
            if is_there:
                self._compiled.move_to_end(structured)
            return is_there

    def _renew(self, structured: Structured) -> Any:
        """Compile again: outputs of one grammar share its lexer states, and so their limit."""
        with self._lock:
            self._compiled.pop(structured, None)
        return self.compile(structured)

    def warm(self) -> None:
        """Read the tokenizer before the first grammar: reading it holds the GIL."""
        _ = self._compiler

    @cached_property
    def setting(self) -> dict[str, Any]:
        """A Compiler's arguments: plain values that can be sent to another process."""
        if not self._ends:
            raise ConfigError("structured output needs a model with an end-of-text token, and this one has none")
        tokenizer = self._tokenizer()
        backend = getattr(tokenizer.inner, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"structured output cannot read the tokenizer {tokenizer.name}: it has no tokenizer.json")
        plain = copy(backend)
        plain.no_padding()
        plain.no_truncation()
        return {"tokenizer": plain.to_str(), "n_vocab": self._n_vocab, "ends": self._ends}

    @cached_property
    def _compiler(self) -> Compiler:
        setting = self.setting
        try:
            return Compiler(**setting)
        except ValueError as e:
            raise ConfigError(f"structured output cannot read the tokenizer {self._tokenizer().name}: {e}") from e


class Matcher:
    """The grammar of one output (saguaro.target.grammar.Grammar)."""

    def __init__(self, beginning: Any, renew: Callable[[], Any], ends: Sequence[int], n_vocab: int) -> None:
        self._renew, self._n_renewals, self._ends = renew, MAX_RENEWALS, frozenset(ends)
        bits = np.zeros(-(-n_vocab // 8) * 8, np.uint8)
        bits[list(ends)] = 1
        self._only_end: NDArray[Any] = np.packbits(bits, bitorder="little")
        self._beginning, self._state = beginning, beginning.deep_copy()
        self._text, self._is_exhausted = list[int](), False
        self._beyond: list[int] | None = None  # a text that is too ambiguous, as is every text that begins with it
        self.is_slow = False  # whether the last mask took long

    def mask(self, output: Sequence[int]) -> NDArray[Any]:  # [V / 8] uint8
        """The allowed next tokens; only end-of-text if the output violates the grammar or a limit is hit."""
        began = time.thread_time()
        mask = self._ask(self._look, output, self._only_end)
        self.is_slow = time.thread_time() - began > SLOW_SECONDS
        return mask

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end of text, is complete."""
        return self._ask(lambda text: self._reach(text) and bool(self._state.is_accepting()), output, False)

    def _ask(self, question: Callable[[Sequence[int]], T], output: Sequence[int], otherwise: T) -> T:
        """The answer for this output. If a shared limit is hit, recompile the grammar and try once more."""
        if self._beyond is not None and list(output[: len(self._beyond)]) == self._beyond:
            return otherwise
        for _ in range(2):
            answer = question(output)
            if not (self._state.is_error() or self._is_exhausted):
                return answer
            is_ambiguous = is_too_ambiguous(self._state)  # depends on the text: recompiling does not help
            if is_ambiguous:
                self._beyond = list(output)
            if self._n_renewals == 0:
                break
            self._n_renewals -= 1
            self._beginning = self._beginning if is_ambiguous else self._renew()
            self._state, self._text = self._beginning.deep_copy(), []
            if is_ambiguous:
                break
        return otherwise

    def _look(self, output: Sequence[int]) -> NDArray[Any]:
        return self._bits() if self._reach(output) else self._only_end

    def _bits(self) -> NDArray[Any]:
        return np.frombuffer(self._state.compute_bitmask(), np.uint8)[: len(self._only_end)]

    def _reach(self, output: Sequence[int]) -> bool:
        """Move to this text: roll back the differing end, then consume what the grammar allows; whether it is all."""
        n = min(len(self._text), len(output))
        while self._text[:n] != output[:n]:  # texts differ only in speculated tokens, at their ends
            n -= 1
        if n < len(self._text):
            self._state.rollback(len(self._text) - n)
            del self._text[n:]
            # llguidance keeps its last mask by row and lexer state, which another text may have too; this replaces it.
            self._state.compute_bitmask()
        new = output[n:]
        until = next((at for at, token in enumerate(new) if token in self._ends), len(new))
        n_taken = self._state.try_consume_tokens(list(new[:until]))
        self._text += new[:n_taken]
        # At its limit llguidance refuses, without an error, a token that its mask allows.
        self._is_exhausted = n_taken < until and bool(self._bits()[new[n_taken] // 8] >> (new[n_taken] % 8) & 1)
        return len(self._text) == len(output)

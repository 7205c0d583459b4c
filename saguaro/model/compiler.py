"""Compile grammars to llguidance matchers, within limits that count work, not time.

Invariant: whether a grammar is refused depends on its text and the tokenizer, not on the machine or its load. LIMITS
bound the work that llguidance counts: one mask takes at most about 0.2 seconds of a core. On a server a separate
process bounds the rest (saguaro.serve.isolated); so this file imports neither torch nor transformers.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from saguaro.errors import ConfigError
from saguaro.model.one_of import settle

# What each limit bounds, measured with 49,152 tokens on one core:
#   initial_lexer_fuel  regular expressions such as (((a{100}){100}){100}){100}: 0.1 s (llguidance's own limit: 1.2 s).
#                       An enumeration of 5,000 values needs 100,000.
#   max_lexer_states    memory: a state takes 1 to 2 kB, and outputs of one grammar share them.
#   max_items_in_row    ambiguity of a text; the time per byte grows with its cube. An object with 500 optional
#                       properties needs 2,000, though it is not ambiguous.
#   step_max_items      rules tried for one mask. 500 optional properties need 20,000.
_LEXER: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000}
# The ambiguity of a JSON schema cannot grow with the text: brackets and commas separate its rules.
_REGULAR: dict[str, Any] = {"max_items_in_row": 2_000, "step_max_items": 25_000}
LIMITS: dict[str, dict[str, Any]] = {
    "json": _LEXER | _REGULAR,
    "regex": _LEXER | _REGULAR,
    "choice": _LEXER | _REGULAR,
    "grammar": _LEXER | {"max_items_in_row": 500, "step_max_items": 10_000},
}
MAX_TRIED = 200  # parts of a schema that are tried to locate an error
TRY_SECONDS = 0.5  # CPU time for that
# A space, or a newline and its indentation: small models can write unbounded whitespace endlessly. A schema may allow
# other whitespace with "x-guidance".
WHITESPACE = r"( |\n[ \t]{0,32})"
_AMBIGUOUS = "too many rules apply at once; make it less ambiguous, or write its words as one terminal"
# llguidance's messages for its limits, and ours.
_LIMITED = (
    ("too many expressions constructed", "its regular expressions are too large; use fewer or smaller repetitions"),
    (
        "initial lexer configuration (grammar) too big",
        "its regular expressions are too large; use fewer or smaller ones",
    ),
    ("fuel exhausted", "its regular expressions are too complex; use simpler ones"),
    ("too many states", "its regular expressions have too many states; use simpler ones"),
    ("Too many items", _AMBIGUOUS),
    ("Current row has", _AMBIGUOUS),
    ("NoExtensionBias", "no text matches it"),
)


class Compiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: str, n_vocab: int, ends: Sequence[int]) -> None:
        """tokenizer: the content of tokenizer.json; ValueError if llguidance cannot read it."""
        from llguidance import LLTokenizer

        self._words, self._ends = LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=list(ends)), list(ends)

    def __call__(self, kind: str, text: str) -> Any:
        """llguidance's matcher at the start of an output; ConfigError says what is wrong and where."""
        matcher, why = self._try(kind, text)
        if matcher is not None:
            return matcher
        if kind == "json":
            why = f"{self._where(json.loads(text), why)}{why}"
        raise ConfigError(f"structured.{kind} cannot be served: {_short(why)}")

    def _try(self, kind: str, text: str) -> tuple[Any, str]:
        """A compiled grammar, or None and the error."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(kind, text)
        except (ValueError, RecursionError) as e:
            return None, str(e)
        limits = LLParserLimits(**LIMITS[kind], verbose_errors=False)
        matcher = LLMatcher(self._words, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            self._look_ahead(matcher)
        return (None, why_of(matcher)) if matcher.is_error() else (matcher, "")

    def _look_ahead(self, matcher: Any) -> None:
        """Compute the first mask and the mask after one token: a grammar that fails there is refused at once."""
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return
        bits = int.from_bytes(mask, "little")
        for end in self._ends:
            bits &= ~(1 << end)
        if bits:
            matcher.try_consume_tokens([(bits & -bits).bit_length() - 1])
            if not matcher.is_error():
                matcher.compute_bitmask()
            if not matcher.is_error():
                matcher.reset()

    def _where(self, schema: Any, why: str) -> str:
        """The innermost part of a schema with this error, as `at properties.age: `; empty if it is not found in
        time."""
        until = time.thread_time() + TRY_SECONDS
        for path, part in _parts(schema)[-MAX_TRIED:][::-1]:
            if time.thread_time() > until:
                break
            if self._try("json", json.dumps(part))[1] == why:
                return f"at {'.'.join(path)}: " if path else ""
        return ""


def checker(setting: dict[str, Any]) -> Callable[..., None]:
    """For a separate process: a function that compiles a grammar and discards it; setting: a Compiler's arguments."""
    compiler = Compiler(**setting)

    def check(kind: str, text: str) -> None:
        compiler(kind, text)

    return check


def why_of(matcher: Any) -> str:
    """A matcher's error as a readable message."""
    message: str = matcher.get_error().replace("<non-verbose/>", "").strip()
    return next((ours for theirs, ours in _LIMITED if theirs in message), message)


def is_too_ambiguous(matcher: Any) -> bool:
    """Whether too many rules applied at once. This depends on the text only; other limits are shared by outputs."""
    return why_of(matcher) == _AMBIGUOUS


def _grammar(kind: str, text: str) -> str:
    """The grammar in llguidance's format."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(settle(text), defaults={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        ways = " | ".join(json.dumps(way, ensure_ascii=False) for way in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: WAY\nWAY: {ways}")  # one terminal for any number of choices
    return grammar_from("grammar", text)


def _short(why: str) -> str:
    """Shorten a message to its two ends: some quote the whole grammar."""
    return why if len(why) <= 1000 else f"{why[:500]} ... {why[-500:]}"


def _parts(schema: Any) -> list[tuple[list[str], Any]]:
    """Every object in a schema with its path, outer ones before inner ones.

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

"""Colours tokens by origin: prepared, drafted just in time, or the target's own."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from rich.console import Console

from saguaro.engine.results import Delta
from saguaro.model.tokenizer import TextStream, Tokenizer

ColorMode = Literal["auto", "always", "never"]

CONTEXT = 4  # prompt tokens that may affect the text of the first output token
OWN, HIT, MISS = "own", "hit", "miss"
STYLES = {OWN: "", HIT: "\x1b[32m", MISS: "\x1b[33m"}  # default, green, yellow
RESET = "\x1b[0m"
LABELS = {HIT: "prepared while verifying (hit)", MISS: "drafted just in time", OWN: "the target's own"}


class Painter:
    """Colours one output's deltas. A character belongs to the token that completed it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._stream = TextStream(tokenizer, context=prompt[-CONTEXT:])
        self._waiting: deque[tuple[str, str]] = deque()  # (text, origin) decoded but not yet in a delta
        self.n_tokens: Counter[str] = Counter()  # by origin

    def paint(self, delta: Delta) -> str:
        """The delta's text with colours."""
        origins = origins_of(delta)
        self.n_tokens.update(origins)
        self._waiting.extend(zip(map(self._stream.push, delta.token_ids), origins, strict=True))
        pieces = self._take(len(delta.text))
        if "".join(text for text, _ in pieces) != delta.text:  # half a character at the end: use the main origin
            pieces = [(delta.text, Counter(origins).most_common(1)[0][0] if origins else OWN)]
        return "".join(colored(text, origin) for text, origin in pieces)

    def legend(self) -> str:
        """One line: the colours, and the number of tokens of each."""
        return legend(self.n_tokens)

    def _take(self, n: int) -> list[tuple[str, str]]:
        """The next n characters. Deltas lag behind, as the engine holds back the beginnings of stop strings."""
        taken = []
        while n > 0 and self._waiting:
            text, origin = self._waiting.popleft()
            if len(text) > n:
                self._waiting.appendleft((text[n:], origin))
            taken.append((text[:n], origin))
            n -= len(text)
        return taken


def origins_of(delta: Delta) -> list[str]:
    """The origin of each token of a delta.

    >>> origins_of(Delta("a", 0, "", [5, 6, 7], [], source="cache", n_accepted=2))
    ['hit', 'hit', 'own']
    """
    speculated = HIT if delta.source == "cache" else MISS
    return [speculated if at < delta.n_accepted else OWN for at in range(len(delta.token_ids))]


def colored(text: str, origin: str) -> str:
    """The text in its origin's colour."""
    return f"{STYLES[origin]}{text}{RESET}" if text and STYLES[origin] else text


def legend(n_tokens: Counter[str] | None = None) -> str:
    """One line: the colours, and the number of tokens of each if given."""
    counted = {origin: f"{n_tokens[origin]} " if n_tokens is not None else "" for origin in LABELS}
    return ", ".join(colored(f"{counted[origin]}{label}", origin) for origin, label in LABELS.items())


def wants_color(mode: ColorMode) -> bool:
    """Whether to use colours: on a terminal, unless it is dumb or NO_COLOR is set."""
    console = Console()
    is_fit = console.is_terminal and not console.is_dumb_terminal and not console.no_color
    return mode == "always" or (mode == "auto" and is_fit)

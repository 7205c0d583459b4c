"""Drafting without a model: what followed the last time the text ended like this (prompt lookup).

Good where the output repeats the input (editing, summaries, code), useless elsewhere; it costs next to nothing. Every
run of `shortest` to `longest` tokens of a row is indexed once, so a look-up does not grow with the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from saguaro.draft.texts import Texts
from saguaro.types import Joined, Outcome, Speculation


@dataclass
class _Index:
    """Where each run of tokens was last followed by something."""

    n_read: int = 0  # tokens of the text whose preceding runs are indexed
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # run -> position after it


class Ngram:
    """Finds the longest recent run that a row's text ends with, and proposes what came after it."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest
        self._texts = Texts()
        self._indexes: dict[int, _Index] = {}

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these texts; they are indexed when they are first asked for."""
        self._texts.admit(rows)
        self._indexes.update({row.slot: _Index() for row in rows})

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these texts."""
        self._texts.retire(slots)
        for slot in slots:
            self._indexes.pop(slot, None)

    def commit(self, outcome: Outcome) -> None:
        """Append what the target accepted and put."""
        self._texts.commit(outcome)

    def draft(self, slots: Sequence[int], lookahead: int) -> Speculation:
        """What followed each row's ending before; nothing where it is new.

        >>> ngram = Ngram()
        >>> ngram.admit([Joined(0, [5, 6, 7, 8, 9, 5, 6]), Joined(1, [1, 2, 3])])
        >>> spec = ngram.draft([0, 1], lookahead=3)
        >>> spec.tokens[0].tolist(), spec.length.tolist()
        ([7, 8, 9], [3, 0])
        """
        proposed = {slot: self._follow(self._texts[slot], self._indexes[slot], lookahead) for slot in slots}
        return self._texts.propose(proposed, lookahead)

    def _follow(self, text: list[int], index: _Index, lookahead: int) -> list[int]:
        for at in range(index.n_read, len(text)):  # text[at] follows the runs that end before it
            for n in range(self._shortest, min(self._longest, at) + 1):
                index.after[tuple(text[at - n : at])] = at
        index.n_read = len(text)
        for n in range(min(self._longest, len(text)), self._shortest - 1, -1):
            at = index.after.get(tuple(text[-n:]), -1)
            if at >= 0:
                return text[at : at + lookahead]
        return []

"""Drafting without a model: what followed the last time the text ended like this (prompt lookup).

Good where the output repeats the input (editing, summaries, code), useless elsewhere; it costs next to nothing. Every
run of `shortest` to `longest` tokens of a row is indexed once, so a look-up does not grow with the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import NGRAM


@dataclass
class _Index:
    """Where each run of tokens was last followed by something."""

    n_read: int = 0  # tokens of the text whose preceding runs are indexed
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # run -> position after it


class Ngram:
    """Finds the longest recent run that a row's text ends with, and proposes what came after it."""

    source = NGRAM

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest
        self._indexes: WeakKeyDictionary[DraftRow, _Index] = WeakKeyDictionary()

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """What followed each row's ending before; nothing where it is new.

        >>> from saguaro.draft.rows import DraftRows
        >>> from saguaro.types import Joined
        >>> seen = DraftRows().admit([Joined(0, [5, 6, 7, 8, 9, 5, 6]), Joined(1, [1, 2, 3])])
        >>> Ngram().propose(seen, lookahead=3).tokens
        [[7, 8, 9], []]
        """
        indexes = [self._indexes.setdefault(row, _Index()) for row in rows]
        return Proposal([self._follow(row.text, index, lookahead) for row, index in zip(rows, indexes, strict=True)])

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

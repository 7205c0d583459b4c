"""Drafting without a model: propose the tokens that followed an earlier occurrence of the text's end (prompt lookup).

Useful if the output repeats the input (editing, summaries, code). The cost is negligible: every run of `shortest` to
`longest` tokens of a row is indexed once, so the time of a look-up does not depend on the length of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import NGRAM


@dataclass
class _Index:
    """The last position of each run of tokens."""

    n_read: int = 0  # tokens of the text that are indexed
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # run -> position after it


class Ngram:
    """Finds the longest run that a row's text ends with, and proposes the tokens after its last occurrence."""

    source = NGRAM

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest
        self._indexes: WeakKeyDictionary[DraftRow, _Index] = WeakKeyDictionary()

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """The tokens that followed an earlier occurrence; empty if there is none.

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

"""Random tokens: the paper's backup without cost.

They do not depend on any distribution, so under rejection their q is one-hot.
"""

from collections.abc import Sequence
from random import Random

from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import RANDOM


class RandomTokens:
    """Proposes uniformly random tokens."""

    source = RANDOM

    def __init__(self, n_vocab: int, seed: int = 0) -> None:
        self._n_vocab, self._chance = n_vocab, Random(seed)

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """`lookahead` tokens per row.

        >>> [len(tokens) for tokens in RandomTokens(100).propose([None, None], 3).tokens]
        [3, 3]
        """
        return Proposal([[self._chance.randrange(self._n_vocab) for _ in range(lookahead)] for _ in rows])

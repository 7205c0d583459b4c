"""How long steps take, learnt from the steps there were, and how many tokens of a text fit into a given time.

    seconds of a step = step + token x tokens computed + pair x pairs of tokens that attention visits

A token at position p visits p + 1 pairs, so a token late in a long prompt can take ten times as long as its first.
Steps without prompts correct the first coefficient, those with prompts the other two, each in proportion to its share
of the expected time, so all stay positive. What is decided by it is when tokens are computed, never which.
"""

import math
from dataclasses import dataclass

AT_FIRST = (16.0, 1.0, 0.002)  # the coefficients' ratio before anything was measured: about a CPU's
RATE = 0.5  # of what a step took more or less than expected (as a logarithm), how much is learnt from it
MOST = 4.0  # a step that took longer or shorter than expected by more than this factor says no more than that
LEAST = (1e-6, 1e-9, 1e-12)  # seconds: no coefficient becomes smaller, however short steps are


@dataclass(frozen=True)
class Work:
    """What a step computes."""

    n_tokens: int = 0
    n_pairs: int = 0

    @staticmethod
    def of(start: int, n_tokens: int) -> "Work":
        """So many tokens of one text, from a position on.

        >>> Work.of(0, 3), Work.of(10, 1)
        (Work(n_tokens=3, n_pairs=6), Work(n_tokens=1, n_pairs=11))
        """
        return Work(n_tokens, n_tokens * start + n_tokens * (n_tokens + 1) // 2)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.n_tokens + other.n_tokens, self.n_pairs + other.n_pairs)


class StepCost:
    """What steps cost.

    >>> pace = StepCost()
    >>> for _ in range(200):
    ...     for work in (Work.of(50, 5), Work.of(0, 200), Work.of(4000, 50)):
    ...         pace.learn(work, 0.01 + 0.001 * work.n_tokens + 2e-6 * work.n_pairs, work.n_tokens == 5)
    >>> round(pace.seconds(Work.of(0, 1)), 3), pace.room(0.2, start=0), pace.room(0.2, start=8000)
    (0.011, 170, 11)
    """

    def __init__(self) -> None:
        self._coefficients = AT_FIRST
        self._is_known = False

    def seconds(self, work: Work) -> float:
        """How long a step of this is expected to take; 0 before the first was measured."""
        return sum(self._parts(work)) if self._is_known else 0.0

    def more_seconds(self, work: Work) -> float:
        """How much longer a step takes with this in it."""
        return sum(self._parts(work)[1:]) if self._is_known else 0.0

    def room(self, seconds: float, start: int) -> int:
        """How many tokens of a text, from a position on, make a step longer by at most so many seconds; none
        before the first was measured."""
        if not self._is_known or seconds <= 0:
            return 0
        _, token, pair = self._coefficients
        linear = token + pair * (start + 0.5)  # solves token n + pair (n start + n (n + 1) / 2) = seconds
        return int(2 * seconds / (linear + math.sqrt(linear**2 + 2 * pair * seconds)))

    def learn(self, work: Work, seconds: float, is_plain: bool = False) -> None:
        """A step of this took so long. A plain one, without prompts, tells what any step costs, and only that."""
        if not self._is_known:
            factor = max(seconds, LEAST[0]) / sum(self._parts(work))
            self._coefficients = (AT_FIRST[0] * factor, AT_FIRST[1] * factor, AT_FIRST[2] * factor)
            self._is_known = True
            return
        step, token, pair = self._coefficients
        base, by_token, by_pair = self._parts(work)
        if is_plain:
            step *= _correction(base, seconds - by_token - by_pair)
        else:
            read = by_token + by_pair
            power = _correction(read, seconds - base)
            token, pair = token * power ** (by_token / read), pair * power ** (by_pair / read)
        self._coefficients = (max(step, LEAST[0]), max(token, LEAST[1]), max(pair, LEAST[2]))

    def _parts(self, work: Work) -> tuple[float, float, float]:
        step, token, pair = self._coefficients
        return step, token * work.n_tokens, pair * work.n_pairs


def _correction(expected: float, seconds: float) -> float:
    """The factor by which an expectation is corrected.

    >>> _correction(0.1, 0.1), _correction(0.1, 0.4), _correction(0.1, 100.0), _correction(0.1, -1.0)
    (1.0, 2.0, 2.0, 0.5)
    """
    return math.pow(min(max(seconds / expected, 1 / MOST), MOST), RATE)


@dataclass(frozen=True)
class LatencyBudget:
    """How long a step may keep decoding rows waiting when prompts are read beside them.

    >>> LatencyBudget(0.2).seconds(plain=0.3), LatencyBudget(0.2, n_rounds=4).seconds(plain=0.3)
    (0.2, 1.2)
    """

    limit: float = math.inf  # seconds
    n_rounds: float = 0.0  # or as long as so many steps without prompts take, if that is longer

    def seconds(self, plain: float) -> float:
        """The longest time of a step, if one without prompts takes so long."""
        return max(self.limit, self.n_rounds * plain)


UNBOUND = LatencyBudget()

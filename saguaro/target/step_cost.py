"""A model of step times, fitted online, and how many tokens of a text fit into a given time.

    seconds of a step = step + token x tokens computed + pair x pairs of tokens that attention visits

A token at position p visits p + 1 pairs, so a token late in a long prompt can take ten times as long as its first.
Steps without prompts correct the first coefficient, those with prompts the other two, each in proportion to its share
of the expected time, so all stay positive. This affects when tokens are computed, never which tokens.
"""

import math
from dataclasses import dataclass

AT_FIRST = (16.0, 1.0, 0.002)  # initial ratio of the coefficients: about a CPU's
RATE = 0.5  # the share of the error (as a logarithm) that one step corrects
MOST = 4.0  # limit of the factor between measured and expected time
LEAST = (1e-6, 1e-9, 1e-12)  # seconds: lower bounds of the coefficients


@dataclass(frozen=True)
class Work:
    """The work of a step."""

    n_tokens: int = 0
    n_pairs: int = 0

    @staticmethod
    def of(start: int, n_tokens: int) -> "Work":
        """The work of n_tokens of one text, from position start.

        >>> Work.of(0, 3), Work.of(10, 1)
        (Work(n_tokens=3, n_pairs=6), Work(n_tokens=1, n_pairs=11))
        """
        return Work(n_tokens, n_tokens * start + n_tokens * (n_tokens + 1) // 2)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.n_tokens + other.n_tokens, self.n_pairs + other.n_pairs)


class StepCost:
    """The fitted step times.

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
        """Expected time of a step; 0 before the first measurement."""
        return sum(self._parts(work)) if self._is_known else 0.0

    def more_seconds(self, work: Work) -> float:
        """Time that this work adds to a step."""
        return sum(self._parts(work)[1:]) if self._is_known else 0.0

    def room(self, seconds: float, start: int) -> int:
        """How many tokens of a text, from position start, add at most `seconds` to a step; 0 before a measurement."""
        if not self._is_known or seconds <= 0:
            return 0
        _, token, pair = self._coefficients
        linear = token + pair * (start + 0.5)  # solves token n + pair (n start + n (n + 1) / 2) = seconds
        return int(2 * seconds / (linear + math.sqrt(linear**2 + 2 * pair * seconds)))

    def learn(self, work: Work, seconds: float, is_plain: bool = False) -> None:
        """Update with a measured step. A plain step, without prompts, corrects only the constant term."""
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
    """The factor that corrects an expected time.

    >>> _correction(0.1, 0.1), _correction(0.1, 0.4), _correction(0.1, 100.0), _correction(0.1, -1.0)
    (1.0, 2.0, 2.0, 0.5)
    """
    return math.pow(min(max(seconds / expected, 1 / MOST), MOST), RATE)


@dataclass(frozen=True)
class LatencyBudget:
    """The maximum time of a step that reads prompts while rows decode.

    >>> LatencyBudget(0.2).seconds(plain=0.3), LatencyBudget(0.2, n_rounds=4).seconds(plain=0.06)
    (0.2, 0.24)
    >>> LatencyBudget(0.2, n_rounds=4, most=0.3).seconds(plain=0.1)
    0.3
    """

    limit: float = math.inf  # seconds
    n_rounds: float = 0.0  # or the time of this many steps without prompts, if longer
    most: float = math.inf  # seconds: the largest limit that n_rounds gives

    def seconds(self, plain: float) -> float:
        """The maximum time of a step, given the time of one without prompts."""
        return max(self.limit, min(self.n_rounds * plain, self.most))


UNBOUND = LatencyBudget()

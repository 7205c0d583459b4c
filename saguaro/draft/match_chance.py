"""How likely a token that followed earlier is to follow again, learnt while decoding.

A candidate comes from a run at the text's end that occurred before. What is known of it: how long the run is, the
candidate's share of the run's followers, how often the run was followed, and whether a longer run was asked first. How
often the target chose a candidate of such a kind is counted, at every token of an output and whether it was offered or
not, and that rate is its probability. Rows with noise are counted apart. Counts decay and start from an assumption.
"""

from bisect import bisect_right
from typing import Any

from saguaro.draft.policy.kept import numbers

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 13, 17, 25, 40)  # bin edges: of a run, in tokens
SHARES = (0.2, 0.45, 0.7, 0.95)  # of a candidate among a run's followers
TIMES = (2, 4)  # that a run was followed
RANKS = 2  # the longest run that occurred before, and shorter ones
KEPT = 0.995  # of a bin's counts, per trial
STRENGTH = 6.0  # weight of the assumption in each bin, in trials
LEAST, MOST = 1e-4, 0.995  # of a probability

N_LENGTHS, N_SHARES, N_TIMES = len(LENGTHS) + 1, len(SHARES) + 1, len(TIMES) + 1
N_BINS = 2 * RANKS * N_LENGTHS * N_SHARES * N_TIMES


class MatchChances:
    """The counts."""

    def __init__(self) -> None:
        self._assumed = [_assumed(at) for at in range(N_BINS)]
        self._hits, self._trials = [0.0] * N_BINS, [0.0] * N_BINS
        self._rate = list(self._assumed)

    def first_bin(self, length: int, times: int, rank: int, is_greedy: bool) -> int:
        """The bin of a candidate with the smallest share, of a run of this length that was followed so often."""
        at = (is_greedy * RANKS + min(rank, RANKS - 1)) * N_LENGTHS + bisect_right(LENGTHS, length)
        return (at * N_TIMES + bisect_right(TIMES, times)) * N_SHARES

    def rate(self, at: int) -> float:
        """The probability of a candidate of this bin.

        >>> chances = MatchChances()
        >>> at = chances.first_bin(length=9, times=1, rank=0, is_greedy=True) + bisect_right(SHARES, 1.0)
        >>> before = chances.rate(at)
        >>> for _ in range(100):
        ...     chances.learn(at, is_hit=True)
        >>> before < chances.rate(at) > 0.97
        True
        """
        return self._rate[at]

    def learn(self, at: int, is_hit: bool) -> None:
        """Add a candidate of this bin, and whether it was the target's token."""
        self._hits[at] = KEPT * self._hits[at] + is_hit
        self._trials[at] = KEPT * self._trials[at] + 1.0
        self._refresh(at)

    def state(self) -> list[list[float]]:
        """To be kept (policy/kept.py)."""
        return [list(self._hits), list(self._trials)]

    def restore(self, state: Any) -> None:
        """Continue from kept counts."""
        hits, trials = (numbers(each, N_BINS) for each in state)
        if any(not 0 <= hit <= n for hit, n in zip(hits, trials, strict=True)):
            raise ValueError("hits are not between 0 and trials")
        self._hits, self._trials = list(hits), list(trials)
        for at in range(N_BINS):
            self._refresh(at)

    def _refresh(self, at: int) -> None:
        rate = (self._hits[at] + STRENGTH * self._assumed[at]) / (self._trials[at] + STRENGTH)
        self._rate[at] = min(max(rate, LEAST), MOST)


def share_bin(share: float) -> int:
    """What a share adds to the first bin of its run."""
    return bisect_right(SHARES, share)


def _assumed(at: int) -> float:
    """What is assumed of a bin before any trial: long runs go on as before, candidates of shorter runs are unlikely."""
    at, share = divmod(at, N_SHARES)
    at, _ = divmod(at, N_TIMES)
    at, length = divmod(at, N_LENGTHS)
    edges = (0.0, *SHARES, 1.0)
    usual = (edges[share] + edges[share + 1]) / 2
    run = (1, *LENGTHS)[length]
    return usual * run / (run + 2) * (1.0 if at % RANKS == 0 else 0.2)

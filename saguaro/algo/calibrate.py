"""Estimate a draft's statistics from recorded rounds: acceptance rate, outcome distribution, hit table, miss exponent.

Invariant: every table is valid input for fanout.py: p_k sums to 1; h[k, 0] = 0 and h[k] never falls. Rounds after a
primary and rounds after a backup speculation are recorded and measured separately.
Paper: the calibration behind Definition 11 and Theorem 18 (appendix A.2, figure 3).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.algo.theory import check_count
from saguaro.errors import ConfigError


@dataclass(frozen=True)
class Recorded:
    """R rounds of lookahead K, and the draft's rank of each round's bonus token.

    Ranks count from 0 among the draft's candidates at that position. The speculated token is not counted, since it can
    never be the bonus (after full acceptance there is none). -1: not among the first N candidates.
    """

    k: Tensor  # [R] int64: tokens accepted, 0..K
    rank: Tensor  # [R] int64: -1..N-1
    K: int  # the lookahead
    N: int  # number of recorded candidates

    def __post_init__(self) -> None:
        check_count("K", self.K)
        check_count("N", self.N, least=1)
        if self.k.dim() != 1 or self.k.shape != self.rank.shape:
            raise ConfigError(f"k is {tuple(self.k.shape)} and rank {tuple(self.rank.shape)}; give one of each a round")
        if len(self.k) == 0:
            raise ConfigError("0 rounds recorded; record at least 1 round before calibrating")
        for name, values, low, high in (("k", self.k, 0, self.K), ("rank", self.rank, -1, self.N - 1)):
            if int(values.min()) < low or int(values.max()) > high:
                found = f"{int(values.min())} to {int(values.max())}"
                raise ConfigError(f"{name} goes from {found}; it must lie from {low} to {high}: check K and N")


@dataclass(frozen=True)
class PowerLaw:
    """P(miss with F candidates) = scale F^-r; Definition 11 has scale 1. The split of Theorem 12 needs r alone."""

    r: float
    scale: float
    rms: float  # root mean square error of the fitted log miss probability


def fit_acceptance_rate(rounds: Recorded) -> float:
    """Maximum-likelihood estimate of a under the capped geometric law: accepted / (accepted + rejected) tokens.

    A round with k < K rejects one token, a round with k = K none.

    >>> rounds = Recorded(torch.tensor([3, 1, 0]), torch.tensor([0, 0, 0]), K=3, N=4)  # 4 accepted, 2 rejected
    >>> fit_acceptance_rate(rounds)
    0.6666666666666666
    """
    _check_speculated(rounds)
    accepted = int(rounds.k.sum())
    return accepted / (accepted + int((rounds.k < rounds.K).sum()))


def acceptance_by_position(rounds: Recorded) -> Tensor:  # [K] float64
    """P(token i is accepted | all before it were), i = 0..K-1; nan where no round reached i.

    >>> acceptance_by_position(Recorded(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 0]), K=3, N=4))
    tensor([0.6667, 0.0000,    nan], dtype=torch.float64)
    """
    _check_speculated(rounds)
    counts = torch.bincount(rounds.k, minlength=rounds.K + 1).double()
    reached = counts.flip(0).cumsum(0).flip(0)  # [K+1]: rounds with at least i accepted
    return reached[1:] / reached[:-1]


def outcome_frequencies(rounds: Recorded) -> Tensor:  # [K+1] float64
    """P(k): the fraction of rounds with exactly k accepted tokens.

    >>> outcome_frequencies(Recorded(torch.tensor([2, 1, 2, 2]), torch.tensor([0, 0, 0, 0]), K=2, N=4))
    tensor([0.0000, 0.2500, 0.7500], dtype=torch.float64)
    """
    return torch.bincount(rounds.k, minlength=rounds.K + 1).double() / len(rounds.k)


def hit_curve(rank: Tensor, N: int) -> Tensor:  # [R] -> [N+1] float64
    """The fraction of rounds whose bonus was among the first F candidates, F = 0..N; all 0 without rounds.

    >>> hit_curve(torch.tensor([0, 2, -1, 0]), N=3)
    tensor([0.0000, 0.5000, 0.5000, 0.7500], dtype=torch.float64)
    """
    hits = torch.bincount(rank[rank >= 0] + 1, minlength=N + 1).cumsum(0).double()
    return hits / max(1, len(rank))


def hit_table(rounds: Recorded, strength: float = 8.0) -> Tensor:  # [K+1, N+1] float64
    """h[k, F], each k shrunk toward a pooled estimate, so that a rare k does not overfit.

    Shrinking has two levels, each with a prior of `strength` rounds. Rejections (k < K) and full acceptance (k = K) are
    shrunk toward all rounds; then each k < K is shrunk toward the rejections. With strength 0 the raw counts are used,
    and a k without rounds gets the curve of the level above.

    >>> rounds = Recorded(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), K=1, N=2)
    >>> hit_table(rounds, strength=0)
    tensor([[0.0000, 0.5000, 1.0000],
            [0.0000, 1.0000, 1.0000]], dtype=torch.float64)
    >>> hit_table(rounds, strength=1)[1, 1]  # (1 round * 1 + 1 imagined * 2/3) / 2
    tensor(0.8333, dtype=torch.float64)
    """
    if not 0 <= strength < math.inf:
        raise ConfigError(f"strength is {strength}; give a number of rounds, at least 0")
    is_rejected = rounds.k < rounds.K
    pooled = hit_curve(rounds.rank, rounds.N)
    rejected = _drawn(rounds.rank[is_rejected], pooled, strength)
    rows = [_drawn(rounds.rank[rounds.k == k], rejected, strength) for k in range(rounds.K)]
    return torch.stack([*rows, _drawn(rounds.rank[~is_rejected], pooled, strength)])


def fit_power_law(h: Tensor) -> PowerLaw:  # [N+1]: hits among the first F candidates
    """Least-squares fit of log P(miss) against log F, F = 1..N; values of F without a miss are left out.

    >>> fit = fit_power_law(torch.tensor([0, 0.5, 0.75, 1 - 0.5 / 3]))  # misses 0.5 / F
    >>> round(fit.r, 4), round(fit.scale, 4), fit.rms < 1e-6
    (1.0, 0.5, True)
    """
    miss = 1 - h.double()[1:]
    known = miss > 0
    if int(known.sum()) < 2:
        raise ConfigError(f"misses at {int(known.sum())} fan-outs; 2 are needed: record more candidates or rounds")
    x = torch.arange(1, len(h), dtype=torch.float64)[known].log()
    y = miss[known].log()
    slope = float((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum())
    level = float(y.mean() - slope * x.mean())
    if not slope < 0:
        raise ConfigError(f"misses do not fall with F (r would be {-slope:.3g}); record more candidates or rounds")
    return PowerLaw(-slope, math.exp(level), float((y - level - slope * x).square().mean().sqrt()))


def _drawn(rank: Tensor, prior: Tensor, strength: float) -> Tensor:  # [R], [N+1] -> [N+1]
    """The hit curve of these rounds with a prior of `strength` rounds."""
    n = len(rank)
    if n + strength == 0:
        return prior
    return (n * hit_curve(rank, len(prior) - 1) + strength * prior) / (n + strength)


def _check_speculated(rounds: Recorded) -> None:
    if rounds.K == 0:
        raise ConfigError("K is 0: no token was speculated; record rounds with a lookahead of at least 1")

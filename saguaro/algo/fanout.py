"""How many bonus tokens to prepare after each number of accepted tokens: fan-out lists F_0 .. F_K.

Invariant: every F_k >= 0 and their sum never exceeds the budget M. p_k [K+1] is the probability that exactly k tokens
are accepted; h [K+1, N+1] is the hit table: h[k, F] is the probability that the bonus is among the first F candidates
given k, so h[k, 0] = 0 and h never falls in F. Lists for rounds after a primary and after a backup speculation come
from separately measured tables. Paper: Definition 11, Theorems 12 and 18.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from saguaro.algo.theory import check_count, check_rate
from saguaro.errors import ConfigError


def uniform(K: int, M: int) -> list[int]:
    """M spread evenly over k = 0..K; the remainder goes to the smallest k.

    >>> uniform(K=3, M=10)
    [3, 3, 2, 2]
    """
    check_count("K", K)
    check_count("M", M)
    share, rest = divmod(M, K + 1)
    return [share + (k < rest) for k in range(K + 1)]


def geometric_shares(a: float, r: float, K: int, M: int) -> list[float]:
    """Theorem 12, real-valued: the split of M with the most hits, for acceptance rate a and miss probability F^-r.

    F_k = F_0 a^(k/(1+r)) for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)). This is F_k proportional to
    P(k)^(1/(1+r)), a form that needs no special case for a = 1 (all to F_K) or a = 0 (all to F_0).

    >>> [round(f, 2) for f in geometric_shares(a=0.8, r=1, K=7, M=24)]
    [3.9, 3.49, 3.12, 2.79, 2.49, 2.23, 2.0, 3.99]
    """
    check_rate("a", a)
    check_exponent(r)
    check_count("K", K)
    check_count("M", M)
    root = 1 / (1 + r)
    weights = [a ** (k * root) * (1 - a) ** root for k in range(K)] + [a ** (K * root)]
    total = math.fsum(weights)
    return [M * w / total for w in weights]


def geometric(a: float, r: float, K: int, M: int) -> list[int]:
    """Theorem 12 rounded to integers that sum to M.

    >>> geometric(a=0.8, r=1, K=7, M=24)
    [4, 3, 3, 3, 3, 2, 2, 4]
    """
    return round_to_budget(geometric_shares(a, r, K, M), M)


def round_to_budget(shares: Sequence[float], M: int) -> list[int]:
    """Round shares to integers that sum to M, each less than 1 from its share: largest-remainder rounding.

    Of equal remainders the smallest k comes first. The shares must sum to M.

    >>> round_to_budget([1.5, 1.2, 1.3], 4)
    [2, 1, 1]
    """
    check_count("M", M)
    total = math.fsum(shares)
    if not math.isclose(total, M, rel_tol=1e-9, abs_tol=1e-9) or min(shares, default=0) < 0:
        raise ConfigError(f"shares {list(shares)} sum to {total}; give shares of at least 0 that sum to M = {M}")
    whole = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: whole[k] - shares[k])  # stable: ties to the smallest k
    for k in by_remainder[: M - sum(whole)]:
        whole[k] += 1
    return whole


def greedy(p_k: Tensor, h: Tensor, M: int) -> list[int]:  # [K+1], [K+1, N+1]
    """Theorem 18 in integers: give one unit at a time to the k where it gains most; ties to the smallest k.

    Optimal for the tables' concave envelopes, hence for concave tables; tables of ranked candidates are nearly concave.
    Elsewhere the units of one linear segment of the envelope are spent in sequence, so at most one k ends inside a
    segment. Units without gain are not spent: the sum may stay below M.

    >>> h = torch.tensor([[0, 0.5, 0.75, 0.875], [0, 0.9, 0.95, 0.96]])
    >>> greedy(torch.tensor([0.6, 0.4]), h, M=3)  # gains 0.4 * 0.9 = 0.36, 0.6 * 0.5 = 0.30, 0.6 * 0.25 = 0.15
    [2, 1]
    """
    check_tables(p_k, h)
    check_count("M", M)
    gains = [[float(p) * gain for gain in unit_gains(row.tolist())] for p, row in zip(p_k, h, strict=True)]
    fan_out = [0] * len(gains)
    for _ in range(M):
        following = [row[n] if n < len(row) else 0.0 for row, n in zip(gains, fan_out, strict=True)]
        best = max(range(len(gains)), key=following.__getitem__)
        if following[best] <= 0:
            break
        fan_out[best] += 1
    return fan_out


def unit_gains(h: Sequence[float]) -> list[float]:
    """The gain of each further candidate on the concave envelope of h(0), .. h(N): N gains, non-increasing.

    >>> unit_gains([0.0, 0.0, 0.5, 0.75])  # the first two candidates are one straight piece
    [0.25, 0.25, 0.25]
    >>> unit_gains([0.0, 0.5, 0.75])
    [0.5, 0.25]
    """
    gains: list[float] = []
    while (start := len(gains)) < len(h) - 1:
        slopes = [(h[end] - h[start]) / (end - start) for end in range(start + 1, len(h))]
        steepest = max(slopes)
        if gains:
            steepest = min(steepest, gains[-1])  # equal except for rounding
        gains += [steepest] * (1 + slopes.index(max(slopes)))
    return gains


def hit_rate(fan_out: Sequence[int], p_k: Tensor, h: Tensor) -> float:  # K+1, [K+1], [K+1, N+1]
    """Definition 11: the probability that the outcome was prepared, the sum over k of P(k) h[k, F_k].

    For an acceptance rate a, p_k is theory.outcome_law(a, K).

    >>> h = torch.tensor([[0, 0.5, 0.75], [0, 0.5, 0.75], [0, 0.9, 1.0]])
    >>> round(hit_rate([2, 1, 1], torch.tensor([0.5, 0.25, 0.25]), h), 4)  # 0.5 * 0.75 + 0.25 * 0.5 + 0.25 * 0.9
    0.725
    """
    check_tables(p_k, h)
    n = h.shape[1] - 1
    if len(fan_out) != len(p_k) or not all(0 <= f <= n for f in fan_out):
        raise ConfigError(f"fan-out {list(fan_out)} does not fit; give K + 1 = {len(p_k)} numbers from 0 to {n}")
    return math.fsum(float(p) * float(row[f]) for p, row, f in zip(p_k, h, fan_out, strict=True))


def power_law(r: float, N: int, scale: float = 1.0) -> Tensor:  # [N+1] float64
    """Definition 11's hits: h(F) = 1 - scale F^-r for F = 1..N, and h(0) = 0.

    The paper's scale is 1, so h(1) = 0: the first candidate alone never hits, and the table is not concave at 1
    (unit_gains spreads the gain of the second over both). Measured candidates have scale < 1. The table is concave for
    scale <= 1 / (2 - 2^-r).

    >>> power_law(1.0, 4)
    tensor([0.0000, 0.0000, 0.5000, 0.6667, 0.7500], dtype=torch.float64)
    >>> power_law(1.0, 2, scale=0.5)
    tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """
    check_exponent(r)
    check_count("N", N)
    check_rate("scale", scale)
    return torch.tensor([0.0] + [1 - scale * f**-r for f in range(1, N + 1)], dtype=torch.float64)


def check_exponent(r: float) -> None:
    """Check the exponent of a power law of misses.

    >>> check_exponent(0.0)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: r is 0.0; give a finite exponent above 0
    """
    if not 0 < r < math.inf:
        raise ConfigError(f"r is {r}; give a finite exponent above 0")


def check_tables(p_k: Tensor, h: Tensor) -> None:  # [K+1], [K+1, N+1]
    """Check an outcome distribution and its hit table.

    >>> check_tables(torch.tensor([1.0]), torch.tensor([[0.0, 0.5, 0.4]]))
    Traceback (most recent call last):
    saguaro.errors.ConfigError: h has a row that does not start at 0 or falls; give hits among the first F candidates
    """
    if p_k.dim() != 1 or h.dim() != 2 or len(p_k) != len(h) or h.numel() == 0:
        shapes = f"p_k is {tuple(p_k.shape)} and h {tuple(h.shape)}"
        raise ConfigError(f"{shapes}; give [K+1] and [K+1, N+1] with one row for each k")
    if not (bool((p_k >= 0).all()) and math.isclose(float(p_k.sum()), 1, abs_tol=1e-4)):
        raise ConfigError(f"p_k is {p_k.tolist()}; give probabilities that sum to 1")
    if not (bool((h[:, 0] == 0).all()) and bool((h.diff(dim=1) >= 0).all()) and bool((h <= 1).all())):
        raise ConfigError("h has a row that does not start at 0 or falls; give hits among the first F candidates")

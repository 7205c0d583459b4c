"""Expected speed of SSD: the paper's theorems as functions. Times are in units of one verification.

Letters: a acceptance rate, K lookahead, p_h hit rate, E expected tokens of a round (the bonus included), T draft time;
_p after or by the primary, _b after or by the backup. Invariant: every function is pure, and exact under the paper's
model (rounds are independent, one verification takes time 1).
Paper: Theorems 1, 7, 15, 17, 19, Corollaries 8, 9, 16, Definition 14, Equation 1.
"""

import math

import torch
from torch import Tensor

from saguaro.errors import ConfigError


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:  # [..., V], [..., V] -> [...]
    """Theorem 1: the probability that a token drafted from q is accepted by p.

    >>> acceptance_rate(torch.tensor([0.4, 0.4, 0.1, 0.1]), torch.tensor([0.41, 0.41, 0.09, 0.09]))
    tensor(0.9800)
    """
    if p.shape != q.shape:
        raise ConfigError(f"p is {tuple(p.shape)} and q {tuple(q.shape)}; give both the same rows and vocabulary")
    return torch.minimum(p, q).sum(-1)


def outcome_law(a: float, K: int) -> Tensor:  # [K+1] float64
    """P(exactly k of K tokens are accepted): a^k (1 - a) for k < K, and a^K for k = K.

    >>> outcome_law(0.5, 2)
    tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    check_rate("a", a)
    check_count("K", K)
    return torch.tensor([a**k * (1 - a) for k in range(K)] + [a**K], dtype=torch.float64)


def expected_tokens(a: float, K: int) -> float:
    """E: expected tokens of one round with its bonus: 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a).

    >>> expected_tokens(0.5, 2)
    1.75
    """
    check_rate("a", a)
    check_count("K", K)
    return math.fsum(a**k for k in range(K + 1))  # the sum has no 0 / 0 at a = 1


def sd_speedup(E: float, T: float) -> float:
    """Speedup of SD over AR: E tokens per draft and verification, run in sequence.

    >>> sd_speedup(E=3.0, T=0.5)
    2.0
    """
    check_tokens("E", E)
    check_time("T", T)
    return E / (1 + T)


def ssd_speedup(p_h: float, E_hit: float, E_miss: float, T_p: float, T_b: float, b: float = 1) -> float:
    """Theorem 7, and Corollary 16 for a batch of b: speedup of SSD over AR.

    A batch waits for the backup unless all b rows hit, so the denominator (time) has p_h^b; tokens are counted per row,
    so the numerator has p_h. T_p is the time of the prepared drafts, which run in parallel with verification.

    >>> ssd_speedup(p_h=0.5, E_hit=4.0, E_miss=2.0, T_p=0.8, T_b=0.5)  # (0.5 * 4 + 0.5 * 2) / (0.5 + 0.5 * 1.5)
    2.4
    >>> ssd_speedup(p_h=0.5, E_hit=4.0, E_miss=2.0, T_p=0.8, T_b=1.0, b=2)  # 3 / (0.25 + 0.75 * 2)
    1.7142857142857142
    """
    check_rate("p_h", p_h)
    for name, tokens in (("E_hit", E_hit), ("E_miss", E_miss)):
        check_tokens(name, tokens)
    for name, time in (("T_p", T_p), ("T_b", T_b)):
        check_time(name, time)
    if not 0 < b < math.inf:
        raise ConfigError(f"b is {b}; a batch has at least 1 row")
    all_hit = math.pow(p_h, b)
    return (p_h * E_hit + (1 - p_h) * E_miss) / (all_hit * max(1.0, T_p) + (1 - all_hit) * (1 + T_b))


def unconditional_hit_rate(p_hit_p: float, p_hit_b: float) -> float:
    """Equation 1: p_h of the chain that hits with p_hit_p after a primary and with p_hit_b after a backup speculation.

    It solves p_h = p_h p_hit_p + (1 - p_h) p_hit_b. With p_hit_p = 1 and p_hit_b = 0 every p_h is a solution; the
    paper's chain starts with the backup and never hits, so the result is 0.

    >>> unconditional_hit_rate(p_hit_p=0.75, p_hit_b=0.25)
    0.5
    """
    check_rate("p_hit_p", p_hit_p)
    check_rate("p_hit_b", p_hit_b)
    return p_hit_b / ((1 - p_hit_p) + p_hit_b) if p_hit_b > 0 else 0.0


def ssd_over_sd(p_h: float, T: float) -> float:
    """Corollary 8: speedup of SSD over SD when both always draft with the same speculator.

    E cancels in Theorem 7 over E / (1 + T). A hit saves (1 + T) - max(1, T) = min(1, T). The result is at least 1, and
    above 1 if p_h > 0 and T > 0.

    >>> ssd_over_sd(p_h=1.0, T=0.5)
    1.5
    >>> ssd_over_sd(p_h=0.0, T=0.5)
    1.0
    """
    check_rate("p_h", p_h)
    check_time("T", T)
    return (1 + T) / (1 + T - p_h * min(1.0, T))


def ssd_over_sd_bounds(p_h: float, E_hit: float, E_sd: float, T_sd: float) -> tuple[float, float]:
    """Corollary 9: lower and upper bound of SSD over SD for T_p <= 1, a backup of no cost, E_miss <= E_hit.

    >>> ssd_over_sd_bounds(p_h=0.5, E_hit=4.0, E_sd=3.0, T_sd=0.5)
    (1.0, 2.0)
    """
    check_rate("p_h", p_h)
    check_tokens("E_hit", E_hit)
    check_tokens("E_sd", E_sd)
    check_time("T_sd", T_sd)
    upper = (1 + T_sd) * E_hit / E_sd
    return p_h * upper, upper


def critical_batch_size(p_hit_p: float, p_hit_b: float, E_p: float, E_b: float, T: float) -> float:
    """Theorem 17: draft misses with the slow primary below this batch size b*, with the backup of no cost above it.

    T is the time of K just-in-time draft steps of one branch, not of the prepared tree, whose T_p must be <= 1. With
    x = 1 - (1 - p_h) (E_p - E_b) / (T (p_h E_p + (1 - p_h) E_b)), primary and backup tie where p_hit_p^b = x. So
    x <= 0: infinite (primary wins even if all rounds miss); 0 < x < 1: ln x / ln p_hit_p, below 1 if the backup wins at
    every batch size; x >= 1: 0 (the backup drafts no worse). If waiting is free (T = 0) or never happens (p_hit_p = 1),
    the better drafter wins at every batch size, the primary in a tie.

    >>> critical_batch_size(p_hit_p=0.5, p_hit_b=0.5, E_p=3.0, E_b=1.0, T=1.0)  # x = 1 - 0.5 * 2 / 2 = 0.5
    1.0
    >>> critical_batch_size(p_hit_p=0.5, p_hit_b=0.5, E_p=3.0, E_b=1.0, T=0.5)
    inf
    """
    check_tokens("E_p", E_p)
    check_tokens("E_b", E_b)
    check_time("T", T)
    p_h = unconditional_hit_rate(p_hit_p, p_hit_b)
    if T == 0 or p_hit_p == 1:
        return math.inf if E_p >= E_b else 0.0
    x = 1 - (1 - p_h) * (E_p - E_b) / (T * (p_h * E_p + (1 - p_h) * E_b))
    if x <= 0:
        return math.inf
    return math.log(x) / math.log(p_hit_p) if x < 1 and p_hit_p > 0 else 0.0


def saguaro_probabilities(q: Tensor, F: int, C: float) -> Tensor:  # [V] -> [V]
    """Definition 14 on probabilities: the F likeliest tokens weighted by C, then normalised (ties: lowest token first).

    >>> saguaro_probabilities(torch.tensor([0.41, 0.41, 0.09, 0.09]), F=2, C=0.7783)
    tensor([0.3900, 0.3900, 0.1100, 0.1100])
    """
    check_count("F", F)
    check_rate("C", C)
    weights = q.clone()
    weights[_ranking(q)[:F]] *= C
    if not float(weights.sum()) > 0:
        raise ConfigError(f"C is {C} and the top F = {F} hold all of q; take C > 0 or a smaller F")
    return weights / weights.sum()


def residual_law(p: Tensor, q: Tensor) -> Tensor:  # [V], [V] -> [V]
    """The distribution of the bonus after a rejection: max(p - q, 0), normalised; all zero if p = q.

    >>> residual_law(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    left = (p - q).clamp(min=0)
    mass = float(left.sum())
    is_rounding = mass <= 8 * torch.finfo(left.dtype).eps
    return torch.zeros_like(left) if is_rounding else left / mass


def residual_hit_rate(p: Tensor, q: Tensor, F: int, C: float) -> float:
    """Theorem 15: residual mass on q's top-F tokens when drafting by Saguaro sampling; it never rises with C.

    The cached set is fixed, as in the proof. If p equals the drafted distribution nothing is rejected: 1.

    >>> p, q = torch.tensor([0.4, 0.4, 0.1, 0.1]), torch.tensor([0.41, 0.41, 0.09, 0.09])
    >>> [round(residual_hit_rate(p, q, F=2, C=c), 3) for c in (1.0, 0.7783)]
    [0.0, 1.0]
    """
    left = residual_law(p, saguaro_probabilities(q, F, C))
    return float(left[_ranking(q)[:F]].sum()) if bool(left.any()) else 1.0


def rejection_hit_rate(p: Tensor, q: Tensor, F: int, C: float) -> float:
    """Theorem 19: P(bonus prepared | rejection) if the F likeliest tokens *other than the rejected one* are prepared.

    This is the engine's rule. If the rejected token is one of the top F, token F+1 replaces it. Unlike with the fixed
    set of Theorem 15, the rate can fall as C falls: fewer rejections in the top F mean fewer such replacements.

    >>> p, q = torch.tensor([0.4, 0.4, 0.1, 0.1]), torch.tensor([0.41, 0.41, 0.09, 0.09])
    >>> [round(rejection_hit_rate(p, q, F=2, C=c), 3) for c in (1.0, 0.7783)]
    [0.5, 1.0]
    """
    drafted = saguaro_probabilities(q, F, C)
    order = _ranking(q)
    rejected, left = residual_law(drafted, p)[order], residual_law(p, drafted)[order]  # [V] both distributions, by rank
    if not bool(left.any()):
        return 1.0
    in_top = float(rejected[:F].sum())  # the residual is 0 at the rejected token: the top F + 1 cover the plan
    return in_top * float(left[: F + 1].sum()) + (1 - in_top) * float(left[:F].sum())


def check_rate(name: str, value: float) -> None:
    """Check a probability.

    >>> check_rate("a", 1.2)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: a is 1.2; give a probability, from 0 to 1
    """
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}; give a probability, from 0 to 1")


def check_count(name: str, value: int, least: int = 0) -> None:
    """Check an integer.

    >>> check_count("K", -1)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: K is -1; give a whole number, at least 0
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number, at least {least}")


def check_time(name: str, value: float) -> None:
    """Check a time in units of one verification.

    >>> check_time("T_b", -0.1)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: T_b is -0.1; give a time in units of one verification, finite and at least 0
    """
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}; give a time in units of one verification, finite and at least 0")


def check_tokens(name: str, value: float) -> None:
    """Check a number of tokens per round.

    >>> check_tokens("E_p", 0.8)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: E_p is 0.8; give expected tokens of a round with its bonus, finite and at least 1
    """
    if not 1 <= value < math.inf:
        raise ConfigError(f"{name} is {value}; give expected tokens of a round with its bonus, finite and at least 1")


def _ranking(q: Tensor) -> Tensor:  # [V] -> [V] int64
    """Tokens by descending probability; ties to the lowest token."""
    return q.argsort(descending=True, stable=True)

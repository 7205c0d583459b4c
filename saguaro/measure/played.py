"""Rounds of single requests in the terms of Theorem 7, and what the paper's formulas predict from them.

The hit rates after primary and backup give p_h (Equation 1), the tokens per round after a hit and after a miss give E,
and the times of preparing and of drafting just in time, relative to a verification, give T_p and T_b. Prefill is
excluded: rounds count from a request's second.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from saguaro.algo.theory import expected_tokens, ssd_speedup, unconditional_hit_rate
from saguaro.types import RoundEvent


@dataclass(frozen=True)
class Played:
    """One round of one request."""

    is_hit: bool
    was_hit: bool  # whether the previous round was a hit
    n_tokens: int
    k: int
    length: int
    verify_s: float  # verification, with host time
    wait_s: float  # from the outcome to the speculation
    prepare_s: float  # preparation for this round
    respond_s: float


def played(events: Sequence[RoundEvent]) -> list[Played]:
    """Rounds that follow another round of the same request, where both had room to speculate. Batches of one only."""
    rounds = []
    for before, event in pairwise(events):
        if not before.rows or not event.rows or event.draft is None:
            continue
        last, row = before.rows[0], event.rows[0]
        if row.request != last.request or row.room < 1 or last.room < 1:
            continue
        rounds.append(
            Played(
                is_hit=row.source == "cache",
                was_hit=last.source == "cache",
                n_tokens=row.n_tokens,
                k=row.k,
                length=row.length,
                verify_s=event.speculate[0] - before.speculate[1],
                wait_s=event.speculate[1] - event.speculate[0],
                prepare_s=event.draft.prepare[1] - event.draft.prepare[0],
                respond_s=event.draft.respond[1] - event.draft.respond[0],
            )
        )
    return rounds


def predict(rounds: Sequence[Played]) -> dict[str, float]:
    """Tokens per round and tokens per second, predicted and measured. There must be a round.

    >>> hit = Played(True, True, 3, 2, 2, 0.01, 0.0, 0.008, 0.0)
    >>> miss = Played(False, True, 1, 0, 2, 0.01, 0.005, 0.0, 0.005)
    >>> found = predict([hit, miss, hit, hit])
    >>> round(found["p_hit_p"], 2), found["E_hit"], round(found["T_b"], 2), round(found["tokens_ratio"], 2)
    (0.75, 3.0, 0.5, 1.0)
    """
    assert rounds, "nothing was played"
    hits, misses = [one for one in rounds if one.is_hit], [one for one in rounds if not one.is_hit]
    after_hit, after_miss = ([one.is_hit for one in rounds if one.was_hit is was] for was in (True, False))
    counted = len(hits) / len(rounds)
    p_hit_p, p_hit_b = _mean(after_hit, counted), _mean(after_miss, counted)  # without cases: as all rounds
    p_h = unconditional_hit_rate(p_hit_p, p_hit_b)
    e_hit, e_miss = (_mean([one.n_tokens for one in some], 1.0) for some in (hits, misses))
    verify = _mean([one.verify_s for one in rounds])
    t_p = _mean([one.prepare_s + one.respond_s for one in hits]) / verify
    t_b = _mean([one.wait_s for one in misses]) / verify
    accepted, rejected = sum(one.k for one in rounds), sum(one.k < one.length for one in rounds)
    a = accepted / max(1, accepted + rejected)
    tokens = p_h * e_hit + (1 - p_h) * e_miss
    speed = ssd_speedup(p_h, e_hit, e_miss, t_p, t_b) / verify
    measured = _mean([one.n_tokens for one in rounds])
    measured_speed = sum(one.n_tokens for one in rounds) / sum(one.verify_s + one.wait_s for one in rounds)
    return {
        "rounds": len(rounds),
        "a": a,
        "p_hit_p": p_hit_p,
        "p_hit_b": p_hit_b,
        "p_h": p_h,
        "p_h_counted": counted,
        "E_hit": e_hit,
        "E_miss": e_miss,
        "E_of_a": statistics.fmean(expected_tokens(a, one.length) for one in rounds),
        "verify_ms": verify * 1e3,
        "T_p": t_p,
        "T_b": t_b,
        "tokens_predicted": tokens,
        "tokens_measured": measured,
        "tokens_ratio": tokens / measured,
        "tok_s_predicted": speed,
        "tok_s_measured": measured_speed,
        "tok_s_ratio": speed / measured_speed,
    }


def _mean(values: Sequence[float], without: float = 0.0) -> float:
    return statistics.fmean(values) if values else without

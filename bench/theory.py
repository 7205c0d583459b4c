"""Predictions of the paper's formulas from measured acceptance, hit rates and times, against the measured speed.

python -m bench.theory --prompts DATA/*.jsonl

Theorem 7 and Equation 1 with the draft in its own process, one request at a time. The hit rates after primary and
backup give p_h, the tokens per round after a hit and after a miss give E, and the times of preparing and of drafting
just in time, relative to a verification, give T_p and T_b. Prefill is excluded: rounds count from a request's second.
"""

import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.algo.theory import expected_tokens, ssd_speedup, unconditional_hit_rate
from saguaro.model.default import DRAFT
from saguaro.types import RoundEvent


@dataclass(frozen=True)
class Args:
    """What to run."""

    draft: str = str(DRAFT)
    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    num_prompts: int = 12
    max_tokens: int = 96
    temperature: float = 0.0
    lookahead: int = 4
    budget: int = 4
    fallbacks: tuple[str, ...] = ("draft", "ngram", "empty")
    json: Path | None = None


@dataclass(frozen=True)
class Played:
    """One round of one request, in the terms of Theorem 7."""

    is_hit: bool
    was_hit: bool  # whether the previous round was a hit
    n_tokens: int
    k: int
    length: int
    verify_s: float  # verification, with host time
    wait_s: float  # from the outcome to the speculation
    prepare_s: float  # preparation for this round
    respond_s: float


def main(args: Args) -> None:
    """Print predictions and measurements, one line per fallback."""
    plain = LLM(method="ar", device="cpu", lookahead=args.lookahead)
    encode = plain.engine.tokenizer.encode_chat
    texts = read_prompts(list(args.prompts), args.num_prompts)
    prompts = [encode([{"role": "user", "content": text}]) for text in texts]
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.max_tokens)
    found = []
    for fallback in args.fallbacks:
        settings = {
            "method": "ssd",
            "draft": args.draft,
            "fallback": fallback,
            "budget": args.budget,
            "prepare": "always",
        }
        with plain.sibling(link="process", **settings) as llm:
            llm.generate(prompts[:1], params)  # warm
            events: list[RoundEvent] = []
            llm.engine.round.observers.append(events.append)
            for prompt in prompts:
                llm.generate([prompt], params)
        facts = predict(played(events), args.lookahead)
        found.append({"fallback": fallback, **facts})
        print(f"fallback {fallback}: " + ", ".join(f"{name} {value:.3f}" for name, value in facts.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


def played(events: list[RoundEvent]) -> list[Played]:
    """Rounds that follow another round of the same request, where both had room to speculate."""
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


def predict(rounds: list[Played], lookahead: int) -> dict[str, float]:
    """Tokens per round and tokens per second, predicted and measured."""
    hits, misses = [one for one in rounds if one.is_hit], [one for one in rounds if not one.is_hit]
    p_hit_p = mean([one.is_hit for one in rounds if one.was_hit])
    p_hit_b = mean([one.is_hit for one in rounds if not one.was_hit])
    p_h = unconditional_hit_rate(p_hit_p, p_hit_b)
    e_hit, e_miss = mean([one.n_tokens for one in hits]), mean([one.n_tokens for one in misses], 1.0)
    verify = mean([one.verify_s for one in rounds])
    t_p = mean([one.prepare_s + one.respond_s for one in hits]) / verify
    t_b = (mean([one.wait_s for one in misses])) / verify if misses else 0.0
    accepted, rejected = sum(one.k for one in rounds), sum(one.k < one.length for one in rounds)
    a = accepted / max(1, accepted + rejected)
    tokens = p_h * e_hit + (1 - p_h) * e_miss
    speed = ssd_speedup(p_h, e_hit, e_miss, t_p, t_b) / verify
    measured = mean([one.n_tokens for one in rounds])
    measured_speed = sum(one.n_tokens for one in rounds) / sum(one.verify_s + one.wait_s for one in rounds)
    return {
        "rounds": len(rounds),
        "a": a,
        "p_hit_p": p_hit_p,
        "p_hit_b": p_hit_b,
        "p_h": p_h,
        "p_h_counted": len(hits) / len(rounds),
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


def mean(values: list[Any], without: float = 0.0) -> float:
    """The mean; `without` for an empty list."""
    return statistics.fmean(values) if values else without


if __name__ == "__main__":
    main(tyro.cli(Args))

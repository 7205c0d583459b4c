"""Predictions of the paper's formulas from measured acceptance, hit rates and times, against the measured speed.

python -m bench.theory --prompts DATA/*.jsonl

Theorem 7 and Equation 1 with the draft in its own process, one request at a time. The hit rates after primary and
backup give p_h, the tokens per round after a hit and after a miss give E, and the times of preparing and of drafting
just in time, relative to a verification, give T_p and T_b. Prefill is excluded: rounds count from a request's second.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.measure.played import played, predict
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
        facts = predict(played(events))
        found.append({"fallback": fallback, **facts})
        print(f"fallback {fallback}: " + ", ".join(f"{name} {value:.3f}" for name, value in facts.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Args))

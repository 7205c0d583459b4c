"""Structured output on the default model: is every text valid, is it the same with and without speculation, and what
does a grammar cost?

    python -m bench.structured

Prompts and schemas are ours. The cost is the time to compute masks and apply them to logits, on the target side and
(inline) on the draft side, per output token.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import jsonschema
import tyro

from saguaro import LLM, SamplingParams
from saguaro.draft.rows import DraftRows
from saguaro.engine.results import Result
from saguaro.measure.metrics import Summary
from saguaro.model.default import DRAFT
from saguaro.model.grammar import Matcher
from saguaro.target.sampler import Sampler

WORD = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "person": (
        {
            "type": "object",
            "properties": {
                "name": WORD,
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "hobbies": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
            },
            "required": ["name", "age", "hobbies"],
            "additionalProperties": False,
        },
        ("Invent a person who lives by the sea.", "Describe a baker in a small town.", "Who might like chess?"),
    ),
    "review": (
        {
            "type": "object",
            "properties": {
                "sentiment": {"enum": ["positive", "negative", "mixed"]},
                "score": {"type": "number", "minimum": 0, "maximum": 10},
                "reason": {"type": "string", "maxLength": 80},
            },
            "required": ["sentiment", "score", "reason"],
            "additionalProperties": False,
        },
        ("Judge this: the soup was cold, but the staff were kind.", "Judge this: I would stay here again at once."),
    ),
    "order": (
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                "paid": {"type": "boolean"},
                "items": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 2,
                    "items": {"$ref": "#/$defs/item"},
                },
                "note": {"anyOf": [{"type": "null"}, WORD]},
            },
            "required": ["id", "paid", "items", "note"],
            "additionalProperties": False,
            "$defs": {
                "item": {
                    "type": "object",
                    "properties": {"what": WORD, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
                    "required": ["what", "n"],
                    "additionalProperties": False,
                }
            },
        },
        ("Write down an order of two lamps and a chair.", "I would like three notebooks, please."),
    ),
}


@dataclass(frozen=True)
class Args:
    """What to compare."""

    outputs: int = 50
    draft: str = str(DRAFT)
    method: str = "ssd"
    lookahead: int = 4
    budget: int = 8
    batch: int = 10
    max_tokens: int = 200
    threads: int | None = None
    link: str = "inline"
    blind: bool = False
    """Leave the draft (inline) without grammars, to see what they are worth to it."""


@dataclass
class Spent:
    """Seconds spent inside watched functions."""

    seconds: dict[str, float] = field(default_factory=dict)

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return timed


def main(args: Args) -> int:
    """Print the results; 1 if a text is not valid or differs."""
    plain = LLM(method="ar", device="cpu", threads=args.threads)
    asked = [(name, text) for name, (_, texts) in SCHEMAS.items() for text in texts]
    each = [asked[at % len(asked)] for at in range(args.outputs)]
    messages = [[{"role": "user", "content": f"{text} Answer in JSON."}] for _, text in each]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[at % 3],
            seed=at,
            max_tokens=args.max_tokens,
            structured={"json": SCHEMAS[name][0]},  # type: ignore[arg-type]
        )
        for at, (name, _) in enumerate(each)
    ]
    wanted = measured(plain, messages, params, args.batch)
    n_bad = sum(not is_valid(result, SCHEMAS[name][0]) for result, (name, _) in zip(wanted, each, strict=True))
    settings = {"lookahead": args.lookahead, "budget": args.budget, "prepare": "always", "link": args.link}
    blind = patch("saguaro.round.Rows", lambda start: DraftRows()) if args.blind else nullcontext()
    with blind, plain.sibling(method=args.method, draft=args.draft, **settings) as drafted:
        found = measured(drafted, messages, params, args.batch)
    n_differ = sum(a.token_ids != b.token_ids for a, b in zip(wanted, found, strict=True))
    print(f"{args.outputs} outputs: {n_bad} are not valid, {n_differ} differ between ar and {args.method}")
    return 1 if n_bad or n_differ else 0


def measured(llm: LLM, messages: list[Any], params: list[SamplingParams], batch: int) -> list[Result]:
    """Run all requests, a batch at a time, and print the cost."""
    summary, spent, found = Summary(), Spent(), list[Result]()
    llm.engine.round.observers.append(summary.add)
    began = time.perf_counter()
    masks = patch.object(Matcher, "mask", spent.watch("masks", Matcher.mask))
    shapes = patch.object(Sampler, "shape", spent.watch("shaping", Sampler.shape))
    with masks, shapes:
        for start in range(0, len(messages), batch):
            found += llm.chat(messages[start : start + batch], params[start : start + batch])
    seconds, n_tokens = time.perf_counter() - began, sum(len(result.token_ids) for result in found)
    cost = {name: 1e6 * total / n_tokens for name, total in spent.seconds.items()}
    share = spent.seconds["shaping"] / seconds
    hits = f", hits {summary.hit_rate:.2f}" if summary.hit_rate is not None else ""
    pace = f"{n_tokens} tokens in {seconds:.1f} s, {summary.tokens_per_round:.2f} per round{hits}"
    print(
        f"{llm.engine.method.name}: {pace}; "
        f"per token {cost['masks']:.0f} us to make masks and {cost['shaping'] - cost['masks']:.0f} us to write them "
        f"into logits, {share:.1%} of the time",
        flush=True,
    )
    return found


def is_valid(result: Result, schema: dict[str, Any]) -> bool:
    """Whether a text ended with "stop", is JSON and matches the schema."""
    (output,) = result.outputs
    try:
        jsonschema.validate(json.loads(output.text), schema)
    except (ValueError, jsonschema.ValidationError) as e:
        print(f"not valid ({output.finish_reason}): {output.text!r}: {e}")
        return False
    return output.finish_reason == "stop"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

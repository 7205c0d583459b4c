"""Pauses of a stream while long prompts are prefilled, and the cost of bounding them.

python -m bench.stalls                                # SmolLM2-135M-Instruct: no bound, and the default bound
python -m bench.stalls --bounds none 50 default 1000

For each bound on a round (`max_inter_token_ms`): one stream decodes, long prompts arrive, and the stream's deltas are
timed until the last prompt has its first token. A short prompt arrives right after the long ones; its time to first
token is measured too.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

import tyro

from saguaro import LLM, SamplingParams
from saguaro.engine.engine import Engine
from saguaro.types import RoundEvent

FREE = 1e9  # milliseconds: no bound


@dataclass(frozen=True)
class Args:
    """What to measure."""

    bounds: tuple[str, ...] = ("none", "default")
    """Milliseconds, none, or default."""
    prompts: int = 2
    """Long prompts at a time."""
    tokens: int = 8000
    """Tokens of each."""
    model: str | None = None
    draft: str | None = None
    method: str = "auto"
    link: str = "auto"
    device: str = "auto"
    kv_memory: str = "auto"
    seed: int = 0


@dataclass
class Measured:
    """One bound's figures. Times are seconds."""

    gaps: list[float]  # between deltas of the stream
    chat_s: float  # time to first token of the short prompt
    seconds: float  # until the last long prompt had its first token
    cpu_s: float  # CPU time of all cores: little affected by other load
    slowest: RoundEvent


def main(args: Args) -> None:
    """Print a table."""
    common: dict[str, Any] = {"method": args.method, "link": args.link, "kv_memory": args.kv_memory}
    with LLM(args.model, draft=args.draft, device=args.device, **common) as llm:
        n_known, n_read = llm.engine.n_known, args.prompts * args.tokens
        print(f"{llm.engine.loaded.name}, {llm.engine.method.name}, {args.prompts} prompts of {args.tokens} tokens")
        print(
            f"{'bound ms':>10}{'gap s: largest':>16}{'99 %':>8}{'median':>8}"
            f"{'prompt tok/s':>14}{'per CPU s':>11}{'chat waits s':>14}"
        )
        for bound in args.bounds:
            setting = {"none": FREE, "default": None}[bound] if bound in ("none", "default") else float(bound)
            with llm.sibling(max_inter_token_ms=setting) as other:
                one = measure(other.engine, args, random.Random(args.seed), n_known)
            gaps, speed, per_cpu_s = sorted(one.gaps), n_read / one.seconds, n_read / one.cpu_s
            print(
                f"{bound:>10}{gaps[-1]:16.3f}{gaps[int(0.99 * len(gaps))]:8.3f}{gaps[len(gaps) // 2]:8.3f}"
                f"{speed:14.0f}{per_cpu_s:11.0f}{one.chat_s:14.2f}   {_described(one.slowest)}",
                flush=True,
            )


def measure(engine: Engine, args: Args, chance: random.Random, n_known: int) -> Measured:
    """Run one stream together with long prompts."""
    events: list[RoundEvent] = []
    engine.round.observers.append(events.append)
    greedy = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    engine.add([chance.randrange(n_known) for _ in range(20)], greedy, "stream")
    for _ in range(20):
        engine.step()
    events.clear()
    began, cpu = time.perf_counter(), time.process_time()
    short = SamplingParams(max_tokens=1, temperature=0)
    left = {f"prompt {i}" for i in range(args.prompts)}
    for name in left:
        engine.add([chance.randrange(n_known) for _ in range(args.tokens)], short, name)
    engine.add([chance.randrange(n_known) for _ in range(20)], short, "chat")
    gaps, last, chat_s = [], began, 0.0
    while left:
        for delta in engine.step():
            if delta.request_id == "stream":
                gaps.append(time.perf_counter() - last)
                last = time.perf_counter()
            elif delta.request_id == "chat":
                chat_s = time.perf_counter() - began
            elif delta.finish_reason is not None:
                left.remove(delta.request_id)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Measured(gaps, chat_s, seconds, cpu_s, max(events, key=lambda e: e.collect[1] - e.speculate[0]))


def _described(event: RoundEvent) -> str:
    times = {"wait": event.speculate, "verify": event.launch, "draft": event.overlap, "collect": event.collect}
    parts = ", ".join(f"{name} {end - start:.3f}" for name, (start, end) in times.items())
    return f"largest round: {event.n_computed} tokens, {parts}"


if __name__ == "__main__":
    main(tyro.cli(Args))

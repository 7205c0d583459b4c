"""Check that every method gives the target's own tokens: real model, single requests, batches, preemption, draft kills,
a target divided among ranks.

python -m bench.exact --prompts DATA/*.jsonl
python -m bench.exact --prompts DATA/*.jsonl --methods ssd --batches 4 --kills 50
python -m bench.exact --prompts DATA/*.jsonl --methods ar,sd,ssd --tensor-parallel-size 2

Every run is compared with `ar` on the same prompts, seeds and temperature, prompt by prompt; any difference is counted,
and the exit status is 1 if there is one.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.link.apart import Apart, Timeouts
from saguaro.measure.metrics import Summary
from saguaro.method import METHODS, find_method
from saguaro.model.default import DRAFT


@dataclass(frozen=True)
class Args:
    """What to compare."""

    methods: str = ",".join(name for name, each in METHODS.items() if each.drafts and each.verification == "shared")
    """By default all that speculate and verify by shared noise."""
    draft: str = str(DRAFT)
    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    num_prompts: int = 20
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batches: tuple[int, ...] = (1, 8)
    lookahead: int = 4
    budget: int = 8
    nodes: int | None = None
    """Trees of so many nodes, with the methods that speculate trees; by default chains on a CPU."""
    width: int | None = None
    """Nodes expanded per step of a draft."""
    link: str = "auto"
    kv_memory: str = "auto"
    """Little enough, and requests are preempted; how often is reported."""
    prepare: str = "always"
    """Whether ssd always prepares, or where it pays (auto)."""
    kills: int = 0
    """Kill the draft's process so many times, at random moments, and go on until that is done."""
    tensor_parallel_size: int = 1
    """Divide the target that is compared among so many ranks; the reference is one process."""
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "auto"


def main(args: Args) -> int:
    """Print a line per method, temperature and batch; 1 if any output differs."""
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    if args.device != "cpu":  # capture only the graphs that are used
        settings |= {"max_batch_rows": max(args.batches), "max_model_len": 2048}
    plain = LLM(method="ar", lookahead=args.lookahead, kv_memory=args.kv_memory, **settings)
    n_ranks = args.tensor_parallel_size
    divided = plain if n_ranks == 1 else LLM(method="ar", **settings, tensor_parallel_size=n_ranks)
    encode = plain.engine.tokenizer.encode_chat
    texts = read_prompts(list(args.prompts), args.num_prompts)
    prompts = [encode([{"role": "user", "content": text}]) for text in texts]
    n_differ = 0
    for temperature in args.temperatures:
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=args.max_tokens) for i in range(len(prompts))
        ]
        wanted = outputs(plain, prompts, params, 1)
        for method in args.methods.split(","):
            trees = {"nodes": args.nodes, "width": args.width} if find_method(method).trees else {}
            for batch in args.batches:
                with divided.sibling(
                    method=method,
                    draft=args.draft,
                    budget=args.budget,
                    prepare=args.prepare,
                    link=args.link,
                    kv_memory=args.kv_memory,
                    **trees,
                ) as llm:
                    n_differ += compare(llm, plain, prompts, params, wanted, batch, args.kills)
    divided.close()
    print(f"{n_differ} outputs differ")
    return 1 if n_differ else 0


def compare(
    llm: LLM,
    plain: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    wanted: list[list[int]],
    batch: int,
    kills: int,
) -> int:
    """Run all prompts, repeatedly until all kills are done; return the number of outputs that differ."""
    summary, engine = Summary(), llm.engine
    engine.round.observers.append(summary.add)
    n_runs = n_differ = 0
    gaps: list[str] = []
    began = time.perf_counter()
    with killing(llm, kills) as deaths:
        while n_runs == 0 or len(deaths) < kills:
            found = outputs(llm, prompts, params, batch)
            gaps = [gap(plain, *each) for each in zip(prompts, wanted, found, strict=True) if each[1] != each[2]]
            n_differ += len(gaps)
            n_runs += 1
    engine.pool.check(engine.scheduler.tables())
    n_tokens, hits = n_runs * sum(len(tokens) for tokens in wanted), summary.hit_rate
    facts = [f"{n_runs * len(prompts)} outputs", f"{n_tokens} tokens", f"{summary.tokens_per_round:.2f} per round"]
    facts += [f"hits {hits:.2f}" if hits is not None else "", f"{engine.scheduler.n_preemptions} preemptions"]
    if isinstance(engine.round.draft, Apart):
        facts.append(f"draft started {engine.round.draft.n_starts} times, killed {len(deaths)} times")
    facts.append(f"{time.perf_counter() - began:.0f} s")
    what = f"{engine.method.name:11} T={params[0].temperature:g} batch {batch}"
    print(f"{what}: {n_differ} differ of {', '.join(fact for fact in facts if fact)}", flush=True)
    if gaps:
        print(f"{'':11} log-probabilities of the two likeliest tokens where they part: {', '.join(gaps)} apart")
    return n_differ


def gap(plain: LLM, prompt: list[int], wanted: list[int], found: list[int]) -> str:
    """The gap between the two likeliest tokens at the first difference of two outputs."""
    n_same = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(wanted))
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    found_there = plain.generate([prompt + wanted[:n_same]], asked)[0].outputs[0].logprobs
    assert found_there is not None
    (_, first), (_, second) = found_there[0].top[:2]
    return f"{first - second:.3f} (token {n_same})"


def outputs(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[list[int]]:
    """The tokens of every prompt, `batch` at a time."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        results = llm.generate(prompts[start : start + batch], params[start : start + batch])
        found += [result.token_ids for result in results]
        assert all(result.outputs[0].finish_reason in ("stop", "length") for result in results)
    return found


@contextmanager
def killing(llm: LLM, kills: int) -> Iterator[list[int]]:
    """Context that kills the draft's process at random times; yields the list of killed pids."""
    deaths: list[int] = []
    over = threading.Event()
    link = llm.engine.round.draft
    if isinstance(link, Apart):
        link.patience = Timeouts(pauses=(0.0,))  # restart at once after a kill

    def run() -> None:
        chance = random.Random(7)
        while len(deaths) < kills and isinstance(link, Apart) and not over.wait(chance.uniform(0, 6)):
            pid = link.pid
            if pid is not None and pid not in deaths:
                os.kill(pid, signal.SIGKILL)
                deaths.append(pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield deaths
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

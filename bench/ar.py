"""Autoregressive decoding on a CPU: speed against transformers, batching, memory, time to first token.

    python -m bench.ar --threads 2 --json ar.json

Runs are interleaved, so that other load affects all alike; each figure is the median over repeats.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.peer import Peer
from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams, __version__
from saguaro.config import format_bytes


@dataclass(frozen=True)
class Args:
    """What to measure."""

    threads: int = 2
    repeats: int = 5
    max_tokens: int = 96
    batch: int = 8
    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    json: Path | None = None


def main(args: Args) -> None:
    """Measure and print one table."""
    torch.set_num_threads(args.threads)
    llm = LLM(device="cpu", dtype="float32", threads=args.threads)
    peer = Peer(llm.engine.loaded.path)
    texts = read_prompts(list(args.prompts), args.batch)
    prompts = [llm.engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    warm = SamplingParams(temperature=1, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    cases: dict[str, Callable[[], int]] = {
        "transformers": lambda: len(peer.generate(prompts[0], args.max_tokens)),
        "saguaro": lambda: _tokens(llm, prompts[:1], params),
        "saguaro, temperature 1": lambda: _tokens(llm, prompts[:1], warm),
        f"saguaro, batch {args.batch}": lambda: _tokens(llm, prompts, params),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            n = case()
            if repeat:  # the first is warm-up
                speeds[name].append(n / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = medians["saguaro"]
    print(f"{'':28} {'tok/s':>8} {'x transformers':>15} {'x single':>9}")
    for name, speed in medians.items():
        print(f"{name:28} {speed:8.1f} {speed / medians['transformers']:15.2f} {speed / base:9.2f}")
    memory = measure_memory(args.threads)
    print(
        f"\npeak memory of one generation: {format_bytes(memory['peak'])}; 1.3 x weights + KV budget + 400 MB = "
        f"{format_bytes(memory['allowed'])}"
    )
    first = measure_first_token(args.threads)
    print("time to the first token of a cached `saguaro generate`, seconds:")
    print("  " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in first.items()))
    if args.json:
        report = {
            "settings": {**asdict(args), "prompts": [str(p) for p in args.prompts], "json": str(args.json)},
            "versions": {"saguaro": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": args.threads},
            "tok_s": medians,
            "all": speeds,
            "memory": memory,
            "first_token": first,
        }
        args.json.write_text(json.dumps(report, indent=2))


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> int:
    return sum(len(result.token_ids) for result in llm.generate(prompts, params))


# VmHWM is the child's own peak: ru_maxrss would include the parent's memory at the fork.
_MEMORY = """
import json
from saguaro import LLM, SamplingParams
llm = LLM(device="cpu", dtype="float32", threads={threads})
llm.generate([f"Write about the number {{i}}." for i in range(8)], SamplingParams(max_tokens=64, ignore_eos=True))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([llm.engine.loaded.weight_bytes, llm.engine.kv.n_bytes, int(peak.split()[1]) * 1024]))
"""


def measure_memory(threads: int) -> dict[str, int]:
    """Peak resident memory of a process that loads the default model and generates."""
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY.format(threads=threads)], check=True, capture_output=True, text=True
    ).stdout
    weights, kv, peak = json.loads(out)
    return {"weights": weights, "kv": kv, "peak": peak, "allowed": int(1.3 * weights + kv + 400e6)}


_FIRST = """
import json, time
began = time.perf_counter()
import torch, transformers
from saguaro import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM(device="cpu", dtype="float32", threads={threads})
loaded = time.perf_counter()
next(llm.stream("The saguaro is", SamplingParams(max_tokens=1)))
print(json.dumps({{"imports": imported - began, "load": loaded - imported,
                   "prefill and first token": time.perf_counter() - loaded}}))
"""


def measure_first_token(threads: int, repeats: int = 3) -> dict[str, float]:
    """Breakdown of the time from process start to first token; medians."""
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        began = time.perf_counter()
        command = [sys.executable, "-c", _FIRST.format(threads=threads)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        parts = json.loads(out)
        whole = time.perf_counter() - began
        runs.append({"interpreter start and exit": whole - sum(parts.values()), **parts, "whole": whole})
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main(tyro.cli(Args))

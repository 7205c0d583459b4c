"""Chains against trees: tokens per round and speed by shape, prompt set and temperature, in one interleaved run.

    python -m bench.trees --prompts DATA/*.jsonl --json trees.json
    python -m bench.trees --prompts DATA/*.jsonl --cells sd:4 ssd:4 ssd:4:8:8:2 default --num-prompts 4

A cell is method:lookahead[:budget[:nodes[:width]]]; without nodes it speculates chains; `default` is the engine without
flags, `ar` the target alone. Every prompt is served by every cell before the next prompt, one request at a time, so
that other work on the machine slows all cells alike. Every output is compared with that of the first cell: `differ`
must be 0.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from bench.cells import settings_of
from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.measure.metrics import Summary
from saguaro.model.default import DRAFT


@dataclass(frozen=True)
class Args:
    """What to measure."""

    prompts: tuple[Path, ...]
    """JSONL files, each a set."""
    cells: tuple[str, ...] = (
        "ar",
        "sd:4",
        "sd:8",
        "sd:6:8:8:2",
        "sd:8:8:16:4",
        "sd:8:8:32:8",
        "sd:8:8:64:16",
        "default",
    )
    num_prompts: int = 4
    """Of each set."""
    max_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    device: str = "auto"
    json: Path | None = None


@dataclass
class Cell:
    """What one cell did at one temperature."""

    summary: Summary = field(default_factory=Summary)
    seconds: float = 0.0
    n_tokens: int = 0
    n_differ: int = 0
    by_set: dict[str, Summary] = field(default_factory=lambda: defaultdict(Summary))


def main(args: Args) -> int:
    """Print a table per temperature."""
    plain = LLM(method="ar", max_batch_rows=1, max_model_len=4096, device=args.device)
    settings = {cell: {"method": "auto"} if cell == "default" else settings_of(cell) for cell in args.cells}
    engines = {cell: plain.sibling(draft=str(DRAFT), **each) for cell, each in settings.items()}
    found = []
    for temperature in args.temperatures:
        cells = {cell: Cell() for cell in args.cells}
        for path in args.prompts:
            for index, text in enumerate(read_prompts([path], args.num_prompts)):
                params = SamplingParams(temperature=temperature, seed=index, max_tokens=args.max_tokens)
                serve(engines, cells, path.stem, text, params)
        print(f"temperature {temperature:g}: tok/s, tokens per round, nodes per token, by set")
        for name, cell in cells.items():
            found.append(line_of(name, temperature, cell))
            sets = "  ".join(f"{key} {each.tokens_per_round:.2f}" for key, each in cell.by_set.items())
            speed, rate = cell.n_tokens / cell.seconds, cell.summary.tokens_per_round
            nodes = cell.summary.nodes_per_token or 0.0
            print(f"{name:16} {speed:8.1f} {rate:6.2f} {nodes:6.2f}  {sets}  differ {cell.n_differ}", flush=True)
    for engine in engines.values():
        engine.close()
    plain.close()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(line["differ"] for line in found))


def serve(engines: dict[str, LLM], cells: dict[str, Cell], name: str, text: str, params: SamplingParams) -> None:
    """One prompt, by every engine in turn."""
    first: list[int] | None = None
    for key, llm in engines.items():
        cell = cells[key]
        prompt = llm.engine.tokenizer.encode_chat([{"role": "user", "content": text}])
        observers = [cell.summary.add, cell.by_set[name].add]
        llm.engine.round.observers.extend(observers)
        began = time.perf_counter()
        tokens = list(llm.generate([prompt], [params])[0].outputs[0].token_ids)
        cell.seconds += time.perf_counter() - began
        for observer in observers:
            llm.engine.round.observers.remove(observer)
        cell.n_tokens += len(tokens)
        first = tokens if first is None else first
        cell.n_differ += tokens != first


def line_of(name: str, temperature: float, cell: Cell) -> dict[str, Any]:
    """One cell as JSON."""
    sets = {key: each.tokens_per_round for key, each in cell.by_set.items()}
    return {
        "cell": name,
        "temperature": temperature,
        "tok_s": cell.n_tokens / cell.seconds,
        "tokens_per_round": cell.summary.tokens_per_round,
        "nodes_per_token": cell.summary.nodes_per_token,
        "by_set": sets,
        "differ": cell.n_differ,
    }


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))

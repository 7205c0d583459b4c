"""Quality of a draft: acceptance by position and tokens per round, per prompt set, measured in the engine.

    python -m bench.acceptance --prompts DATA/*.jsonl [--drafts DIR ...] [--json acceptance.json]

Runs speculative decoding of the first prompts of every file, greedy and at temperature 1. The output is always the
target's; drafts differ in how much of it they predict. The last line of a temperature is the mean over the sets.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.measure.metrics import Summary
from saguaro.model.default import DRAFT


@dataclass(frozen=True)
class Args:
    """What to measure."""

    prompts: tuple[Path, ...]
    """JSONL files, each a set."""
    drafts: tuple[str, ...] = ()
    """Draft folders, or drop:I,J,...; without any, the default draft."""
    num_prompts: int = 32
    """Of each set."""
    max_tokens: int = 128
    lookahead: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch: int = 8
    """Prompts at a time."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    json: Path | None = None


def main(args: Args) -> int:
    """Print a line for each draft, temperature and set."""
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    plain = LLM(method="ar", lookahead=args.lookahead, max_batch_rows=args.batch, max_model_len=4096, **settings)
    found = []
    for draft in args.drafts or (str(DRAFT),):
        with plain.sibling(method="sd", draft=draft, link="inline") as llm:
            for temperature in args.temperatures:
                lines = [measure(llm, path, temperature, args) for path in args.prompts]
                mean = sum(line["tokens_per_round"] for line in lines) / len(lines)
                print(f"{Path(draft).name} T={temperature:g} {'mean':14} {mean:.3f} tokens per round", flush=True)
                found += [{"draft": draft, "temperature": temperature, **line} for line in lines]
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(llm: LLM, path: Path, temperature: float, args: Args) -> dict[str, Any]:
    """Measure one prompt set."""
    summary = Summary()
    encode = llm.engine.tokenizer.encode_chat
    prompts = [encode([{"role": "user", "content": text}]) for text in read_prompts([path], args.num_prompts)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=args.max_tokens) for i in range(len(prompts))]
    llm.engine.round.observers.append(summary.add)
    llm.generate(prompts, params)
    llm.engine.round.observers.remove(summary.add)
    by_position = [rate.value or 0.0 for rate in summary.by_position]
    shown = f"{summary.n_tokens} tokens, by position {' '.join(f'{rate:.3f}' for rate in by_position)}"
    where = f"{Path(str(llm.engine.config.draft)).name} T={temperature:g} {path.stem:14}"
    print(f"{where} {summary.tokens_per_round:.3f} tokens per round, {shown}", flush=True)
    return {
        "set": path.stem,
        "tokens": summary.n_tokens,
        "tokens_per_round": summary.tokens_per_round,
        "acceptance_by_position": by_position,
    }


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))

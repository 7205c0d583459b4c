"""n-gram drafting: tokens per round and tok/s against `ar`, and whether the tokens are the same.

python -m bench.ngram --prompts DATA/gsm8k.jsonl DATA/humaneval.jsonl --num-prompts 12 --max-tokens 96
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams


@dataclass(frozen=True)
class Args:
    """What to measure."""

    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    num_prompts: int = 12
    max_tokens: int = 96
    lookahead: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)


def main(args: Args) -> None:
    """Print a line per temperature and method."""
    methods = {method: LLM(device="cpu", method=method, lookahead=args.lookahead) for method in ("ar", "ngram")}
    encode = methods["ar"].engine.tokenizer.encode_chat
    prompts = [
        encode([{"role": "user", "content": text}]) for text in read_prompts(list(args.prompts), args.num_prompts)
    ]
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens)
        found: dict[str, list[list[int]]] = {name: [] for name in methods}
        rounds, seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        for prompt in prompts:  # interleaved, so that other load affects both alike
            for name, llm in methods.items():
                output = llm.generate([prompt], params)[0].outputs[0]
                found[name].append(output.token_ids)
                rounds[name] += output.n_rounds
                seconds[name] += output.timings.total_ms / 1e3
        for name, texts in found.items():
            n = sum(len(text) for text in texts)
            speed = f"{n / rounds[name]:.2f} tokens per round, {n / seconds[name]:.1f} tok/s"
            print(f"temperature {temperature}, {name:5}: {speed}, identical to ar: {texts == found['ar']}")


if __name__ == "__main__":
    main(tyro.cli(Args))

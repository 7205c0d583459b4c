"""Accuracy of int8 weights against float32 on a CPU, on greedy texts of the float32 model.

    python -m bench.int8 --data ../shared/datasets [--prompts 4] [--tokens 64]

KL is that of the float32 model's distribution from the int8 model's, per token; agreement is that of the argmax.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.attention.step import Segment, make_step
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.runner.runner import make_runner

PAGE = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    exact, rounded = LLM(dtype="float32"), LLM(dtype="int8")
    kl, agree, lost, n = 0.0, 0, 0.0, 0
    for prompt, written in texts(exact, asked.data, asked.prompts, asked.tokens):
        p, q = (logits(llm, [*prompt, *written], len(written)).log_softmax(1) for llm in (exact, rounded))
        kl += float((p.exp() * (p - q)).sum())
        agree += int((p.argmax(1) == q.argmax(1)).sum())
        at = torch.tensor(written)[:, None]
        lost += float((p.gather(1, at) - q.gather(1, at)).sum())
        n += len(written)
    print(f"{n} tokens: KL {kl / n:.4f}, agreement {agree / n:.4f}, log-likelihood lost {lost / n:.4f} per token")


def texts(llm: LLM, data: Path, n_prompts: int, n_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts of every set with the model's answers."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens)
    for path in sorted(data.glob("*.jsonl")):
        for prompt in read_prompts([path], n_prompts):
            result = llm.chat([[{"role": "user", "content": prompt}]], params)[0]
            yield result.prompt_token_ids, result.outputs[0].token_ids


@torch.inference_mode()
def logits(llm: LLM, tokens: list[int], n_wanted: int) -> Tensor:  # [n_wanted, V]
    """Logits before each of the last n_wanted tokens."""
    model = llm.engine.loaded.model
    n_pages = -(-len(tokens) // PAGE)
    plan = KVPlan(n_pages, PAGE, model.spec.kv_bytes_per_token(model.dtype), n_pages * PAGE)
    runner = make_runner(model, KVCache(plan, model.spec, model.device, model.dtype), None, plan.longest)
    segment = Segment(tokens=tokens, start=0, pages=range(n_pages), n_wanted=n_wanted + 1)
    return runner.forward(make_step([segment], PAGE, model.device))[:-1]


if __name__ == "__main__":
    main()

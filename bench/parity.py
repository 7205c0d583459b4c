"""Compare greedy decoding with transformers, token by token, on the default model in float32.

    python -m bench.parity --prompts DATA/gsm8k.jsonl DATA/humaneval.jsonl --num-prompts 20 --max-tokens 64

Every difference is reported with the gap between the peer's two best logits at that position.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.peer import Peer
from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams


@dataclass(frozen=True)
class Args:
    """What to compare."""

    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    num_prompts: int = 20
    max_tokens: int = 64
    model: str | None = None
    """A folder or Hub id; without it, the default model."""
    chat: bool = True
    """Through the chat template."""


def main(args: Args) -> int:
    """Compare and report; return the number of prompts that differ."""
    llm = LLM(args.model, device="cpu", dtype="float32")
    peer = Peer(llm.engine.loaded.path)
    encode = llm.engine.tokenizer
    texts = read_prompts(list(args.prompts), args.num_prompts)
    prompts = [
        encode.encode_chat([{"role": "user", "content": text}]) if args.chat else encode.encode(text) for text in texts
    ]
    ours = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    n_different = n_tokens = 0
    for index, (prompt, result) in enumerate(zip(prompts, ours, strict=True)):
        theirs = peer.generate(prompt, args.max_tokens, stops=True)
        n_tokens += len(theirs)
        if result.token_ids == theirs:
            continue
        n_different += 1
        at = next(
            (i for i, (a, b) in enumerate(zip(result.token_ids, theirs, strict=False)) if a != b),
            min(len(theirs), len(result.token_ids)),
        )
        best = peer.logits(prompt + theirs[:at])[-1].topk(2).values
        print(f"prompt {index} differs at token {at}: top-2 gap {float(best[0] - best[1]):.2e}")
    print(f"{len(prompts)} prompts, {n_tokens} tokens, {n_different} prompts differ")
    return n_different


if __name__ == "__main__":
    raise SystemExit(min(main(tyro.cli(Args)), 1))

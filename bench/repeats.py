"""Drafting where outputs repeat: tokens per round and tok/s of look-ups, a model, and both, against `ar`.

python -m bench.repeats --max-tokens 160
python -m bench.repeats --cpu-time

The prompts are our own: code edits, JSON records, quotations, tables, lists. All engines share one target; prompts are
decoded by all of them in turn, so that other load affects all alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.draft.policy import learnt
from saguaro.model.default import DRAFT

CODE = """def total_price(items, tax):
    result = 0
    for item in items:
        if item.price < 0:
            raise ValueError("negative price")
        result += item.price * item.count
    return result * (1 + tax)


def cheapest(items):
    best = items[0]
    for item in items:
        if item.price < best.price:
            best = item
    return best"""

STORY = """The ferry left the harbour at a quarter past six. On the upper deck stood a woman with a green suitcase, who
watched the lighthouse until it was a dot. Nobody on the ferry knew that the suitcase was full of letters, and that each
of the letters had been written to the lighthouse keeper, who had never answered a single one."""

RECORDS = """[{"name": "Ada Brook", "city": "Leeds", "age": 41, "member": true},
 {"name": "Tom Reyes", "city": "Porto", "age": 29, "member": false},
 {"name": "Ines Vogel", "city": "Graz", "age": 35, "member": true},
 {"name": "Sam Okoro", "city": "Lagos", "age": 52, "member": false}]"""

TABLE = """| English | French | German |
| --- | --- | --- |
| bread | pain | Brot |
| water | eau | Wasser |
| window | fenetre | Fenster |
| bridge | pont | Bruecke |"""

PROMPTS = (
    f"Rename the parameter `items` to `basket` in both functions, and print the whole code again.\n\n{CODE}",
    f"Add a docstring to each function, change nothing else, and print the whole code again.\n\n{CODE}",
    f"Add type annotations to this code and print all of it again.\n\n{CODE}",
    f"Repeat this text word for word.\n\n{STORY}",
    f"Correct the spelling of this text, if there is a mistake, and print it in full.\n\n{STORY}",
    f"Quote the sentence about the suitcase, and then the whole text again.\n\n{STORY}",
    f'Add the field "active": true to each record and print all records as JSON.\n\n{RECORDS}',
    f"Write one JSON object per line, with the keys name, city, age and member, for these records.\n\n{RECORDS}",
    'Write a JSON list of the numbers from 1 to 20, where each entry looks like {"number": 1, "is_even": false}.',
    f"Add a column with the Spanish word to this table and print the whole table again.\n\n{TABLE}",
    f"Print this table again, with the rows in the opposite order.\n\n{TABLE}",
    "Print this list three times, with the same numbers each time:\n1. copper kettle\n2. green ladder\n3. window seat\n"
    "4. paper lantern\n5. stone bridge\n6. winter coat",
)

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "ar": {"method": "ar"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "sd", "draft": "suffix"},
    "sd": {"method": "sd", "draft": str(DRAFT)},
    "ssd": {"method": "ssd", "draft": str(DRAFT)},
    "suffix+sd": {"method": "sd", "draft": f"suffix+{DRAFT}"},
    "suffix+ssd": {"method": "ssd", "draft": f"suffix+{DRAFT}"},
}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own repeating prompts."""
    num_prompts: int = len(PROMPTS)
    max_tokens: int = 160
    lookahead: int = 4
    nodes: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    engines: tuple[str, ...] = tuple(ENGINES)
    cpu_time: bool = False
    """Use one thread, and measure its CPU time, as the policy does then too: for a machine with other work."""
    passes: int = 1
    """How often each prompt is decoded by each engine; the first pass of an engine is not counted if there are more."""


@dataclass
class Sums:
    """Of one engine and temperature."""

    clock: Callable[[], float]
    outputs: list[list[int]] = field(default_factory=list)
    n_rounds: int = 0
    seconds: list[float] = field(default_factory=list)  # per prompt

    def add(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        """Decode a prompt."""
        began = self.clock()
        output = llm.generate([prompt], params)[0].outputs[0]
        self.seconds.append(self.clock() - began)
        self.outputs.append(output.token_ids)
        self.n_rounds += output.n_rounds

    def line(self, ar: "Sums") -> str:
        """Figures, relative to `ar`."""
        n = sum(map(len, self.outputs))
        ratio, each = sum(ar.seconds) / sum(self.seconds), zip(ar.seconds, self.seconds, strict=True)
        usual = statistics.median(a / b for a, b in each)
        figures = f"{n / self.n_rounds:.2f} tokens per round, {n / sum(self.seconds):6.1f} tok/s, {ratio:.2f} x ar"
        return f"{figures} (median of prompts {usual:.2f}), identical to ar: {self.outputs == ar.outputs}"


def main(args: Args) -> None:
    """Print a line per temperature and engine."""
    clock, threads = (time.process_time, 1) if args.cpu_time else (time.perf_counter, None)
    learnt.clock = clock
    base = LLM(device="cpu", method="ar", learnt_dir="none", threads=threads)
    sizes = {"lookahead": args.lookahead, "learnt_dir": "none", "link": "inline"}
    engines = {name: base.sibling(**{**sizes, **_nodes(args, name), **ENGINES[name]}) for name in args.engines}
    texts = read_prompts(list(args.prompts), args.num_prompts) if args.prompts else PROMPTS[: args.num_prompts]
    encode = base.engine.tokenizer.encode_chat
    prompts = [encode([{"role": "user", "content": text}]) for text in texts]
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens)
        sums = {name: Sums(clock) for name in engines}
        for at in range(args.passes):
            if at == min(1, args.passes - 1):
                sums = {name: Sums(clock) for name in engines}
            for prompt in prompts:
                for name, llm in engines.items():
                    sums[name].add(llm, prompt, params)
        for name, each in sums.items():
            print(f"temperature {temperature}, {name:10}: {each.line(sums['ar'])}", flush=True)


def _nodes(args: Args, name: str) -> dict[str, int]:
    return {} if args.nodes is None or name in ("ar", "ngram") else {"nodes": args.nodes}


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Reading prompts: tokens per second, first tokens, and what other rows notice. One table, one JSON.

    python -m bench.prompts --target 8b --draft 0.6b --cells ar ssd:8:8 --lengths 512 4096 7000 --profile
    python -m bench.prompts --target smollm2 --draft drop:14 --device cpu --lengths 512 --crowd 8

    tok_s      tokens of a new prompt / time to its first token
    first_ms   time to the first token of a new prompt, the median of the repeats
    cached_ms  the same prompt again but for its last token: the prefix is cached
    alone_ms   time per token of a row that decodes alone
    beside_ms  the same while a prompt of that length is read
    crowd_ms   of so many prompts of 128 tokens at once: time to the first token, the median and the last

--profile also prints where the device's time goes while the longest prompt is read by `ar`.
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from bench.cells import settings_of
from bench.columns import line_of
from bench.workloads import read_prompts
from saguaro.config import EngineConfig, SamplingParams
from saguaro.engine.assembly import find_device
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, SaguaroError
from saguaro.measure.grown import SHAPES
from saguaro.measure.grown_pair import GrownPair, encode, make_pair
from saguaro.method import find_method

CROWD_LENGTH = 128  # tokens of each prompt of a crowd
DECODED = 24  # tokens of the row that decodes alone
ROWS = 25  # of a profile
COLUMNS = {
    "cell": "<12", "length": ">6", "tok_s": ">9.0f", "first_ms": ">9.1f", "cached_ms": ">9.1f", "alone_ms": ">9.2f",
    "beside_ms": ">9.2f", "crowd_ms": ">9.1f", "crowd_last_ms": ">13.1f",
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """What to measure."""

    target: str = "8b"
    """A grown shape, or smollm2 as it is."""
    draft: str = "0.6b"
    """A grown shape, smollm2, or drop:I,J,..."""
    epsilon: float = 0.27
    """Noise of a grown target."""
    cells: tuple[str, ...] = ("ar", "ssd:8:8")
    """method[:lookahead[:budget[:nodes[:width]]]]."""
    lengths: tuple[int, ...] = (512, 4096, 7000)
    """Tokens of a prompt."""
    crowd: int = 64
    """Prompts that arrive at once; 0: none."""
    repeats: int = 3
    device: str = "auto"
    dtype: str = "bfloat16"
    prompts: tuple[Path, ...] = ()
    """Files of prompts, whose text is strung together; without any, built-in ones."""
    profile: bool = False
    """Print where the device's time goes."""
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("target", self.target, (*SHAPES, "smollm2")),
            ("draft", self.draft, (*SHAPES, "smollm2", "drop:I,J,...")),
        ):
            if value not in known and not (name == "draft" and value.startswith("drop:")):
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        for cell in self.cells:
            find_method(settings_of(cell)["method"])
        if not self.lengths or min(self.lengths) <= CROWD_LENGTH // 8:
            raise ConfigError(f"lengths is {self.lengths}; each must be more than {CROWD_LENGTH // 8} tokens")


class Reader:
    """An engine, and prompts that it has not seen."""

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        self._engine, self._text, self._n_given = engine, text, 0

    def prompt(self, length: int) -> list[int]:
        """A new prompt: no other begins with the same tokens."""
        self._n_given += 1
        repeated = [*self._text] * (length // len(self._text) + 2)
        return [*_digits(self._n_given), *repeated[self._n_given :]][:length]

    def first_tokens(self, prompts: Sequence[list[int]], n: int = 1) -> list[float]:
        """Seconds to the first token of each, if all are given at once."""
        began, found = time.perf_counter(), dict[str, float]()
        names = [self._engine.add(prompt, _greedy(n)) for prompt in prompts]
        while self._engine.has_work:
            for delta in self._engine.step():
                found.setdefault(delta.request_id, time.perf_counter() - began)
        for name in names:
            self._engine.result(name)
        return [found[name] for name in names]

    def beside(self, length: int) -> tuple[float, float]:
        """Seconds per token of a row: alone, and while a prompt of this length is read."""
        row, n_tokens = self._engine.add(self.prompt(CROWD_LENGTH), _greedy(4096)), 0
        began = time.perf_counter()
        while n_tokens < DECODED:  # the first rounds are not counted
            n_new = self._step_of(row)
            if n_tokens == 0 and n_new:
                began = time.perf_counter()
            n_tokens += n_new
        alone = (time.perf_counter() - began) / (n_tokens - 1)
        other, n_beside, is_read, began = (
            self._engine.add(self.prompt(length), _greedy(1)),
            0,
            False,
            time.perf_counter(),
        )
        while not is_read:
            for delta in self._engine.step():
                is_read |= delta.request_id == other
                n_beside += len(delta.token_ids) if delta.request_id == row else 0
        beside = (time.perf_counter() - began) / max(1, n_beside)
        for name in (row, other):
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()
        return alone, beside

    def _step_of(self, row: str) -> int:
        return sum(len(delta.token_ids) for delta in self._engine.step() if delta.request_id == row)


def main(args: Args) -> int:
    """Measure every cell."""
    device = find_device("device", args.device)
    with torch.inference_mode():
        pair, facts = make_pair(args.target, args.draft, [], device=device, dtype=args.dtype, epsilon=args.epsilon)
        text = [token for each in encode(pair.tokenizer, read_prompts(list(args.prompts), 64)) for token in each]
        print(line_of(COLUMNS), flush=True)
        found = []
        for cell in args.cells:
            engine = build(pair, cell, device, args)
            for row in measure(Reader(engine, text), cell, args):
                found.append(row)
                print(line_of(COLUMNS, row), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps({**facts, "args": _words(args), "cells": found}, indent=1))
            if args.profile and cell == args.cells[0]:
                print(profiled(Reader(engine, text[7:]), max(args.lengths), device), flush=True)
            engine.close()
            del engine
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


def build(pair: GrownPair, cell: str, device: torch.device, args: Args) -> Engine:
    """The engine of a cell, with the default limits of a round."""
    sizes = settings_of(cell)
    drafts = sizes["method"] != "ar"
    config = EngineConfig(
        **sizes,
        draft=(pair.draft_name if pair.draft is None else "given") if drafts else None,
        link="inline",
        device=str(device),
        dtype=args.dtype,
        kv_memory="16GiB" if device.type == "cuda" else "1GiB",
        max_model_len=min(8192, pair.target.model.spec.max_length),
        max_batch_rows=max(2, args.crowd),
    )
    return Engine(pair.target, pair.tokenizer, config, draft=pair.draft)


def measure(reader: Reader, cell: str, args: Args) -> list[dict[str, Any]]:
    """A row for each length; the crowd in the first."""
    rows: list[dict[str, Any]] = []
    reader.first_tokens([reader.prompt(length) for length in (CROWD_LENGTH, max(args.lengths))], n=8)  # warm
    for length in args.lengths:
        new, cached = list[float](), list[float]()
        for _ in range(args.repeats):
            prompt = reader.prompt(length)
            new += reader.first_tokens([prompt])
            cached += reader.first_tokens([[*prompt[:-1], prompt[0]]])
        alone, beside = reader.beside(length)
        first = median(new)
        row = {"cell": cell, "length": length, "tok_s": length / first, "first_ms": 1e3 * first}
        rows.append(row | {"cached_ms": 1e3 * median(cached), "alone_ms": 1e3 * alone, "beside_ms": 1e3 * beside})
    if args.crowd:
        crowd = reader.first_tokens([reader.prompt(CROWD_LENGTH) for _ in range(args.crowd)], n=4)
        rows[0] |= {"crowd_ms": 1e3 * median(crowd), "crowd_last_ms": 1e3 * max(crowd)}
    return rows


def profiled(reader: Reader, length: int, device: torch.device) -> str:
    """The operations that take most of the device's time while a prompt is read."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    prompt = reader.prompt(length)
    with profile(activities=kinds) as found:
        (seconds,) = reader.first_tokens([prompt])
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
    return f"a prompt of {length} tokens, {1e3 * seconds:.1f} ms with the profiler\n{table}"


def _digits(n: int) -> list[int]:
    """Tokens that tell the n-th prompt from others."""
    return [20 + int(digit) for digit in f"{n:04}"]


def _greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def _words(args: Args) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(args).items()}


def run() -> int:
    """The command."""
    try:
        return main(tyro.cli(Args))
    except SaguaroError as e:
        print(e, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())

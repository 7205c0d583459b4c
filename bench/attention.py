"""Attention and sampling kernels on a GPU: which tiles and splits are fastest, model by model.

    python -m bench.attention --json attention.json

A time is that of one call in a CUDA graph of many calls. Each call has its own keys, so that they are not in the cache,
as in a real step. Grids are sized for texts of up to 2048 tokens (4096 for the longest here), as in a captured step.
Each configuration is checked once against its plain-torch twin.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
except ModuleNotFoundError as error:
    raise SystemExit("bench.attention needs triton, which comes with torch for CUDA") from error

from bench.kernels import time_us
from saguaro.kernels import attention, sample
from saguaro.kernels.attention import Tile

DTYPE = torch.bfloat16
PAGE_SIZE = 16
CACHE_BYTES = 120e6  # read between two uses of the same bytes: more than twice the H200's L2 cache
MOST_CALLS = 96  # in one graph
POOL_BYTES = 300_000_000
N_VOCAB, N_KNOWN = 151936, 151669


class Model(NamedTuple):
    """Heads of a model, and its numbers of queries per row in a step."""

    name: str
    n_heads: int
    n_kv: int
    d: int
    n_queries: tuple[int, ...]
    block_ms: tuple[int, ...]  # to try besides the one in use

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv


MODELS = [
    Model("32b", 64, 8, 128, (1, 7), (32, 16)),
    Model("8b", 32, 8, 128, (1, 7), (64, 16)),
    Model("0.6b", 16, 8, 128, (1, 2, 7), (32,)),
    Model("smollm2", 9, 3, 64, (1, 7), (16,)),
]


class Config(NamedTuple):
    """A split and a tile."""

    split: int
    tile: Tile

    def __str__(self) -> str:
        return f"{self.split:>4} {self.tile.block_m:>4} {self.tile.block_n:>4} {self.tile.n_warps} {self.tile.n_stages}"


CUTS = [  # split, block_n, warps, stages
    (64, 64, 4, 1),
    (64, 64, 4, 2),
    (128, 64, 4, 2),
    (128, 64, 4, 3),
    (128, 128, 4, 1),
    (128, 128, 4, 2),
    (128, 128, 8, 1),
    (128, 128, 8, 2),
    (256, 64, 4, 3),
    (256, 128, 4, 2),
    (256, 128, 8, 2),
]
FEW_CUTS = [CUTS[i] for i in (1, 3, 4, 7)]  # for other numbers of rows in a tile


@dataclass(frozen=True)
class Case:
    """A call: n_rows rows of one length, with n queries each."""

    n_rows: int
    length: int
    n: int

    @property
    def longest(self) -> int:
        """The length that the grid is sized for."""
        return 2048 if self.length <= 2048 else 4096

    def __str__(self) -> str:
        return f"{self.n_rows}x{self.length}x{self.n}"


PLACES = [(1, 300), (1, 1000), (1, 4000), (8, 300), (8, 1000), (8, 4000), (32, 1000)]  # rows, length
PROGRAMS = (256, 512, 1024, 2048)


def main() -> None:
    """Measure, print tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=85.0, help="seconds after which no more is tried")
    parser.add_argument("--json", type=Path, default=Path("attention.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.attention measures a GPU, and torch sees none here")
    bench = Bench(torch.device("cuda"), time.monotonic() + args.limit)
    compile_all(tasks())
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    parts: dict[str, Callable[[Bench], Any]] = {
        "sample": sweep_sample,
        "attend": lambda bench: [sweep_attend(bench, model) for model in MODELS],
        "programs": lambda bench: [sweep_programs(bench, model) for model in MODELS],
    }
    for name, part in parts.items():
        found[name] = part(bench)
        args.json.write_text(json.dumps(found, indent=1))
    print_best(found)
    print(f"written to {args.json}")


class Bench:
    """Memory to read from, counters, and the deadline."""

    def __init__(self, device: torch.device, deadline: float = math.inf) -> None:
        torch.manual_seed(0)
        self.device, self.deadline = device, deadline
        self.pool = torch.empty(POOL_BYTES // 2, dtype=DTYPE, device=device).normal_()
        self.arrived = attention.counters(device)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(DTYPE)

    def texts(self, model: Model, case: Case) -> tuple[list[Tensor], Tensor]:
        """KV memories [tokens, 2 * H_kv, d] to read in turn, and the pages [R, P] of every row in each."""
        n_pages = math.ceil(case.length / PAGE_SIZE)
        n_slots = case.n_rows * n_pages * PAGE_SIZE
        pages = torch.randperm(case.n_rows * n_pages, device=self.device).view(case.n_rows, n_pages).int()
        width = 2 * model.n_kv * model.d
        wanted = min(MOST_CALLS, math.ceil(CACHE_BYTES / (2 * n_slots * width)), len(self.pool) // (n_slots * width))
        return list(self.pool[: wanted * n_slots * width].view(wanted, n_slots, 2 * model.n_kv, model.d)), pages


class Calls:
    """The same call on several memories, with any configuration; and its twin."""

    def __init__(self, bench: Bench, model: Model, case: Case) -> None:
        self.memories, pages = bench.texts(model, case)
        self.q = bench.randn(case.n_rows * case.n, model.n_heads, model.d)
        ends = torch.full((case.n_rows,), case.length, dtype=torch.int32, device=bench.device)
        starts = torch.arange(case.n_rows + 1, dtype=torch.int32, device=bench.device) * case.n
        self._rest = (pages, starts, ends, PAGE_SIZE, case.n, case.longest, model.d**-0.5)
        self._arrived = bench.arrived

    def of(self, config: Config, **kwargs: Any) -> list[Callable[[], Tensor]]:
        """One call for each memory."""
        kwargs |= {"split": config.split, "arrived": self._arrived, "_tile": config.tile}
        return [partial(attention.attend, self.q, memory, *self._rest, **kwargs) for memory in self.memories]

    def error(self, config: Config) -> float:
        """The largest difference from the twin, relative to its largest value."""
        expected = attention.attend_plain(self.q, self.memories[0], *self._rest).float()
        return float((self.of(config)[0]().float() - expected).abs().max() / expected.abs().max())


# Configurations


def present(model: Model) -> Config:
    """attend's configuration in use."""
    return Config(attention.SPLIT, attention.tile_of(model.group, model.d, DTYPE))


def candidates(model: Model) -> list[Config]:
    """Configurations of attend; the one in use first."""
    now = present(model)
    found = [now, *(_cut(now.tile.block_m, *cut) for cut in CUTS)]
    found += [_cut(block_m, *cut) for block_m in model.block_ms if block_m >= model.group for cut in FEW_CUTS]
    return list(dict.fromkeys(found))


def _cut(block_m: int, split: int, block_n: int, n_warps: int, n_stages: int) -> Config:
    return Config(split, Tile(block_m, block_n, n_warps, n_stages))


# Compiling


def tasks() -> list[tuple[Model, Case, Config]]:
    """A call for every kernel: with parallel splits, and, for many rows, with all splits in one program."""
    return [(model, Case(n, 64, 1), cut) for model in MODELS for cut in candidates(model) for n in (1, 32)]


def compile_one(task: tuple[Model, Case, Config]) -> None:
    """Compile a kernel into Triton's disk cache. Kernels that exceed the GPU's resources are reported later."""
    model, case, config = task
    try:
        Calls(_bench_of_process(), model, case).of(config)[0]()
    except triton.runtime.errors.OutOfResources:
        return


@cache
def _bench_of_process() -> Bench:
    return Bench(torch.device("cuda"))


def compile_all(todo: Iterable[tuple[Model, Case, Config]]) -> None:
    """Compile in parallel."""
    todo, began = list(todo), time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, todo, chunksize=2))
    print(f"{len(todo)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


# Sweeps


def sweep_attend(bench: Bench, model: Model) -> dict[str, Any]:
    """Every configuration of a model in every case."""
    cases = [Case(n_rows, length, n) for n in model.n_queries for n_rows, length in PLACES]
    return {"model": model.name, **sweep(bench, f"{model.name} attend", model, cases, candidates(model))}


def sweep(bench: Bench, title: str, model: Model, cases: list[Case], configs: list[Config]) -> dict[str, Any]:
    """Every configuration in every case, sorted by geometric mean; configs[0] is the present one."""
    calls = [Calls(bench, model, case) for case in cases]
    print(f"\n{title}, us{'split m n warps stages':>34} " + " ".join(f"{case!s:>10}" for case in cases))
    tried: list[dict[str, Any]] = []
    for index, config in enumerate(configs):
        if index and bench.is_late:
            print("time is up: the other configurations are not tried")
            break
        try:
            error = calls[0].error(config)
            us = [time_us(call.of(config)) for call in calls]
        except triton.runtime.errors.OutOfResources:
            print(f"{config!s:>40} needs more than a multiprocessor has")
            continue
        _print_row(f"{config}{'' if index else ' (present)'}", us, f" error {error:.0e}")
        tried.append({"config": [config.split, *config.tile], "us": us, "error": error, "is_present": not index})
    tried.sort(key=lambda one: _mean(one["us"]))
    return {"title": title, "cases": list(map(str, cases)), "tried": tried}


def sweep_programs(bench: Bench, model: Model) -> dict[str, Any]:
    """How many programs a call of several rows should use; the result is bitwise the same."""
    cases = [Case(n_rows, length, n) for n in model.n_queries for n_rows, length in PLACES if n_rows > 1]
    calls, found = [Calls(bench, model, case) for case in cases], {}
    print(f"\n{model.name} programs, us{'':>24} " + " ".join(f"{case!s:>10}" for case in cases))
    for n in PROGRAMS:
        if not bench.is_late:
            found[n] = [time_us(call.of(present(model), _n_programs=n)) for call in calls]
            _print_row(str(n), found[n])
    return {"model": model.name, "cases": list(map(str, cases)), "us": found}


def sweep_sample(bench: Bench) -> list[dict[str, Any]]:
    """choose and rank with several block sizes; the tokens are compared with the twin's."""
    blocks, found = (1024, 2048, 4096), []
    print(f"\n{'n best of rows, us':>40} " + " ".join(f"{f'block {block}':>10}" for block in blocks))
    for n_rows in (1, 8, 64):
        many = [torch.randn(n_rows, N_VOCAB, device=bench.device) * 3 for _ in range(max(2, 200 // n_rows))]
        seeds = torch.randint(2**63 - 1, (n_rows,), device=bench.device)
        for heat, n in ((0.0, 1), (1.0, 1), (0.0, 9), (1.0, 9)):
            heats, positions = (
                torch.full((n_rows,), heat, device=bench.device),
                torch.arange(n_rows, device=bench.device),
            )
            rules = (heats, seeds, positions, N_KNOWN, n)
            us = [time_us([partial(sample.rank, one, *rules, _block=block) for one in many]) for block in blocks]
            wrong = sample.rank(many[0], *rules)[0] != sample.rank_plain(many[0], *rules)[0]
            n_wrong = int(wrong.any(1).sum())
            _print_row(f"{n} best of {n_rows}, temperature {heat:.0f}", us, f" {n_wrong} rows differ")
            found.append({"n": n, "rows": n_rows, "heat": heat, "blocks": blocks, "us": us, "n_wrong": n_wrong})
    return found


# Tables


def print_best(found: dict[str, Any]) -> None:
    """The best and the present configuration of every sweep, and the best of every case."""
    for one in found["attend"]:
        best, now = one["tried"][0], next(tried for tried in one["tried"] if tried["is_present"])
        print(f"\n{one['title']}, us{'':>34} " + " ".join(f"{case:>10}" for case in one["cases"]))
        _print_row(f"best {_name(best)}", best["us"])
        _print_row(f"present {_name(now)}", now["us"])
        firsts = [_best_of(one["tried"], i) for i in range(len(one["cases"]))]
        _print_row("best of each case", [tried["us"][i] for i, tried in enumerate(firsts)])
        print(" ".join(f"{case}: {_name(tried)};" for case, tried in zip(one["cases"], firsts, strict=True)))


def _best_of(tried: list[dict[str, Any]], case: int) -> dict[str, Any]:
    return min(tried, key=lambda one: float(one["us"][case]))


def _name(tried: dict[str, Any]) -> str:
    return "/".join(map(str, tried["config"]))


def _print_row(name: str, us: list[float], remark: str = "") -> None:
    print(f"{name:>40} {' '.join(f'{one:10.1f}' for one in us)} {remark}", flush=True)


def _mean(us: list[float]) -> float:
    """Mean of logarithms."""
    return sum(map(math.log, us)) / len(us)


if __name__ == "__main__":
    main()

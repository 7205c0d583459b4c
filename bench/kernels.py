"""The kernels on a GPU: how near they come to the memory's bandwidth, and which configuration comes nearest.

    python -m bench.kernels --what all --json kernels.json

Shapes are those of two models, 32b and 0.6b. Every time is that of a call in a CUDA graph of many, each with weights
(or keys) of its own, so that the cache does not hold what a step would read from memory. Products are compared with
cuBLAS's alone (torch.mm: without the norm, the gate or the sum that ours include), and checked against float32 and for
rows that are the same bits whatever their number.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
except ModuleNotFoundError as error:
    raise SystemExit("bench.kernels needs triton, which comes with torch for CUDA") from error

from saguaro.kernels import linear, rotary, sample
from saguaro.kernels.attention import attend, attend_plain
from saguaro.kernels.branches import attend_branches, attend_branches_plain
from saguaro.kernels.linear import Config

DTYPE = torch.bfloat16
ROWS = (1, 7, 16, 32, 64)
CACHE_BYTES = 200e6  # read between two uses of the same bytes: four times what the H200's second-level cache holds
POOL_BYTES = 1_600_000_000  # the largest weight fits
EPS = 1e-6
PAGE_SIZE = 16
BRANCHES = 8
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A product of a model."""

    model: str
    name: str
    kind: str  # normed, gated or add
    n_in: int
    n_out: int
    is_wide: bool = False  # writes float32

    @property
    def n_bytes(self) -> int:
        """Of the weight."""
        return 2 * self.n_in * self.n_out


SHAPES = [
    Shape("32b", "qkv", "normed", 5120, 10240),
    Shape("32b", "out", "add", 8192, 5120),
    Shape("32b", "gate_up", "gated", 5120, 51200),
    Shape("32b", "down", "add", 25600, 5120),
    Shape("32b", "head", "normed", 5120, 151936, is_wide=True),
    Shape("0.6b", "qkv", "normed", 1024, 4096),
    Shape("0.6b", "out", "add", 2048, 1024),
    Shape("0.6b", "gate_up", "gated", 1024, 6144),
    Shape("0.6b", "down", "add", 3072, 1024),
    Shape("0.6b", "head", "normed", 1024, 151936, is_wide=True),
]
HEADS = {"32b": (64, 8, 128), "0.6b": (16, 8, 128)}  # H, H_kv, d
TILES = [  # block_n, block_k, warps, stages
    (16, 256, 2, 4),
    (16, 256, 4, 4),
    (32, 128, 4, 4),
    (32, 128, 4, 6),
    (32, 256, 4, 3),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 8, 6),
    (128, 128, 8, 3),
]
ADD_TILES = [TILES[i] for i in (1, 2, 4, 5, 7, 8, 9, 11)]  # they are tried with every split, so fewer of them
SPLITS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure what was asked for, print tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("linear", "attention", "sample", "all"), default="all")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which the sweep tries no more")
    parser.add_argument("--json", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.kernels measures a GPU, and torch sees none here")
    deadline = time.monotonic() + args.limit
    torch.manual_seed(0)
    bench = Bench(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bench.bandwidth / 1e12:.2f} TB/s")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "bandwidth": bench.bandwidth}
    found |= {"torch": torch.__version__, "triton": triton.__version__}
    parts: dict[str, Callable[[], Any]] = {
        "sample": lambda: {"sample": bench_sample(bench), "rotary": bench_rotary(bench)},
        "attention": lambda: bench_attention(bench),
        "linear": lambda: bench_linear(bench, deadline),
    }
    for name, part in parts.items():
        if args.what in (name, "all"):
            found[name] = part()
            args.json.write_text(json.dumps(found, indent=1))
    print(f"written to {args.json}")


class Bench:
    """Memory to read from, and its bandwidth."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.empty(POOL_BYTES // 2, dtype=DTYPE, device=device).normal_(std=0.02)
        self.arrived = linear.counters(device)
        self.bandwidth = self._bandwidth()  # bytes per second

    def copies(self, n: int) -> list[Tensor]:
        """Pieces of n elements, as many as it takes to overflow the cache."""
        wanted = max(1, math.ceil(CACHE_BYTES / (2 * n)))
        return [self.pool[i * n : (i + 1) * n] for i in range(min(wanted, len(self.pool) // n))]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(DTYPE)

    def _bandwidth(self) -> float:
        big = self.pool.view(torch.float32)
        sums: list[Call] = [partial(torch.sum, big), partial(torch.amax, big)]
        return max(4 * big.numel() / (time_us([call]) * 1e-6) for call in sums)


def time_us(calls: Sequence[Call], least_ms: float = 4.0) -> float:
    """Microseconds of one of the calls, all in one CUDA graph, replayed for some milliseconds; the median of three."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _replay_ms(graph, 1)
    times = sorted(_replay_ms(graph, max(1, math.ceil(least_ms / 3 / max(once, 1e-3)))) for _ in range(3))
    return times[1] * 1e3 / len(calls)


def _replay_ms(graph: torch.cuda.CUDAGraph, n: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()  # what runs before the clock hides the host's delay
    began.record()
    for _ in range(n):
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / n


# Products


@dataclass(frozen=True)
class Inputs:
    """Rows of one product."""

    x: Tensor  # [T, in]
    stream: Tensor  # [T, out]
    norm: Tensor  # [in]

    def first(self, n: int) -> "Inputs":
        return Inputs(self.x[:n], self.stream[:n], self.norm)


def inputs(shape: Shape, n_rows: int, device: torch.device) -> Inputs:
    """Random rows."""
    x, stream, norm = (torch.randn(*size, device=device).to(DTYPE) for size in _sizes(shape, n_rows))
    return Inputs(x, stream, norm.abs() + 0.5)


def _sizes(shape: Shape, n_rows: int) -> list[tuple[int, ...]]:
    return [(n_rows, shape.n_in), (n_rows, shape.n_out if shape.kind == "add" else 1), (shape.n_in,)]


def ours(shape: Shape, given: Inputs, weight: Tensor, cut: Config | None, arrived: Tensor | None) -> Tensor:
    """The product by our kernel."""
    if shape.kind == "add":
        return linear.add_product(given.stream, given.x, weight, None, arrived, _config=cut)
    if shape.kind == "gated":
        return linear.gated_product(given.x, given.norm, EPS, weight, None, _config=cut)
    out_dtype = torch.float32 if shape.is_wide else None
    return linear.normed_product(given.x, given.norm, EPS, weight, None, out_dtype, _config=cut)


def exact(shape: Shape, given: Inputs, weight: Tensor) -> Tensor:
    """The product in float32."""
    x, stream, norm, wide = given.x.float(), given.stream.float(), given.norm.float(), weight.float()
    if shape.kind == "add":
        return linear.add_product_plain(stream, x, wide, None)
    if shape.kind == "gated":
        return linear.gated_product_plain(x, norm, EPS, wide, None)
    return linear.normed_product_plain(x, norm, EPS, wide, None)


def present(shape: Shape) -> Config:
    """The configuration in use."""
    return linear.config(shape.n_in, shape.n_out, DTYPE, may_split=shape.kind == "add")


def candidates(shape: Shape) -> list[Config]:
    """What to try: the present configuration first."""
    is_add = shape.kind == "add"
    found = [present(shape)]
    for block_n, block_k, warps, stages in ADD_TILES if is_add else TILES:
        for split in SPLITS if is_add else (1,):
            n_programs = split * math.ceil(shape.n_out / block_n)
            n_chunks = math.ceil(shape.n_in / block_k)
            if not is_add or (split <= n_chunks and 128 <= n_programs <= 660):
                found.append(Config(block_n, block_k, split, warps, stages))
    return list(dict.fromkeys(found))


def compile_one(task: tuple[Shape, Config, int]) -> None:
    """Leave a kernel in Triton's cache on disk; one that needs more than the GPU has is found out again later."""
    shape, cut, n_rows = task
    device = torch.device("cuda")
    weight = torch.empty(shape.n_out, shape.n_in, dtype=DTYPE, device=device).t()
    try:
        for arrived in (linear.counters(device), None) if cut == present(shape) else (linear.counters(device),):
            ours(shape, inputs(shape, n_rows, device), weight, cut, arrived)
    except triton.runtime.errors.OutOfResources:
        return


def compile_all(tasks: Iterable[tuple[Shape, Config, int]]) -> None:
    """Compile side by side, each kernel once: models share those that differ in sizes only."""
    kernels: dict[object, tuple[Shape, Config, int]] = {}
    for shape, cut, n_rows in tasks:
        per_split = math.ceil(math.ceil(shape.n_in / cut.block_k) / cut.split) * cut.block_k
        n_split = math.ceil(shape.n_in / per_split)
        kernels[shape.kind, shape.is_wide, cut._replace(split=n_split), n_rows] = (shape, cut, n_rows)
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    began = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, kernels.values(), chunksize=4))
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - began:.0f} s")


def bench_linear(bench: Bench, deadline: float) -> list[dict[str, Any]]:
    """Every shape with every candidate; prints the best configurations last."""
    compile_all((shape, cut, n) for shape in SHAPES for cut in candidates(shape) for n in (16, 32, 64))
    found = [sweep(bench, shape, deadline) for shape in SHAPES]
    head = " ".join(f"{f'T={n}':>22}" for n in ROWS)
    print(f"\nbest configurations: microseconds, TB/s, share of the read bandwidth\n{'':45}{head}")
    for shape, one in zip(SHAPES, found, strict=True):
        best = one["tried"][0]
        columns = (
            f"{us:8.1f} {shape.n_bytes / us / 1e6:5.2f} {shape.n_bytes / us * 1e6 / bench.bandwidth:6.0%}  "
            for us in best["us"]
        )
        print(f"{shape.model:>5} {shape.name:>8} {tuple(best['config'])!s:>28}  {' '.join(columns)}")
    return found


def sweep(bench: Bench, shape: Shape, deadline: float) -> dict[str, Any]:
    """One shape: cuBLAS, the present configuration, then the others until time is up; best first."""
    weights = [piece.view(shape.n_out, shape.n_in).t() for piece in bench.copies(shape.n_in * shape.n_out)]
    given = inputs(shape, max(ROWS), bench.device)
    wanted = exact(shape, given, weights[0])
    rows = [given.first(n) for n in ROWS]
    cublas = [time_us([partial(torch.mm, one.x, weight) for weight in weights]) for one in rows]
    _row(shape, "cuBLAS", cublas)
    tried: list[dict[str, Any]] = []
    for index, cut in enumerate(candidates(shape)):
        if index and time.monotonic() > deadline:
            print("      time is up: the other configurations are not tried")
            break
        try:
            error, is_same = check(shape, given, weights[0], cut, wanted, bench.arrived)
            us = [
                time_us([partial(ours, shape, one, weight, cut, bench.arrived) for weight in weights]) for one in rows
            ]
        except triton.runtime.errors.OutOfResources:
            print(f"{'':15} {tuple(cut)!s:>28}  needs more than a multiprocessor has")
            continue
        tried.append({"config": list(cut), "us": us, "error": error, "is_invariant": is_same, "is_present": not index})
        _row(shape, str(tuple(cut)), us, f"error {error:.1e}{'' if is_same else '  ROWS DIFFER'}")
    twice = None
    if shape.kind == "add":
        twice = [time_us([partial(ours, shape, one, weight, None, None) for weight in weights]) for one in rows]
        _row(shape, "present, two kernels", twice)
    tried.sort(key=lambda one: (not one["is_invariant"], sum(map(math.log, one["us"]))))
    return {"shape": asdict(shape), "rows": ROWS, "cublas_us": cublas, "two_kernels_us": twice, "tried": tried}


def check(
    shape: Shape, given: Inputs, weight: Tensor, cut: Config, wanted: Tensor, arrived: Tensor
) -> tuple[float, bool]:
    """The largest error, of the largest value; whether rows are the same bits whatever their number."""
    result = ours(shape, given, weight, cut, arrived)
    error = float((result.float() - wanted).abs().max() / wanted.abs().max())
    parts = [ours(shape, given.first(n), weight, cut, arrived) for n in ROWS]
    if cut == present(shape):
        parts.append(ours(shape, given, weight, cut, None))  # add_product: summed by a second kernel
    return error, all(torch.equal(part, result[: len(part)]) for part in parts)


def _row(shape: Shape, name: str, us: list[float], remark: str = "") -> None:
    print(
        f"{shape.model:>5} {shape.name:>8}  {name:>28}  {' '.join(f'{one:8.1f}' for one in us)}  {remark}", flush=True
    )


# Tokens from logits, heads into memory


def bench_sample(bench: Bench) -> list[dict[str, Any]]:
    """choose and rank beside plain torch, at temperature 0 and 1."""
    n_vocab, n_known = 151936, 151669
    print(f"\n{'sample, us':>28} {'L':>4} {'torch':>10} " + " ".join(f"block {b:>5}" for b in (1024, 2048, 4096)))
    found = []
    for n_rows in (1, 7, 64):
        many = [torch.randn(n_rows, n_vocab, device=bench.device) * 3 for _ in range(max(1, 256 // n_rows))]
        seeds = torch.randint(2**63 - 1, (n_rows,), device=bench.device)
        positions = torch.arange(n_rows, device=bench.device)
        for heat, n in ((0.0, 1), (1.0, 1), (1.0, 8), (1.0, 65)):
            rules = (torch.full((n_rows,), heat, device=bench.device), seeds, positions, n_known)
            plain = _time_eager_us(partial(_best_plain, many[0], heat, n, rules))
            blocks = {
                block: time_us([partial(sample.rank, logits, *rules, n, _block=block) for logits in many])
                for block in (1024, 2048, 4096)
            }
            expected, _ = sample.rank_plain(many[0], *rules, n)
            n_wrong = int((sample.rank(many[0], *rules, n)[0] != expected).any(1).sum())
            found.append({"n": n, "heat": heat, "rows": n_rows, "plain": plain, "blocks": blocks, "n_wrong": n_wrong})
            name = f"{n} best, temperature {heat:.0f}"
            times = " ".join(f"{us:11.1f}" for us in blocks.values())
            print(f"{name:>28} {n_rows:>4} {plain:10.1f} {times}  {n_wrong} rows differ")
    return found


def _best_plain(logits: Tensor, heat: float, n: int, rules: tuple[Tensor, Tensor, Tensor, int]) -> object:
    if n > 1:
        return sample.rank_plain(logits, *rules, n)
    return sample.choose_plain(logits, *rules) if heat else logits[:, : rules[3]].argmax(-1)


def bench_rotary(bench: Bench) -> list[dict[str, Any]]:
    """turn_and_store beside its twin."""
    print(f"\n{'turn_and_store, us':>28} {'T':>4} {'torch':>10} {'ours':>10}")
    found = []
    for model, (n_q, n_kv, d) in HEADS.items():
        for n in (1, 7, 64):
            heads, cos, sin = bench.randn(n, n_q + 2 * n_kv, d), bench.randn(n, d), bench.randn(n, d)
            memory, slots = bench.pool[: 4096 * 2 * n_kv * d].view(4096, 2 * n_kv, d), torch.arange(n).to(bench.device)
            norm = bench.randn(d)
            given = (heads, norm, norm, EPS, cos, sin, memory, slots)
            us = time_us([partial(rotary.turn_and_store, *given)] * 50)
            plain = _time_eager_us(partial(rotary.turn_and_store_plain, *given))
            found.append({"model": model, "rows": n, "plain_eager_us": plain, "us": us})
            print(f"{model:>28} {n:>4} {plain:10.1f} {us:10.1f}")
    return found


def _time_eager_us(call: Call, n: int = 20) -> float:
    """Without a graph, for twins that wait for the host: what torch costs as it stands."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6 / n


# Attention


def bench_attention(bench: Bench) -> list[dict[str, Any]]:
    """Both kernels; TB/s of the keys and values that must be read, each once."""
    print(f"\n{'attention':>28} {'rows':>4} {'length':>6} {'queries':>7} {'us':>8} {'TB/s':>6} {'error':>8}")
    found = []
    for model in HEADS:
        for n_rows in (1, 8):
            for length in (300, 1000, 4000):
                for n_queries in (1, 7):
                    found.append(_attend(bench, model, n_rows, length, n_queries))
                found.append(_attend_branches(bench, model, n_rows, length))
    return found


def _texts(bench: Bench, model: str, n_rows: int, length: int) -> tuple[list[Tensor], Tensor]:
    """Memories [n_slots, 2 * H_kv, d] to read in turn, and the pages [R, P] of every row in each."""
    _, n_kv, d = HEADS[model]
    n_pages = math.ceil(length / PAGE_SIZE)
    n_slots = n_rows * n_pages * PAGE_SIZE
    pages = torch.randperm(n_rows * n_pages, device=bench.device).view(n_rows, n_pages).int()
    return [piece.view(n_slots, 2 * n_kv, d) for piece in bench.copies(n_slots * 2 * n_kv * d)], pages


def _attend(bench: Bench, model: str, n_rows: int, length: int, n_queries: int) -> dict[str, Any]:
    n_q, n_kv, d = HEADS[model]
    memories, pages = _texts(bench, model, n_rows, length)
    q = bench.randn(n_rows * n_queries, n_q, d)
    starts = torch.arange(n_rows + 1, device=bench.device).int() * n_queries
    lengths = torch.full((n_rows,), length, device=bench.device).int()
    rest = (pages, starts, lengths, PAGE_SIZE, n_queries, length)
    us = time_us([partial(attend, q, memory, *rest) for memory in memories])
    error = _error(attend(q, memories[0], *rest), attend_plain(q, memories[0], *rest))
    return _attended("attend", model, n_rows, length, n_queries, us, error, 4 * n_rows * length * n_kv * d)


def _attend_branches(bench: Bench, model: str, n_rows: int, length: int) -> dict[str, Any]:
    n_q, n_kv, d = HEADS[model]
    memories, pages = _texts(bench, model, n_rows, length)
    n, n_seen = n_rows * BRANCHES, 4
    q, own = bench.randn(n, n_q, d), bench.randn(n, 8, 2 * n_kv, d)
    forks = torch.full((n,), length, device=bench.device).int() - torch.arange(n, device=bench.device).int() % BRANCHES
    rest = (pages, forks, own, n_seen, PAGE_SIZE, length)
    us = time_us([partial(attend_branches, q, memory, *rest) for memory in memories])
    error = _error(attend_branches(q, memories[0], *rest), attend_branches_plain(q, memories[0], *rest))
    n_bytes = 4 * (n_rows * length + n * n_seen) * n_kv * d
    return _attended("branches", model, n_rows, length, BRANCHES, us, error, n_bytes)


def _attended(
    name: str, model: str, n_rows: int, length: int, n_queries: int, us: float, error: float, n_bytes: int
) -> dict[str, Any]:
    rate = n_bytes / us / 1e6
    title = f"{model} {name}"
    print(f"{title:>28} {n_rows:>4} {length:>6} {n_queries:>7} {us:8.1f} {rate:6.2f} {error:8.1e}", flush=True)
    found = {"kernel": name, "model": model, "rows": n_rows, "length": length, "queries": n_queries}
    return {**found, "us": us, "error": error, "tb_per_s": rate}


def _error(result: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((result.float() - expected.float()).abs().max() / expected.float().abs().max())


if __name__ == "__main__":
    main()

"""Products and layers on a GPU: their share of the memory bandwidth, and the best configuration of each.

    python -m bench.kernels --what all --json kernels.json

Shapes are those of two models, 32b and 0.6b. A time is that of one call in a CUDA graph of many calls. Each call has
its own weights (or keys), so that they are not in the cache, as in a real step. Products are compared with plain cuBLAS
(torch.mm, without the norm, gate or sum that ours include), checked against float32, and checked to be bitwise
independent of the number of rows. A chain is the sequence of a model's layers, as in a step, run in several ways: with
and without early start (saguaro/kernels/launch.py), and with and without small weights held in registers. Rules are
what a captured step does between its logits and its tokens.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

try:
    import triton
except ModuleNotFoundError as error:
    raise SystemExit("bench.kernels needs triton, which comes with torch for CUDA") from error

from saguaro.device.graphs import float_bits
from saguaro.kernels import launch, linear, rotary
from saguaro.kernels.adjust import adjust
from saguaro.kernels.attention import attend, counters
from saguaro.kernels.limits import limits
from saguaro.kernels.linear import Config, TritonProducts
from saguaro.kernels.row_rules import (
    BIASED,
    CHANGED,
    KINDS,
    MASKED,
    MOST_BIASES,
    NO_BIAS,
    NOTHING,
    PENALISED,
    REPETITION,
    SEAT,
    Tables,
    Texts,
)
from saguaro.kernels.sample import choose
from saguaro.kernels.short import Short
from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, KVWrite, Products, QKNormRope, Residual

DTYPE = torch.bfloat16
ROWS = (1, 7, 16, 32, 64, 224)
CACHE_BYTES = 200e6  # read between two uses of the same bytes: four times the H200's L2 cache
POOL_BYTES = 1_600_000_000  # the largest weight fits
EPS = 1e-6
PAGE_SIZE = 16
MOST_NODES = 8  # of a step
OWN, SEEN = 8, 4  # nodes on the path of a node: allocated, and seen
CHAIN_LENGTH = 640  # tokens of a chain's text
SQUARES = 64  # columns per partial sum of squares of the residual stream
MOST_CANDIDATES = 12
N_CHECKS = 20
N_TOKENS = 151936  # of the vocabulary
RULES = {  # kinds of rules, and top-p
    "none": (0, 1.0),
    "top-p": (0, 0.9),
    "penalties": (PENALISED, 1.0),
    "bias": (BIASED, 1.0),
    "masks": (MASKED, 1.0),
    "all of them": (PENALISED | BIASED | MASKED, 0.9),
}
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """One product of a model."""

    model: str
    name: str
    kind: str  # read, gated or write
    n_in: int
    n_out: int
    is_wide: bool = False  # writes float32

    @property
    def n_bytes(self) -> int:
        """Bytes of the weight."""
        return 2 * self.n_in * self.n_out


SHAPES = [
    Shape("32b", "qkv", "read", 5120, 10240),
    Shape("32b", "out", "write", 8192, 5120),
    Shape("32b", "gate_up", "gated", 5120, 51200),
    Shape("32b", "down", "write", 25600, 5120),
    Shape("32b", "head", "read", 5120, 151936, is_wide=True),
    Shape("0.6b", "qkv", "read", 1024, 4096),
    Shape("0.6b", "out", "write", 2048, 1024),
    Shape("0.6b", "gate_up", "gated", 1024, 6144),
    Shape("0.6b", "down", "write", 3072, 1024),
    Shape("0.6b", "head", "read", 1024, 151936, is_wide=True),
]
HEADS = {"32b": (64, 8, 128), "0.6b": (16, 8, 128)}  # H, H_kv, d
TILES = [  # block_n, block_k, warps, stages
    (64, 128, 4, 3),
    (64, 64, 4, 6),
    (32, 128, 4, 4),
    (128, 64, 8, 6),
    (128, 128, 8, 3),
]


def main() -> None:
    """Measure the selected parts, print tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("linear", "chain", "rotary", "rules", "all"), default="all")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds after which the sweep tries no more")
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
        "rotary": lambda: bench_rotary(bench),
        "rules": lambda: bench_rules(bench),
        "chain": lambda: bench_chain(bench),
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
        self.bandwidth = self._bandwidth()  # bytes per second

    def copies(self, n: int) -> list[Tensor]:
        """Pieces of n elements, enough to overflow the cache."""
        wanted = max(1, math.ceil(CACHE_BYTES / (2 * n)))
        return [self.pool[i * n : (i + 1) * n] for i in range(min(wanted, len(self.pool) // n))]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(DTYPE)

    def _bandwidth(self) -> float:
        big = self.pool.view(torch.float32)
        sums: list[Call] = [partial(torch.sum, big), partial(torch.amax, big)]
        return max(4 * big.numel() / (time_us([call]) * 1e-6) for call in sums)


def time_us(calls: Sequence[Call]) -> float:
    """Microseconds per call, all calls in one CUDA graph."""
    return time_graph_us(capture(calls)[0]) / len(calls)


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """A graph of the calls, and their results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def time_graph_us(graph: torch.cuda.CUDAGraph, least_ms: float = 4.0) -> float:
    """Microseconds of a replay, over some milliseconds; the median of three."""
    once = _replay_ms(graph, 1)
    return sorted(_replay_ms(graph, max(1, math.ceil(least_ms / 3 / max(once, 1e-3)))) for _ in range(3))[1] * 1e3


def _replay_ms(graph: torch.cuda.CUDAGraph, n: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()  # work before the first event hides the host's launch delay
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

    x: Tensor  # [T, in]: input of the product
    norm: Tensor  # [in]
    old: Tensor  # [T, out]: residual that it is added to
    next_norm: Tensor  # [out]

    def first(self, n: int) -> "Inputs":
        return replace(self, x=self.x[:n], old=self.old[:n])

    def stream(self) -> Residual:
        """x as the previous product stores it: with one sum of squares per tile."""
        n_rows, n_in = self.x.shape
        squares = self.x.float().square().view(n_rows, n_in // SQUARES, SQUARES).sum(2)
        scaled = (self.x.float() * self.norm.float()).to(DTYPE)
        return Residual(self.x, Norm(self.norm, EPS), linear.Scaled(scaled, squares, EPS))


def inputs(shape: Shape, n_rows: int, device: torch.device) -> Inputs:
    """Random rows; `old` only for a product that writes the residual stream."""
    n_out = shape.n_out if shape.kind == "write" else 1
    sizes: list[tuple[int, ...]] = [(n_rows, shape.n_in), (shape.n_in,), (n_rows, n_out), (n_out,)]
    x, norm, old, next_norm = (torch.randn(*size, device=device).to(DTYPE) for size in sizes)
    return Inputs(x, norm.abs() + 0.5, old, next_norm.abs() + 0.5)


def apply(shape: Shape, given: Inputs, read: Residual, weight: Tensor, by: Products) -> Tensor:
    """One product that reads or writes the residual stream."""
    if shape.kind == "write":
        norm = Norm(given.next_norm, EPS)
        return by.write(Residual(given.old, norm), given.x.to(weight.dtype), Linear(weight), norm).x
    if shape.kind == "gated":
        return by.read_gated(read, Linear(weight))
    return by.read(read, Linear(weight), torch.float32 if shape.is_wide else weight.dtype)


def exact(shape: Shape, given: Inputs, weight: Tensor) -> Tensor:
    """The product in float32."""
    wide = Inputs(given.x.float(), given.norm.float(), given.old.float(), given.next_norm.float())
    return apply(shape, wide, COMPOSED.begin(wide.x, Norm(wide.norm, EPS)), weight.float(), COMPOSED)


def cut_as(cut: Config | Short, device: torch.device) -> TritonProducts:
    """Products that all use this configuration."""
    return TritonProducts(device, lambda n_in, n_out, dtype: cut)


def candidates(shape: Shape) -> list[Config | Short]:
    """Configurations to try: the one in use, that of the loop kernel, and others."""
    weight = (shape.n_in, shape.n_out, DTYPE, torch.cuda.get_device_properties("cuda").multi_processor_count)
    found: list[Config | Short] = [linear.choose(*weight), linear.config(*weight)]
    for block_n, block_k, warps, stages in TILES:
        n_tiles, n_blocks = math.ceil(shape.n_out / block_n), math.ceil(shape.n_in / block_k)
        # The fewest parts that give every multiprocessor a program, and those that give it two.
        least = 2 ** math.ceil(math.log2(max(1.0, 128 / n_tiles)))
        for split in (least, 2 * least):
            if split <= min(16, n_blocks) and (split == least or split * n_tiles <= 512):
                found.append(Config(block_n, block_k, split, warps, stages))
    return list(dict.fromkeys(found))[:MOST_CANDIDATES]


def compile_one(task: tuple[Shape, Config | Short, int]) -> None:
    """Compile a kernel into Triton's disk cache. Kernels that exceed the GPU's resources are reported later."""
    shape, cut, n_rows = task
    device = torch.device("cuda")
    weight = torch.empty(shape.n_out, shape.n_in, dtype=DTYPE, device=device).t()
    given = inputs(shape, n_rows, device)
    try:
        apply(shape, given, given.stream(), weight, cut_as(cut, device))
    except triton.runtime.errors.OutOfResources:
        return


def compile_all(call: Callable[[Any], None], tasks: Iterable[Any]) -> None:
    """Compile in parallel."""
    began, tasks = time.monotonic(), list(tasks)
    workers = max(1, min(14, len(tasks), (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(call, tasks))
    print(f"{len(tasks)} tasks compiled in {time.monotonic() - began:.0f} s", flush=True)


def to_compile() -> Iterable[tuple[Shape, Config | Short, int]]:
    """Each kernel of the sweep once: models share those that differ in sizes only."""
    kernels: dict[object, tuple[Shape, Config | Short, int]] = {}
    for shape in SHAPES:
        for cut in candidates(shape):
            if isinstance(cut, Short):  # compiled for 16 rows only
                kernels[shape, cut] = (shape, cut, 16)
                continue
            for n_rows in (16, 32, 64):
                given = torch.empty(n_rows, shape.n_in, dtype=DTYPE, device="meta")
                words = linear._Cut.of(cut, n_rows, shape.n_in, shape.n_out).keywords(given)
                key = (shape.kind, shape.is_wide, shape.n_in // SQUARES, *words.values())
                kernels[key] = (shape, cut, n_rows)
    return kernels.values()


def bench_linear(bench: Bench, deadline: float) -> list[dict[str, Any]]:
    """Every shape with every candidate; prints the best configurations last."""
    compile_all(compile_one, to_compile())
    found = [sweep(bench, shape, deadline) for shape in SHAPES]
    head = " ".join(f"{f'T={n}':>18}" for n in ROWS)
    print(f"\nbest configurations: microseconds, TB/s, share of the read bandwidth\n{'':45}{head}")
    for shape, one in zip(SHAPES, found, strict=True):
        if one["tried"]:
            _best_row(shape, one["tried"][0], bench.bandwidth)
    return found


def _best_row(shape: Shape, best: dict[str, Any], bandwidth: float) -> None:
    columns = (
        f"{us:6.1f} {shape.n_bytes / us / 1e6:5.2f} {shape.n_bytes / us * 1e6 / bandwidth:5.0%} " for us in best["us"]
    )
    print(f"{shape.model:>5} {shape.name:>8} {tuple(best['config'])!s:>28}  {' '.join(columns)}")


def sweep(bench: Bench, shape: Shape, deadline: float) -> dict[str, Any]:
    """One shape: cuBLAS, the present configuration, then others until the deadline; sorted, best first."""
    weights = [piece.view(shape.n_out, shape.n_in).t() for piece in bench.copies(shape.n_in * shape.n_out)]
    given = inputs(shape, max(ROWS), bench.device)
    wanted = exact(shape, given, weights[0])
    rows = [given.first(n) for n in ROWS]
    streams = [one.stream() for one in rows]
    cublas = [time_us([partial(torch.mm, one.x, weight) for weight in weights]) for one in rows]
    _row(shape, "cuBLAS", cublas)
    tried: list[dict[str, Any]] = []
    for index, cut in enumerate(candidates(shape)):
        if index and time.monotonic() > deadline:
            print("      time is up: the other configurations are not tried")
            break
        by = cut_as(cut, bench.device)
        try:
            error, is_same = check(shape, rows, streams, weights[0], wanted, by)
            us = [
                time_us([partial(apply, shape, one, stream, weight, by) for weight in weights])
                for one, stream in zip(rows, streams, strict=True)
            ]
        except triton.runtime.errors.OutOfResources:
            print(f"{'':15} {tuple(cut)!s:>28}  needs more than a multiprocessor has")
            continue
        tried.append({"config": list(cut), "us": us, "error": error, "is_invariant": is_same, "is_present": not index})
        _row(shape, str(tuple(cut)), us, f"error {error:.1e}{'' if is_same else '  ROWS DIFFER'}")
    # Sorted by the usual numbers of rows; the table also has larger ones.
    tried.sort(key=lambda one: (not one["is_invariant"], sum(map(math.log, one["us"][:4]))))
    return {"shape": asdict(shape), "rows": ROWS, "cublas_us": cublas, "tried": tried}


def check(
    shape: Shape, rows: list[Inputs], streams: list[Residual], weight: Tensor, wanted: Tensor, by: Products
) -> tuple[float, bool]:
    """The largest error relative to the largest value; whether rows are bitwise independent of their number."""
    results = [apply(shape, one, stream, weight, by) for one, stream in zip(rows, streams, strict=True)]
    error = float((results[-1].float() - wanted).abs().max() / wanted.abs().max())
    return error, all(torch.equal(part, results[-1][: len(part)]) for part in results)


def _row(shape: Shape, name: str, us: list[float], remark: str = "") -> None:
    print(
        f"{shape.model:>5} {shape.name:>8}  {name:>28}  {' '.join(f'{one:8.1f}' for one in us)}  {remark}", flush=True
    )


# Layers, one after the other


Choose = Callable[[int, int, torch.dtype, int], Config | Short]


@dataclass(frozen=True)
class Way:
    """How a chain is run."""

    name: str
    choose: Choose | None  # None: torch products, our other kernels
    is_early: bool = True  # programmatic dependent launch


ONE_BY_ONE = Way("one after the other", linear.choose, is_early=False)
WAYS = [
    Way("torch products", None),
    ONE_BY_ONE,
    Way("early, loops only", linear.config),
    Way("early, as configured", linear.choose),
]
DEPTHS = {"32b": 8, "0.6b": 30}  # layers of a chain
STEPS = {"32b": ("1", "7", "16"), "0.6b": ("1", "7", "8 nodes")}


def launched(way: Way) -> AbstractContextManager[object]:
    """Context in which kernels use this way's is_early."""
    return nullcontext() if way.is_early else patch.object(launch, "_can_start_early", lambda device: False)


def products_of(way: Way, device: torch.device) -> Products:
    """The products of a way."""
    choose = way.choose
    if choose is None:
        return COMPOSED
    n = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonProducts(device, lambda n_in, n_out, dtype: choose(n_in, n_out, dtype, n))


@dataclass(frozen=True)
class Step:
    """The tokens of a step: the last n of one text, or n nodes of a tree after it."""

    n: int
    kv_index: Tensor  # [T] int64
    starts: Tensor  # [2] int32
    lengths: Tensor  # [1] int32: of the text, nodes included
    nodes: tuple[Tensor, Tensor, Tensor] | None  # see kernels.attention.Nodes

    @classmethod
    def of(cls, name: str, device: torch.device) -> "Step":
        n, is_tree = int(name.split(maxsplit=1)[0]), "nodes" in name
        starts = torch.tensor([0, n], dtype=torch.int32, device=device)
        if not is_tree:
            kv_index = torch.arange(CHAIN_LENGTH - n, CHAIN_LENGTH, device=device)
            return cls(n, kv_index, starts, starts.new_full((1,), CHAIN_LENGTH), None)
        paths = CHAIN_LENGTH + torch.arange(n, device=device)[:, None] * OWN + torch.arange(SEEN, device=device)
        nodes = (starts.new_full((1,), CHAIN_LENGTH), starts.new_full((n,), CHAIN_LENGTH + SEEN), paths.int())
        return cls(n, paths[:, -1], starts, starts.new_full((1,), CHAIN_LENGTH + n), nodes)


class Chain:
    """Layers of a model, each with its own weights and keys, and the head."""

    def __init__(self, model: str, n_layers: int, device: torch.device) -> None:
        self.device, (self.n_heads, n_kv, self.d) = device, HEADS[model]
        shapes = {shape.name: shape for shape in SHAPES if shape.model == model}
        self.layers = [
            {name: self._weight(shape) for name, shape in shapes.items() if name != "head"} for _ in range(n_layers)
        ]
        self.head, n_hidden = self._weight(shapes["head"]), shapes["qkv"].n_in
        n_keys = CHAIN_LENGTH + MOST_NODES * OWN
        self.memory = torch.randn(n_layers, n_keys, 2 * n_kv, self.d, device=device).to(DTYPE)
        self.pages = torch.arange(CHAIN_LENGTH // PAGE_SIZE, device=device).int()[None]
        self.arrived = counters(device)
        self.norm = Norm(torch.rand(n_hidden, device=device).to(DTYPE) + 0.5, EPS)
        self.rows, self.angles = (torch.randn(64, n, device=device).to(DTYPE) for n in (n_hidden, self.d))

    def _weight(self, shape: Shape) -> Linear:
        return Linear(torch.empty(shape.n_out, shape.n_in, dtype=DTYPE, device=self.device).normal_(std=0.02).t())

    def layer_bytes(self) -> int:
        """Bytes of weights and keys that a layer reads."""
        return 2 * (
            sum(linear.matrix.numel() for linear in self.layers[0].values()) + self.memory[0, :CHAIN_LENGTH].numel()
        )

    def run(self, step: Step, by: Products, has_head: bool = True) -> Tensor:
        """The logits of a step, or without the head the residual stream."""
        stream = by.begin(self.rows[: step.n], self.norm)
        for index, layer in enumerate(self.layers):
            angles = self.angles[: step.n]
            turn = QKNormRope(self.n_heads, None, None, angles, angles)
            q = by.read_heads(stream, layer["qkv"], turn, KVWrite(self.memory[index], step.kv_index))
            stream = by.write(stream, self._attend(index, q, step), layer["out"], self.norm)
            gated = by.read_gated(stream, layer["gate_up"])
            stream = by.write(stream, gated, layer["down"], self.norm)
        return by.read(stream, self.head, torch.float32) if has_head else stream.x

    def _attend(self, index: int, q: Tensor, step: Step) -> Tensor:
        return attend(
            q,
            self.memory[index],
            self.pages,
            step.starts,
            step.lengths,
            PAGE_SIZE,
            step.n,
            CHAIN_LENGTH + OWN,
            self.d**-0.5,
            nodes=step.nodes,
            arrived=self.arrived,
        )


def compile_chain(task: tuple[str, Way]) -> None:
    """Compile the kernels of a way into Triton's disk cache."""
    model, way = task
    device = torch.device("cuda")
    chain = Chain(model, 2, device)  # the second layer reads the first one's output
    with launched(way):
        for name in STEPS[model]:
            chain.run(Step.of(name, device), products_of(way, device))
    torch.cuda.synchronize()


def bench_chain(bench: Bench) -> list[dict[str, Any]]:
    """Whole layers in one graph: the effect of early start and of held small weights."""
    compile_all(compile_chain, [(model, way) for model in DEPTHS for way in WAYS])
    print(f"\n{'chain':>5} {'step':>10} {'':>20} {'us a layer':>10} {'floor':>6} {'share':>5} {'head':>6} {'whole':>8}")
    found = []
    for model, n_layers in DEPTHS.items():
        chain = Chain(model, n_layers, bench.device)
        for name in STEPS[model]:
            step = Step.of(name, bench.device)
            for way in WAYS:
                with launched(ONE_BY_ONE):
                    expected = chain.run(step, products_of(way, bench.device))
                found.append({"model": model, "step": name} | run_way(bench, chain, step, way, expected))
            for one in found[-len(WAYS) :]:
                _chain_row(one)
    return found


def run_way(bench: Bench, chain: Chain, step: Step, way: Way, expected: Tensor) -> dict[str, Any]:
    """Times of one way, and how often its bits differ from the eager result without early start."""
    with launched(way):
        by = products_of(way, bench.device)
        n_wrong = 0
        graph, (said,) = capture([partial(chain.run, step, by)])
        for _ in range(N_CHECKS):
            graph.replay()
            n_wrong += not torch.equal(cast(Tensor, said), expected)
        whole = time_graph_us(graph)
        layers = time_graph_us(capture([partial(chain.run, step, by, False)])[0])
    a_layer, floor = layers / len(chain.layers), chain.layer_bytes() / bench.bandwidth * 1e6
    times = {"us_a_layer": a_layer, "floor_us": floor, "head_us": whole - layers, "whole_us": whole}
    return {"way": way.name, **times, "n_wrong": None if way.choose is None else n_wrong}


def _chain_row(one: dict[str, Any]) -> None:
    times = f"{one['us_a_layer']:10.1f} {one['floor_us']:6.1f} {one['floor_us'] / one['us_a_layer']:5.0%}"
    remark = f"  BITS DIFFER {one['n_wrong']} times" if one["n_wrong"] else ""
    whole = f"{one['head_us']:6.1f} {one['whole_us']:8.1f}"
    print(f"{one['model']:>5} {one['step']:>10} {one['way']:>20} {times} {whole}{remark}", flush=True)


# Heads into memory


def bench_rotary(bench: Bench) -> list[dict[str, Any]]:
    """turn_and_store against its twin."""
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


# Rules within a captured step


def bench_rules(bench: Bench) -> list[dict[str, Any]]:
    """From the logits of a step to its tokens, by what its rows ask for."""
    print(f"\n{'logits to tokens, us':>28} {'L':>4} {'us':>10}")
    found = []
    for name in RULES:
        for n in (1, 8, 64):
            us = time_us([to_tokens(name, n, N_TOKENS, bench.device)] * 50)
            found.append({"rules": name, "positions": n, "us": us})
            print(f"{name:>28} {n:>4} {us:10.1f}", flush=True)
    return found


def to_tokens(name: str, n: int, n_tokens: int, device: torch.device) -> Call:
    """Choose the tokens after n texts of one row each, with these rules."""
    kinds, p = RULES[name]
    logits, floats = torch.randn(n, n_tokens, device=device), torch.zeros(n, device=device)
    counts = torch.randint(-8, 4, (n, n_tokens), device=device).clamp(min=0).short()
    pairs = torch.full((n, MOST_BIASES), NO_BIAS, device=device)
    pairs[:, :300] = (torch.arange(300, device=device) * (n_tokens // 300)) << 32  # of 0
    masks = torch.full((n, -(-n_tokens // 32)), -1, dtype=torch.int32, device=device)
    tables = Tables(counts, pairs, masks, torch.arange(n, dtype=torch.int32, device=device))
    rules = torch.full((n, CHANGED + 5), NOTHING, device=device)
    rules[:, KINDS], rules[:, SEAT] = kinds, torch.arange(n, device=device)
    rules[:, REPETITION:CHANGED] = torch.tensor([float_bits(1.1), 0, 0], device=device)
    texts, whole = Texts(floats.long(), floats.long(), None), floats.long()
    heat, top_p, lowest = floats + 1, floats + p, floats - math.inf

    def call() -> Tensor:
        adjust(logits, rules, texts, tables, n_tokens)
        limited = limits(logits, heat, whole, top_p, lowest, n_tokens)
        return choose(logits, heat, whole, whole, n_tokens, limited)

    return call


def _time_eager_us(call: Call, n: int = 20) -> float:
    """Time of eager calls, for twins that synchronise with the host and cannot be captured."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6 / n


if __name__ == "__main__":
    main()

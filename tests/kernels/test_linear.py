"""The fused products against float64 and their twin, and row by row the same bits whatever the number of rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.kernels.linear import MAX_ROWS, N_COUNTERS, ROW_TILE, Config, Scaled, TritonProducts, choose, config
from saguaro.kernels.rotary import PlainProducts, turn_and_store
from saguaro.kernels.short import Short
from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, KVWrite, QKNormRope, Residual

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest result: the rounding of x * norm and of the result, or of sums of some hundred terms.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
EPS = 1e-5
SPLIT = Config(block_n=16, block_k=32, split=3, warps=4, stages=2)
WHOLE = SPLIT._replace(split=1)
N_MULTIPROCESSORS = 132
CHOOSE = partial(choose, n_multiprocessors=N_MULTIPROCESSORS)


def products(cut: Config | None) -> TritonProducts:
    """Products cut as in use, or as told."""
    return TritonProducts(DEVICE, CHOOSE if cut is None else lambda n_in, n_out, dtype: cut)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def linear_of(n_in: int, n_out: int, dtype: torch.dtype, bias: Tensor | None = None) -> Linear:
    """A weight [in, out] that lies in memory as [out, in]."""
    return Linear((values(n_out, n_in, seed=1) / math.sqrt(n_in)).to(dtype).t(), bias)


def norm_of(n: int, dtype: torch.dtype) -> Norm:
    return Norm(values(n, dtype=dtype, seed=2).abs() + 0.5, EPS)


def wide(module: Linear | Norm) -> Any:
    """The same module in float64."""
    if isinstance(module, Norm):
        return Norm(module.weight.double(), module.eps)
    return Linear(module.matrix.double(), None if module.bias is None else module.bias.double())


def normed(stream: Residual) -> Tensor:
    """norm(x), as a reader of the stream computes it, in float64."""
    scaled: Scaled = stream.fused
    mean = scaled.squares.double().sum(1, keepdim=True) / scaled.x_scaled.shape[1]
    return scaled.x_scaled.double() / (mean + scaled.eps).sqrt()


def close(result: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    return float((result - exact).abs().max()) <= TOLERANCE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("cut", [None, SPLIT, WHOLE])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), [(1, 32, 100), (5, 256, 64), (17, 100, 34), (50, 96, 32)])
def test_close_to_float64(
    n_rows: int, n_in: int, n_out: int, dtype: torch.dtype, has_bias: bool, cut: Config | None
) -> None:
    bias = values(n_out, dtype=dtype, seed=3) if has_bias else None
    by, linear = products(cut), linear_of(n_in, n_out, dtype, bias)
    x, norm, y = values(n_rows, n_in, dtype=dtype), norm_of(n_in, dtype), values(n_rows, n_in, dtype=dtype, seed=6)
    stream, exact = by.begin(x, norm), COMPOSED.begin(x.double(), wide(norm))
    assert close(normed(stream), exact.normed, dtype)
    result = by.read(stream, linear, dtype)
    assert result.dtype == dtype
    assert close(result, COMPOSED.read(exact, wide(linear), torch.float64), dtype)
    assert close(by.read_gated(stream, linear), COMPOSED.read_gated(exact, wide(linear)), dtype)
    old, after = values(n_rows, n_out, dtype=dtype, seed=4), norm_of(n_out, dtype)
    written = by.write(Residual(old, norm), y, linear, after)
    sums = COMPOSED.write(Residual(old.double(), norm), y.double(), wide(linear), wide(after))
    assert close(written.x, sums.x, dtype)
    assert close(normed(written), sums.normed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_written_stream_is_read_as_one_that_begins(dtype: torch.dtype) -> None:
    """What is left beside x is of the x that is left: rounded, not the sum before."""
    by, linear, norm = products(SPLIT), linear_of(96, 72, dtype), norm_of(72, dtype)
    written = by.write(Residual(values(5, 72, dtype=dtype), norm), values(5, 96, dtype=dtype), linear, norm)
    again = by.begin(written.x, norm)
    assert torch.equal(written.fused.x_scaled, again.fused.x_scaled)
    assert torch.allclose(written.fused.squares.sum(1), again.fused.squares.sum(1), rtol=1e-6)
    linear = linear_of(72, 40, dtype)
    assert close(by.read(written, linear, dtype), by.read(again, linear, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_result(dtype: torch.dtype) -> None:
    """The head writes float32: not rounded to the weight's dtype first."""
    x, norm = values(3, 64, dtype=dtype), Norm(torch.ones(64, dtype=dtype, device=DEVICE), EPS)
    by, linear = products(None), linear_of(64, 50, dtype)
    logits = by.read(by.begin(x, norm), linear, torch.float32)
    exact = COMPOSED.read(COMPOSED.begin(x.double(), wide(norm)), wide(linear), torch.float64)
    assert logits.dtype == torch.float32
    assert close(logits, exact, torch.float32)


Product = Callable[[Tensor, Tensor], list[Tensor]]  # rows of the input, rows of the stream


def product_of(kind: str, cut: Config | None, dtype: torch.dtype, n_in: int, n_out: int) -> Product:
    """A product as a function of its rows: all that it leaves."""
    by, linear = products(cut), linear_of(n_in, n_out, dtype, values(n_out, dtype=dtype))
    norm, after = norm_of(n_in, dtype), norm_of(n_out, dtype)

    def product(y: Tensor, x: Tensor) -> list[Tensor]:
        begun = by.begin(y, norm)
        if kind == "read":
            return [begun.fused.x_scaled, begun.fused.squares, by.read(begun, linear, torch.float32)]
        if kind == "gated":
            return [by.read_gated(begun, linear)]
        written = by.write(Residual(x, norm), y, linear, after)
        again = by.read(written, linear_of(n_out, 40, dtype), torch.float32)  # of several sums of squares
        return [written.x, written.fused.x_scaled, written.fused.squares, again]

    return product


@pytest.mark.parametrize("cut", [None, SPLIT])
@pytest.mark.parametrize("kind", ["read", "gated", "write"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, kind: str, cut: Config | None) -> None:
    n_in, n_out = (72, 40) if DEVICE.type == "cpu" else (1064, 1000)
    product = product_of(kind, cut, dtype, n_in, n_out)
    y, x = values(256, n_in, dtype=dtype, seed=5), values(256, n_out, dtype=dtype, seed=6)
    most, *fewer = (50, 33, 16, 1) if DEVICE.type == "cpu" else (64, 33, 32, 17, 16, 7, 1)
    together = product(y[:most], x[:most])
    for n in fewer:
        first, last = product(y[:n], x[:n]), product(y[most - n : most], x[most - n : most])
        for one, begins, ends in zip(together, first, last, strict=True):
            assert torch.equal(begins, one[:n])
            assert torch.equal(ends, one[-n:])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("n_rows", "n_in", "n_queries", "n_kv", "d"), [(1, 72, 2, 1, 16), (5, 256, 4, 2, 64)])
def test_heads_are_turned_on_the_way(n_rows: int, n_in: int, n_queries: int, n_kv: int, d: int, has_bias: bool) -> None:
    """With a small weight the same bits as in two steps, beyond which nothing is written."""
    dtype, n_out = torch.bfloat16, (n_queries + 2 * n_kv) * d
    linear = linear_of(n_in, n_out, dtype, values(n_out, dtype=dtype, seed=3) if has_bias else None)
    by, x = products(None), values(n_rows, n_in, dtype=dtype)
    stream = by.begin(x, norm_of(n_in, dtype))
    cos, sin = (values(n_rows, 1, d, dtype=dtype, seed=seed) for seed in (4, 5))
    slots = torch.arange(n_rows, device=DEVICE) * 2 + 1
    slots[n_rows // 2] = -1
    assert isinstance(CHOOSE(n_in, n_out, dtype), Short)
    memory = values(2 * n_rows + 1, 2 * n_kv, d, dtype=dtype, seed=6)
    expected = memory.clone()
    q = by.read_heads(stream, linear, QKNormRope(n_queries, None, None, cos, sin), KVWrite(memory, slots))
    heads = by.read(stream, linear, dtype).view(n_rows, -1, d)
    wanted = turn_and_store(heads, None, None, EPS, cos, sin, expected, slots)
    assert q.shape == (n_rows, n_queries, d)
    assert torch.equal(q, wanted)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_with_norms_of_their_own_take_two_steps(dtype: torch.dtype) -> None:
    n_rows, n_in, n_queries, n_kv, d = 3, 64, 2, 1, 16
    linear, by = linear_of(n_in, (n_queries + 2 * n_kv) * d, dtype), products(None)
    x, norm = values(n_rows, n_in, dtype=dtype), norm_of(n_in, dtype)
    cos, sin = (values(n_rows, 1, d, dtype=dtype, seed=seed) for seed in (4, 5))
    turn = QKNormRope(n_queries, norm_of(d, dtype), norm_of(d, dtype), cos, sin)
    memory = values(9, 2 * n_kv, d, dtype=dtype, seed=6)
    plain, slots = memory.clone(), torch.tensor([7, -1, 2], device=DEVICE)
    q = by.read_heads(by.begin(x, norm), linear, turn, KVWrite(memory, slots))
    twin = PlainProducts()
    expected = twin.read_heads(twin.begin(x, norm), linear, turn, KVWrite(plain, slots))
    assert close(q.double(), expected.double(), dtype)
    assert close(memory.double(), plain.double(), dtype)


@pytest.mark.parametrize("n_in", [32, 64, 65, 96, 200])
def test_counters_serve_again(n_in: int) -> None:
    """The same bits from call to call, also where k is too short for every part to have some."""
    by, linear, norm = products(SPLIT), linear_of(n_in, 40, torch.float32), norm_of(40, torch.float32)
    x, y = values(5, 40), values(5, n_in, seed=1)
    results = [by.write(Residual(x, norm), y, linear, norm) for _ in range(3)]
    stream = by.begin(y, norm_of(n_in, torch.float32))
    gated = [by.read_gated(stream, linear) for _ in range(3)]
    for written, one in zip(results, gated, strict=True):
        assert torch.equal(written.x, results[0].x)
        assert torch.equal(written.fused.squares, results[0].fused.squares)
        assert torch.equal(one, gated[0])
    assert close(results[0].x, x.double() + y.double() @ linear.matrix.double(), torch.float32)


def test_inputs_may_be_views_and_stay_as_they_are() -> None:
    wider, stream, linear = values(4, 300), values(4, 90, seed=1), linear_of(100, 40, torch.float32)
    y, x = wider[:, 40:140], stream[:, 7:47]
    before = stream.clone()
    by, norm = products(None), norm_of(100, torch.float32)
    result = by.write(Residual(x, norm), y, linear, norm_of(40, torch.float32))
    assert close(result.x, x.double() + y.double() @ linear.matrix.double(), torch.float32)
    assert torch.equal(stream, before)
    begun = by.begin(y, norm)
    assert close(normed(begun), COMPOSED.begin(y.double(), wide(norm)).normed, torch.float32)


def test_many_rows_are_torchs() -> None:
    n = MAX_ROWS + 1
    by, x, norm, linear = products(None), values(n, 32), norm_of(32, torch.float32), linear_of(32, 48, torch.float32)
    after, old = norm_of(48, torch.float32), Residual(values(n, 48), norm)
    stream, expected = by.begin(x, norm), COMPOSED.begin(x, norm)
    read = by.read(stream, linear, torch.float32)
    assert torch.equal(read, COMPOSED.read(expected, linear, torch.float32))
    assert torch.equal(by.read_gated(stream, linear), COMPOSED.read_gated(expected, linear))
    written = by.write(old, x, linear, after)
    assert torch.equal(written.x, COMPOSED.write(old, x, linear, after).x)
    assert by.read(written, linear_of(48, 16, torch.float32), torch.float32).shape == (n, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(32, 100), (3072, 1024), (25600, 5120), (8192, 5120), (5120, 151936)])
def test_every_part_has_something_to_do(n_in: int, n_out: int, dtype: torch.dtype) -> None:
    cut = config(n_in, n_out, dtype, N_MULTIPROCESSORS)
    assert 1 <= cut.split <= max(1, n_in // cut.block_k)
    row_tiles = MAX_ROWS // ROW_TILE
    assert cut.split == 1 or n_out * row_tiles <= cut.block_n * N_COUNTERS

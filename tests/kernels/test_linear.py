"""The fused products against float64 and their twins, and row by row the same bits whatever the number of rows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.kernels import linear
from saguaro.kernels.linear import Config, add_product, config, counters, gated_product, normed_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest result: the rounding of x * norm and of the result, or of sums of some hundred terms.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
EPS = 1e-5
SPLIT = Config(block_n=16, block_k=32, split=3, warps=4, stages=2)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def weight_of(n_in: int, n_out: int, dtype: torch.dtype) -> Tensor:
    """[in, out] that lies in memory as [out, in]."""
    return (values(n_out, n_in, seed=1) / math.sqrt(n_in)).to(dtype).t()


def close(result: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    return float((result - exact).abs().max()) <= TOLERANCE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), [(1, 32, 100), (5, 256, 64), (17, 100, 34), (64, 256, 32)])
def test_products_are_close_to_float64(n_rows: int, n_in: int, n_out: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = values(n_rows, n_in, dtype=dtype), weight_of(n_in, n_out, dtype)
    norm = values(n_in, dtype=dtype, seed=2).abs() + 0.5
    bias = values(n_out, dtype=dtype, seed=3) if has_bias else None
    stream = values(n_rows, n_out, dtype=dtype, seed=4)
    bias_wide = None if bias is None else bias.double()
    exact = linear.normed_product_plain(x.double(), norm.double(), EPS, weight.double(), bias_wide)
    assert close(normed_product(x, norm, EPS, weight, bias), exact, dtype)
    exact = linear.gated_product_plain(x.double(), norm.double(), EPS, weight.double(), bias_wide)
    assert close(gated_product(x, norm, EPS, weight, bias), exact, dtype)
    exact = linear.add_product_plain(stream.double(), x.double(), weight.double(), bias_wide)
    assert close(add_product(stream, x, weight, bias), exact, dtype)
    assert close(add_product(stream, x, weight, bias, _config=SPLIT), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_result(dtype: torch.dtype) -> None:
    """The head writes float32: not rounded to the weight's dtype first."""
    x, norm, weight = values(3, 64, dtype=dtype), torch.ones(64, dtype=dtype, device=DEVICE), weight_of(64, 50, dtype)
    logits = normed_product(x, norm, EPS, weight, None, torch.float32)
    exact = linear.normed_product_plain(x.double(), norm.double(), EPS, weight.double(), None)
    assert logits.dtype == torch.float32
    assert close(logits, exact, torch.float32)


Product = Callable[[Tensor, Tensor], Tensor]  # rows of the input, rows of the stream


def products(dtype: torch.dtype, n_in: int, n_out: int) -> dict[str, Product]:
    """Each product as a function of its rows."""
    norm, weight, bias = (
        values(n_in, dtype=dtype, seed=2).abs(),
        weight_of(n_in, n_out, dtype),
        values(n_out, dtype=dtype),
    )
    return {
        "normed": lambda x, stream: normed_product(x, norm, EPS, weight, bias, torch.float32),
        "gated": lambda x, stream: gated_product(x, norm, EPS, weight, bias),
        "add": lambda x, stream: add_product(stream, x, weight, bias),
        "split": lambda x, stream: add_product(stream, x, weight, bias, _config=SPLIT),
        "last": lambda x, stream: add_product(stream, x, weight, bias, counters(DEVICE), _config=SPLIT),
    }


@pytest.mark.parametrize("name", ["normed", "gated", "add", "split", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, name: str) -> None:
    n_in, n_out = (72, 40) if DEVICE.type == "cpu" else (1064, 1000)
    product = products(dtype, n_in, n_out)[name]
    x, stream = values(64, n_in, dtype=dtype, seed=5), values(64, n_out, dtype=dtype, seed=6)
    # The interpreter's dot is numpy's, which adds up in another order for another width: compare equal widths there.
    groups = [(64, 33), (16, 7, 1)] if DEVICE.type == "cpu" else [(64, 33, 32, 17, 16, 7, 1)]
    for most, *fewer in groups:
        together = product(x[:most], stream[:most])
        for n in fewer:
            assert torch.equal(product(x[:n], stream[:n]), together[:n])
            assert torch.equal(product(x[most - n : most], stream[most - n : most]), together[-n:])


@pytest.mark.parametrize("n_in", [32, 64, 65, 96, 200])
def test_the_last_arriver_adds_up_as_the_second_kernel_does(n_in: int) -> None:
    """The same bits, and counters that are zero again; also where k is too short for every part to have some."""
    x, y, weight = values(5, 40), values(5, n_in, seed=1), weight_of(n_in, 40, torch.float32)
    arrived = counters(DEVICE)
    expected = add_product(x, y, weight, None, _config=SPLIT)
    for _ in range(3):
        assert torch.equal(add_product(x, y, weight, None, arrived, _config=SPLIT), expected)
        assert not arrived.any()
    assert close(expected, x.double() + y.double() @ weight.double(), torch.float32)


def test_inputs_may_be_views_and_stay_as_they_are() -> None:
    wider, stream = values(4, 300), values(4, 90, seed=1)
    y, x, weight = wider[:, 40:140], stream[:, 7:47], weight_of(100, 40, torch.float32)
    before = stream.clone()
    result = add_product(x, y, weight, None)
    assert close(result, x.double() + y.double() @ weight.double(), torch.float32)
    assert torch.equal(stream, before)


def test_many_rows_take_the_plain_way() -> None:
    n = linear.MAX_ROWS + 1
    x, norm, weight = values(n, 32), torch.ones(32, device=DEVICE), weight_of(32, 48, torch.float32)
    stream = values(n, 48)
    assert torch.equal(
        normed_product(x, norm, EPS, weight, None), linear.normed_product_plain(x, norm, EPS, weight, None)
    )
    assert torch.equal(
        gated_product(x, norm, EPS, weight, None), linear.gated_product_plain(x, norm, EPS, weight, None)
    )
    assert torch.equal(add_product(stream, x, weight, None), linear.add_product_plain(stream, x, weight, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(32, 100), (3072, 1024), (25600, 5120), (8192, 5120)])
def test_every_part_has_something_to_do(n_in: int, n_out: int, dtype: torch.dtype) -> None:
    cut = config(n_in, n_out, dtype, may_split=True)
    assert 1 <= cut.split <= max(1, n_in // cut.block_k)
    assert config(n_in, n_out, dtype).split == 1
    assert n_out <= cut.block_n * linear.N_COUNTERS

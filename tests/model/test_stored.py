"""Weights are packed from the bytes of a file, and are the same to the bit as by way of the gguf package."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from saguaro.errors import CorruptModel
from saguaro.kernels.cpu import CPUWeight, Float32Weight, Int8Weight, decode
from saguaro.kernels.formats import packed_kind, ready
from saguaro.kernels.native import library
from saguaro.model.gguf_header import TensorInfo
from saguaro.model.load import load, read_embedding
from saguaro.model.stored import Stored, read_stored
from saguaro.model.tiny import tiny_model
from tests.model.write_gguf import F32, Q8_0, write_gguf
from tests.parity.driver import CPU

KINDS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
]
OTHERS = ["TQ2_0", "IQ4_NL"]  # only the gguf package decodes them
WEIGHTS = [Int8Weight, Float32Weight]


@pytest.fixture(params=[1, 2])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(folder: Path, name: str, n_rows: int, n_in: int, n_heads: int = 0, *, any_bits: bool = False) -> Stored:
    """A matrix of random bytes of this type. Unless any bits are allowed, its numbers are finite and not large."""
    kind = GGMLQuantizationType[name]
    block, n_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(n_rows)
    raw = rng.integers(0, 256, (n_rows, n_in // block * n_bytes), dtype=np.uint8)
    if not any_bits:
        raw = gguf.quantize(rng.normal(size=(n_rows, n_in)).astype(np.float32), kind).view(np.uint8)
    (folder / name).write_bytes(b"before" + raw.tobytes())
    info = TensorInfo(name=name, kind=kind, shape=(n_rows, n_in), byte_shape=raw.shape, offset=6)
    return read_stored(folder / name, info, n_heads)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def filled(weight: CPUWeight) -> list[Tensor]:
    if isinstance(weight, Int8Weight):
        return [weight.steps, bits(weight.scales)]
    assert isinstance(weight, Float32Weight)
    return [bits(weight.values)]


def assert_same(one: CPUWeight, other: CPUWeight) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(filled(one), filled(other), strict=True))


@pytest.mark.parametrize("n_heads", [0, 4])
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_decoded_numbers_are_those_of_the_gguf_package(tmp_path: Path, name: str, n_heads: int, n_threads: int) -> None:
    """For any bytes: numbers too small to be normal, infinite ones and NaN too."""
    found = draw(tmp_path, name, 120, 512, n_heads, any_bits=True)
    place = torch.empty(found.shape)
    with np.errstate(all="ignore"):
        decode(found, place)
        expected, in_order = found.decoded(), read_stored(found.path, found.info).decoded()
    is_nan = expected.isnan()
    assert torch.equal(place.isnan(), is_nan)
    assert torch.equal(bits(place)[~is_nan], bits(expected)[~is_nan])
    assert torch.equal(bits(expected), bits(in_order)) == (n_heads == 0)


@pytest.mark.parametrize("name", [*KINDS[:8], *OTHERS[:1]])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_parts_are_packed_where_they_belong(tmp_path: Path, name: str, kind: type[CPUWeight], n_threads: int) -> None:
    """Beside one another within a panel of outputs, the first with interleaved heads."""
    n_in = 256 if name in OTHERS else 96
    parts = [draw(tmp_path, name, 40, n_in, 2), draw(tmp_path, name, 8, n_in), draw(tmp_path, name, 33, n_in)]
    weight = kind.empty(81, n_in, CPU)
    first = 0
    for part in parts:
        weight.fill(first, part)
        first += part.shape[0]
    whole = torch.cat([part.decoded() for part in parts])
    assert_same(weight, kind(whole))  # type: ignore[arg-type]
    x = torch.randn(3, n_in, generator=torch.Generator().manual_seed(0))
    expected = x @ whole.t()
    assert (weight.multiply(x, None) - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_large_blocks_are_packed(tmp_path: Path, name: str, kind: type[CPUWeight]) -> None:
    """The gguf package does not write these: the bytes are random."""
    found = draw(tmp_path, name, 70, 768, any_bits=True)
    with np.errstate(all="ignore"):
        assert_same(kind(found), kind(found.decoded()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_tensors_of_any_dtype_are_packed(dtype: torch.dtype, kind: type[CPUWeight]) -> None:
    weight = torch.randn(40, 66).to(dtype)
    assert_same(kind(weight), kind(weight.float()))
    assert_same(kind(weight[:, 1:-1]), kind(weight[:, 1:-1].clone()))


@pytest.mark.parametrize("kind", [F32, Q8_0, GGMLQuantizationType.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_file_is_packed_as_its_model_is(
    tmp_path: Path, dtype: str, tied: bool, family: str, kind: GGMLQuantizationType
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(family, tied=tied), kind)
    own = packed_kind(dtype, CPU)
    assert own is not None
    ways = [ready(load("tiny", path, CPU, torch.float32, each).model, dtype) for each in (own, None)]
    assert len(ways[0].packed) == len(ways[1].packed) == 4 * len(ways[0].layers) + 1
    for ours, theirs in zip(*(way.packed for way in ways), strict=True):
        assert_same(ours, theirs)
    plain = [dict(way.named_parameters()) for way in ways]
    assert plain[0].keys() == plain[1].keys()
    assert all(torch.equal(plain[0][name], weight) for name, weight in plain[1].items())
    assert torch.equal(read_embedding(path, CPU, torch.float32, own), ways[1].embedding)


def test_a_type_that_is_not_decoded_changes_nothing() -> None:
    y = torch.zeros(2, 32)
    assert library().unpack(1, 99, y.data_ptr(), 2, 32, 0, y.data_ptr(), None, 0) == 0
    assert not y.any()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    found = draw(tmp_path, "Q8_0", 4, 64)
    found.path.write_bytes(found.path.read_bytes()[:-1])
    with pytest.raises(CorruptModel, match="ends within 'Q8_0'; download it again"):
        read_stored(found.path, found.info)

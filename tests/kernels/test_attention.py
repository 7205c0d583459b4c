"""Attention kernels against their twins, a float64 reference and the engine's attention; and the invariance of bits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.attention.sdpa import kv_indices

pytest.importorskip("triton")

from saguaro.kernels import attention
from saguaro.kernels.attention import SPLIT as ATTENTION_SPLIT
from saguaro.kernels.attention import counters, shares, tile_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPLIT = 64  # several splits in few keys
BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 2e-2, FP32: 5e-6}
SCALE = 0.2  # of no head size
attend: Callable[..., Tensor] = partial(attention.attend, scale=SCALE)
attend_plain: Callable[..., Tensor] = partial(attention.attend_plain, scale=SCALE)


@dataclass(frozen=True)
class Shape:
    n_kv: int
    group: int
    d: int
    page_size: int
    dtype: torch.dtype

    @property
    def n_heads(self) -> int:
        return self.n_kv * self.group


SHAPES = [
    Shape(2, 1, 16, 16, FP32),
    Shape(1, 2, 64, 4, FP32),
    Shape(2, 3, 16, 1, BF16),
    Shape(1, 5, 32, 16, BF16),
    Shape(1, 4, 128, 16, BF16),
    Shape(1, 8, 64, 4, BF16),
]
ODD_SHAPES = [  # widths that are no power of two, or less than a product of matrices has
    Shape(2, 2, 24, 16, BF16),
    Shape(1, 3, 80, 4, FP32),
    Shape(1, 4, 96, 16, BF16),
    Shape(2, 1, 8, 4, FP32),
]


class Texts:
    """Random texts on scattered pages; every slot that no text uses is NaN, every page number beyond is wild."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        self.kv = [_normal(generator, length, 2 * shape.n_kv, shape.d, dtype=shape.dtype) for length in lengths]
        self.memory, self.pages = self.place(seed)

    def place(self, seed: int) -> tuple[Tensor, Tensor]:
        """Memory [n_slots, 2 * H_kv, d] and pages [R, P], another choice of pages for another seed."""
        shape, size = self.shape, self.shape.page_size
        counts = [-(-length // size) for length in self.lengths]
        numbers = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(numbers)
        memory = torch.full((len(numbers) * size, 2 * shape.n_kv, shape.d), float("nan"), dtype=shape.dtype)
        pages = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
        for row, count in enumerate(counts):
            taken = [numbers.pop() for _ in range(count)]
            pages[row, :count] = torch.tensor(taken, dtype=torch.int32)
            memory[kv_indices(taken, self.lengths[row], size)] = self.kv[row]
        return memory.to(DEVICE), pages.to(DEVICE)

    def queries(self, n: int, seed: int = 1) -> Tensor:
        """[n, H, d], a slice of a buffer that holds keys and values too."""
        generator = torch.Generator().manual_seed(seed)
        buffer = _normal(generator, n, self.shape.n_heads + 2 * self.shape.n_kv, self.shape.d, dtype=self.shape.dtype)
        return buffer.to(DEVICE)[:, : self.shape.n_heads]


def _normal(generator: torch.Generator, *size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, generator=generator).to(dtype)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _starts(counts: Sequence[int]) -> Tensor:
    return _int32([sum(counts[:row]) for row in range(len(counts) + 1)])


def _exact(q: Tensor, kv: Tensor, is_seen: Tensor) -> Tensor:
    """One head at a time, in float64: q [n, H, d], kv [L, 2 * H_kv, d], is_seen [n, L] -> [n, H * d]."""
    q, kv, is_seen = q.double().cpu(), kv.double().cpu(), is_seen.cpu()
    n_kv, (n, n_heads, d) = kv.shape[1] // 2, q.shape
    out = torch.zeros(n, n_heads, d, dtype=torch.float64)
    for i in range(n):
        keys = kv[is_seen[i]]
        for head in range(n_heads if len(keys) else 0):
            shared = head // (n_heads // n_kv)
            weights = (keys[:, shared] @ q[i, head] * SCALE).softmax(0)
            out[i, head] = weights @ keys[:, n_kv + shared]
    return out.view(n, n_heads * d)


def _causal(n: int, length: int) -> Tensor:  # [n, length]
    return torch.arange(length)[None] <= torch.arange(length - n, length)[:, None]


def _assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(out.double().cpu(), expected.double().cpu(), rtol=0, atol=TOLERANCE[dtype])


def _meet(**calls: tuple[object, ...]) -> list[Any]:
    """Every shape with two of the calls, and every call with several shapes: all pairs would take minutes."""
    names = list(calls)
    pairs = [(shape, names[(i + j) % len(names)]) for i, shape in enumerate(SHAPES) for j in range(2)]
    return [pytest.param(shape, *calls[name], id=f"{name}-{shape}") for shape, name in pairs]


DECODE = ([70, 1, 33], [1, 1, 1])  # lengths, queries
VERIFY = ([130, 7, 64], [5, 7, 2])
PADDING = ([90, 0, 40, 0], [3, 1, 0, 0])
PREFILL_BESIDE_DECODE = ([150, 40], [40, 1])


@pytest.mark.parametrize(
    ("shape", "lengths", "counts"), _meet(decode=DECODE, verify=VERIFY, padding=PADDING, prefill=PREFILL_BESIDE_DECODE)
)
def test_attend(shape: Shape, lengths: list[int], counts: list[int]) -> None:
    texts = Texts(shape, lengths)
    q = texts.queries(sum(counts))
    call = (q, texts.memory, texts.pages, _starts(counts), _int32(lengths), shape.page_size, max(counts), max(lengths))
    out = attend(*call, split=SPLIT)
    assert (out.shape, out.dtype) == ((len(q), shape.n_heads * shape.d), shape.dtype)
    _assert_close(out, attend_plain(*call), shape.dtype)
    starts = _starts(counts).tolist()
    exact = [
        _exact(q[starts[row] : starts[row + 1]], texts.kv[row], _causal(counts[row], length))
        if length
        else torch.zeros(counts[row], shape.n_heads * shape.d, dtype=torch.float64)
        for row, length in enumerate(lengths)
    ]
    _assert_close(out, torch.cat(exact), shape.dtype)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_odd_widths(shape: Shape) -> None:
    """Columns that pad a tile are not loaded: what lies there belongs to another head, or to nobody."""
    texts = Texts(shape, [130, 20])
    q = texts.queries(4)
    call = (q, texts.memory, texts.pages, _starts([3, 1]), _int32([130, 20]), shape.page_size)
    out = attend(*call, 3, 130, split=SPLIT)
    _assert_close(out, attend_plain(*call, 3, 130), shape.dtype)
    assert torch.equal(attend(*call, 40, 130, split=SPLIT), out)  # all splits in one program


class TestCounters:
    """Programs that share a tile's splits count them; the last of them leaves its counter as it was."""

    def test_many_calls_share_them(self) -> None:
        """Lengths with one split, several and none, in turn: what a call leaves does not disturb the next."""
        shape, arrived = SHAPES[3], counters(DEVICE)
        texts = Texts(shape, [200, 64, 130])
        q, starts = texts.queries(5), _starts([2, 1, 2])
        for lengths in ([200, 64, 130], [64, 1, 65], [2, 64, 0], [129, 3, 130]):
            call = (q, texts.memory, texts.pages, starts, _int32(lengths), shape.page_size, 2, 256)
            out = attend(*call, split=SPLIT, arrived=arrived)
            _assert_close(out, attend_plain(*call), shape.dtype)
            assert not arrived.any()

    @pytest.mark.parametrize("n_programs", [1, 4])
    def test_any_number_of_programs_computes_the_same_bits(self, n_programs: int) -> None:
        shape = SHAPES[1]
        texts = Texts(shape, [300, 130])
        call = (texts.queries(3), texts.memory, texts.pages, _starts([2, 1]), _int32([300, 130]), shape.page_size, 2)
        out = attend(*call, 300, split=SPLIT, _n_programs=n_programs)
        assert torch.equal(out, attend(*call, 300, split=SPLIT))

    def test_they_must_be_enough(self) -> None:
        shape = SHAPES[2]
        texts = Texts(shape, [70])
        call = (texts.queries(1), texts.memory, texts.pages, _starts([1]), _int32([70]), shape.page_size, 1, 70)
        with pytest.raises(AssertionError):
            attend(*call, split=SPLIT, arrived=torch.zeros(1, dtype=torch.int32, device=DEVICE))


def test_no_program_is_without_splits_and_many_tiles_are_not_shared() -> None:
    for n_tiles in (1, 3, 8, 100, 255, 256, 4000):
        for n_splits in (1, 2, 32):
            assert 1 <= shares(n_tiles, n_splits, 512) <= n_splits
    assert shares(4000, 32, 10**6) == 1


def test_the_twin_attends_as_the_engine_does() -> None:
    shape, length, n = Shape(2, 3, 16, 4, FP32), 29, 6
    texts = Texts(shape, [length])
    q = texts.queries(n)
    call = (q, texts.memory, texts.pages, _starts([n]), _int32([length]), shape.page_size, n, length)
    keys, values = texts.kv[0].to(DEVICE).transpose(0, 1)[None].chunk(2, 1)
    mask = torch.ones(n, length, dtype=torch.bool, device=DEVICE).tril(length - n)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    _assert_close(attend_plain(*call), expected[0].transpose(0, 1).reshape(n, -1), FP32)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
class TestBits:
    """A query's output depends, to the last bit, on nothing but itself and what it sees."""

    lengths, counts = (130, 67, 9), (3, 1, 2)

    def _batch(self, shape: Shape) -> tuple[Texts, Tensor, Tensor]:
        texts = Texts(shape, self.lengths)
        q = texts.queries(sum(self.counts))
        out = attend(
            q,
            texts.memory,
            texts.pages,
            _starts(self.counts),
            _int32(self.lengths),
            shape.page_size,
            3,
            130,
            split=SPLIT,
        )
        return texts, q, out

    def test_alone(self, shape: Shape) -> None:
        texts, q, out = self._batch(shape)
        token = 0
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            for sees in range(length - count + 1, length + 1):
                alone = attend(
                    q[token : token + 1], texts.memory, texts.pages[row : row + 1], _starts([1]), _int32([sees]),
                    shape.page_size, 1, sees, split=SPLIT,
                )  # fmt: skip
                assert torch.equal(alone, out[token : token + 1])
                token += 1

    def test_larger_bounds(self, shape: Shape) -> None:
        texts, q, out = self._batch(shape)
        call = (q, texts.memory, texts.pages, _starts(self.counts), _int32(self.lengths), shape.page_size)
        assert torch.equal(attend(*call, 5, 300, split=SPLIT), out)
        assert torch.equal(attend(*call, 40, 300, split=SPLIT), out)  # splits in one program

    def test_short_texts_need_no_splits(self, shape: Shape) -> None:
        texts, q = Texts(shape, [50, 20]), Texts(shape, [1]).queries(3)
        call = (q, texts.memory, texts.pages, _starts([2, 1]), _int32([50, 20]), shape.page_size, 2)
        assert torch.equal(attend(*call, SPLIT, split=SPLIT), attend(*call, 3 * SPLIT, split=SPLIT))

    def test_other_pages(self, shape: Shape) -> None:
        texts, q, out = self._batch(shape)
        memory, pages = texts.place(seed=7)
        call = (q, memory, pages, _starts(self.counts), _int32(self.lengths), shape.page_size, 3, 130)
        assert torch.equal(attend(*call, split=SPLIT), out)

    def test_in_a_chunk_of_prefill(self, shape: Shape) -> None:
        texts = Texts(shape, [110])
        q = texts.queries(70)
        call = (q, texts.memory, texts.pages, _starts([70]), _int32([110]), shape.page_size)
        out = attend(*call, 70, 110, split=SPLIT)
        few = attend(q[30:36], *call[1:3], _starts([6]), _int32([76]), shape.page_size, 6, 76, split=SPLIT)
        assert torch.equal(few, out[30:36])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
def test_a_captured_call_takes_other_lengths() -> None:
    shape = SHAPES[4]
    texts = Texts(shape, [130, 67, 9])
    q, starts, lengths = texts.queries(6), _starts([3, 1, 2]), _int32([130, 67, 9])
    call = (q, texts.memory, texts.pages, starts, lengths, shape.page_size, 4, 300)
    arrived = counters(DEVICE)
    attend(*call, arrived=arrived)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*call, arrived=arrived)
    for values in ([130, 67, 9], [100, 3, 0], [5, 60, 2]):
        lengths.copy_(_int32(values))
        graph.replay()
        assert torch.equal(out, attend(*call))
        _assert_close(out, attend_plain(*call), shape.dtype)


@pytest.mark.parametrize("d", [8, 64, 80, 128, 256])
def test_a_tile_holds_any_group_and_fits_the_matrix_units(d: int) -> None:
    for dtype in (BF16, FP32):
        for group in (1, 2, 3, 4, 5, 8, 16, 71):
            tile = tile_of(group, d, dtype)
            assert tile.block_m >= max(16, group)
            assert tile.block_n >= 16
            assert ATTENTION_SPLIT % tile.block_n == 0
            assert tile.block_m & (tile.block_m - 1) == 0

"""cpu.c against plain torch: rounding, products and attention, and rows that do not see one another."""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.errors import ConfigError
from saguaro.kernels import cpu, native
from saguaro.kernels.cpu import CPUProducts, CPUWeight, Float32Weight, Int8Weight, Rows, mixed, multiply, prepared
from saguaro.kernels.formats import packed_kind, ready
from saguaro.kernels.native import at, library
from saguaro.model.linear import Linear
from saguaro.model.load import load
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, KVWrite, QKNormRope, Residual
from saguaro.model.tiny import write_tiny

EPS = 1e-5
Threads = Callable[[int], None]
SHAPES = [(64, 96), (576, 960), (99, 33), (160, 7), (1, 1)]  # inputs, outputs


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Sets how many threads compute, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hadamard(n: int) -> Tensor:  # [n, n]
    turn = torch.ones(1, 1)
    while len(turn) < n:
        turn = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), turn)
    return turn / math.sqrt(n)


def turned(x: Tensor) -> Tensor:  # [T, n]
    size = mixed(x.shape[1])
    return (x.reshape(-1, size) @ hadamard(size)).view_as(x)


def rounded(x: Tensor, norm: Tensor | None = None) -> Rows:
    return prepared(x, Int8Weight.rows(*x.shape), norm, EPS)


def heavy(x: Tensor) -> Tensor:
    """The same with one input far larger than the others."""
    x = x.clone()
    x[:, x.shape[1] // 2] *= 60
    return x


@pytest.mark.parametrize("n", [64, 576, 1536, 99, 20, 8, 1])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rows_are_turned_and_rounded(n: int, has_norm: bool) -> None:
    x, norm = draw(5, n), 1 + draw(n, seed=1) / 4
    found = rounded(x, norm if has_norm else None)
    expected = turned(F.rms_norm(x, (n,), norm, EPS) if has_norm else x)
    scales = expected.abs().amax(1) / 127
    torch.testing.assert_close(found.scales, scales, rtol=1e-5, atol=0)
    steps = expected / scales[:, None]
    assert (found.values[:, :n] - steps).abs().max() <= 0.5 + 1e-3
    assert found.values[:, :n].abs().amax(1).tolist() == [127] * 5
    assert not found.values[:, n:].any()


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    by, weight = CPUProducts(Int8Weight), Int8Weight(draw(8, 64))
    x = torch.zeros(2, 64)
    x[1, 3] = math.nan
    y = by.read(by.begin(x, Norm(torch.ones(64), EPS)), Linear(weight), torch.float32)
    assert y[0].tolist() == [0.0] * 8
    assert y[1].isnan().all()


@pytest.mark.parametrize("n_rows", [*range(1, 15), 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_exact_sums(shape: tuple[int, int], n_rows: int) -> None:
    n_in, n_out = shape
    matrix, x, bias = draw(n_out, n_in), draw(n_rows, n_in, seed=1), draw(n_out, seed=2)
    steps, rows = rounded(matrix), rounded(x)
    sums = rows.values.long() @ steps.values.long().t()
    expected = sums.float() * (rows.scales[:, None] * steps.scales) + bias
    torch.testing.assert_close(multiply(rows, Int8Weight(matrix), bias), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "error"), [(Int8Weight, 0.03), (Float32Weight, 1e-6)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n_rows", [*range(1, 15)])
def test_products_are_near_torchs(shape: tuple[int, int], kind: type[CPUWeight], error: float, n_rows: int) -> None:
    (n_in, n_out), by = shape, CPUProducts(kind)
    matrix, x, norm = draw(n_out, n_in), heavy(draw(n_rows, n_in, seed=1)), Norm(1 + draw(n_in, seed=2) / 4, EPS)
    bias, back, onto = draw(n_out, seed=3), draw(n_in, n_out, seed=4), draw(n_rows, n_in, seed=5)
    exact = COMPOSED.read(COMPOSED.begin(x, norm), Linear(matrix.t(), bias), torch.float32)
    found = by.read(by.begin(x, norm), Linear(kind(matrix), bias), torch.float32)
    assert (found - exact).norm() <= error * exact.norm()
    write_bias = draw(n_in, seed=6)
    written = by.write(Residual(onto, norm), exact, Linear(kind(back), write_bias), norm)
    expected = COMPOSED.write(Residual(onto, norm), exact, Linear(back.t(), write_bias), norm).x
    assert (written.x - expected).norm() <= error * expected.norm()
    again = by.begin(written.x, norm).fused
    assert torch.equal(written.fused.values, again.values)
    assert torch.equal(written.fused.scales, again.scales)


def test_an_input_far_larger_than_the_others_does_not_spoil_them(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = draw(96, 576), heavy(draw(4, 576, seed=1))
    matrix[:, 288] = 0  # it is not even used
    errors = []
    for most in (128, 1):
        monkeypatch.setattr(cpu, "MOST_MIXED", most)
        found = multiply(rounded(x), Int8Weight(matrix), None)
        errors.append(float((found - x @ matrix.t()).norm()))
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("n", [64, 1536, 33])
@pytest.mark.parametrize("kind", [Int8Weight, Float32Weight])
def test_gates(n: int, kind: type[CPUWeight]) -> None:
    by, linear = CPUProducts(kind), Linear(kind(draw(2 * n, 32) * 4), draw(2 * n, seed=1))
    stream = by.begin(draw(3, 32, seed=2), Norm(torch.ones(32), EPS))
    gate, up = by.read(stream, linear, torch.float32).chunk(2, 1)
    torch.testing.assert_close(by.read_gated(stream, linear), F.silu(gate) * up, rtol=2e-6, atol=1e-6)


def test_gates_far_from_zero() -> None:
    """Where e^gate is beyond float32, on either side."""
    by, gates = CPUProducts(Float32Weight), torch.tensor([-1e4, -104.0, -89.0, -88.0, 88.0, 89.0, 1e4])
    weight, stream = Float32Weight(torch.zeros(14, 32)), by.begin(draw(1, 32), Norm(torch.ones(32), EPS))
    found = by.read_gated(stream, Linear(weight, torch.cat((gates, torch.ones(7)))))
    torch.testing.assert_close(found[0], F.silu(gates), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_turned_and_stored(has_norm: bool) -> None:
    n_q, n_kv, d, n_hidden = 6, 2, 16, 32
    by, slots = CPUProducts(Int8Weight), torch.tensor([5, 0, 3])
    angle = draw(3, d // 2, seed=4)
    cos, sin = torch.cat((angle.cos(),) * 2, 1)[:, None], torch.cat((-angle.sin(), angle.sin()), 1)[:, None]
    q_norm, k_norm = (Norm(1 + draw(d, seed=seed) / 4, EPS) if has_norm else None for seed in (5, 6))
    turn = QKNormRope(n_q, q_norm, k_norm, cos, sin)
    stream = by.begin(draw(3, n_hidden), Norm(torch.ones(n_hidden), EPS))
    linear = Linear(Int8Weight(draw(160, n_hidden, seed=1)))
    memory = torch.full((8, 2 * n_kv, d), math.nan)
    q = by.read_heads(stream, linear, turn, KVWrite(memory, slots))
    heads = by.read(stream, linear, torch.float32).view(3, n_q + 2 * n_kv, d)
    expected_q, expected_kv = turn(heads)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memory[slots], expected_kv, rtol=1e-5, atol=1e-5)
    assert memory[[1, 2, 4, 6, 7]].isnan().all()


HEADS = [(4, 2, 16), (9, 3, 64), (4, 4, 24), (2, 1, 128), (8, 1, 8), (7, 1, 40), (16, 2, 96)]  # of queries, of keys, d
TEXT, SEEN = torch.tensor([0, 0, 0, 1]).int(), torch.tensor([19, 20, 21, 13]).int()


def attended(
    q: Tensor, memory: Tensor, slots: Tensor, text: Tensor, seen: Tensor, scale: float = 0.3
) -> Tensor:  # q [T, n_q + 2, d]
    n_tokens, n_q, d = len(q), q.shape[1] - 2, q.shape[2]
    found = torch.empty(n_tokens, n_q * d)
    library().attend(
        native.n_threads(), at(q), q.stride(0), n_tokens, n_q, memory.shape[1] // 2, d, scale, at(memory), at(slots),
        slots.shape[1], at(text), at(seen), at(found),
    )  # fmt: skip
    return found


def texts(n_q: int, n_kv: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four tokens, and two texts scattered over a memory that is NaN elsewhere."""
    memory = torch.full((64, 2 * n_kv, d), math.nan)
    places = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    slots = torch.stack((places[:21], torch.cat((places[21:34], places[:8])))).int()
    memory[places[:34]] = draw(34, 2 * n_kv, d)
    return draw(4, n_q + 2, d, seed=2), memory, slots  # queries are the first heads of a wider tensor


@pytest.mark.parametrize(("n_q", "n_kv", "d"), HEADS)
def test_attention(n_q: int, n_kv: int, d: int) -> None:
    q, memory, slots = texts(n_q, n_kv, d)
    found = attended(q, memory, slots, TEXT, SEEN)
    for token in range(4):
        kv = memory[slots[TEXT[token]][: int(SEEN[token])]].transpose(0, 1)[None]  # [1, 2 * n_kv, keys, d]
        expected = F.scaled_dot_product_attention(
            q[token, :n_q][None, :, None], kv[:, :n_kv], kv[:, n_kv:], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[token], expected.flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n_q", "n_kv", "d"), HEADS)
@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_queries_do_not_see_one_another(n_q: int, n_kv: int, d: int, n_threads: int, threads: Threads) -> None:
    """To the bit: alone, among others, by one thread or several, which share heads otherwise."""
    q, memory, slots = texts(n_q, n_kv, d)
    together = attended(q, memory, slots, TEXT, SEEN)
    threads(n_threads)
    for token in range(4):
        one = slice(token, token + 1)
        assert torch.equal(attended(q[one], memory, slots, TEXT[one], SEEN[one])[0], together[token])


@pytest.mark.parametrize("kind", [Int8Weight, Float32Weight])
@pytest.mark.parametrize("shape", [(576, 97), (1536, 576), (99, 33)], ids=str)
def test_rows_do_not_see_one_another(kind: type[CPUWeight], shape: tuple[int, int]) -> None:
    """To the bit: alone, among others, in another place."""
    n_in, n_out = shape
    by, linear, norm = CPUProducts(kind), Linear(kind(draw(n_out, n_in))), Norm(1 + draw(n_in, seed=1) / 4, EPS)
    x = draw(70, n_in, seed=2)
    together = by.read(by.begin(x, norm), linear, torch.float32)
    for start, stop in [(0, 1), (69, 70), (3, 8), (10, 16), (1, 70), *((2, 2 + n) for n in range(1, 15))]:
        apart = by.read(by.begin(x[start:stop], norm), linear, torch.float32)
        assert torch.equal(apart, together[start:stop])


@pytest.mark.parametrize("kind", [Int8Weight, Float32Weight])
def test_threads_do_not_matter(kind: type[CPUWeight], threads: Threads) -> None:
    matrix, x, norm, found = draw(576, 960), draw(5, 960, seed=1), Norm(torch.ones(576), EPS), []
    onto, by, linear = draw(5, 576, seed=2), CPUProducts(kind), Linear(kind(matrix))
    for n in (1, 2):
        threads(n)
        found.append(by.write(Residual(onto, norm), x, linear, norm))
    assert torch.equal(found[0].x, found[1].x)
    assert torch.equal(found[0].fused.values, found[1].fused.values)


def copied(folder: Path) -> Path:
    """The library's source in another folder."""
    for path in (native.SOURCE, *native.SOURCE.parent.glob("*.h")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / native.SOURCE.name


class TestLibrary:
    """A machine without a compiler, a compiler that fails, a package that cannot be written to."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> object:
        native.find.cache_clear()
        yield
        native.find.cache_clear()

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
        assert not native.is_there()
        with pytest.raises(ConfigError, match=r"no C compiler \(no-such-compiler\) was found; install gcc or clang"):
            library()

    def test_a_source_that_does_not_compile(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        broken = tmp_path / "cpu.c"
        broken.write_text("int main( {")
        monkeypatch.setattr(native, "SOURCE", broken)
        with pytest.raises(ConfigError, match=r"could not compile cpu.c for .*error"):
            library()
        assert not list(tmp_path.rglob("*.so"))

    @pytest.mark.skipif(shutil.which("clang") is None, reason="there is no clang")
    def test_by_clang(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Whose threads are not those of torch."""
        monkeypatch.setattr(native, "SOURCE", copied(tmp_path))
        monkeypatch.setattr(native, "COMPILERS", ("clang",))
        test_products_are_exact_sums((576, 960), 5)
        test_attention(9, 3, 64)

    def test_it_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(native, "SOURCE", copied(tmp_path))
        library()
        (made,) = tmp_path.rglob("*.so")
        written = made.stat().st_mtime_ns
        native.find.cache_clear()
        library()
        assert made.stat().st_mtime_ns == written

    def test_a_package_that_cannot_be_written_to(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "__pycache__").write_text("no folder")
        monkeypatch.setattr(native, "SOURCE", copied(tmp_path))
        x, found = draw(1, 32), torch.empty(1, 32)
        library().prepare_rows(1, at(x), 1, 32, 1, None, EPS, 32, at(found), None)
        assert torch.equal(found, x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_packed_as_it_is_loaded_has_the_same_bytes(tied: bool, tmp_path: Path) -> None:
    path, device = write_tiny(tmp_path / "tiny", "llama", tied=tied), torch.device("cpu")
    kinds = (None, packed_kind("int8", device))
    ways = [ready(load("tiny", path, device, torch.float32, kind).model, "int8") for kind in kinds]
    assert kinds[1] is Int8Weight
    assert torch.equal(ways[0].embedding, ways[1].embedding)
    for one, other in zip(ways[0].packed, ways[1].packed, strict=True):
        assert isinstance(one, Int8Weight)
        assert isinstance(other, Int8Weight)
        assert torch.equal(one.steps, other.steps)
        assert torch.equal(one.scales, other.scales)


def test_torch_has_one_thread_and_the_library_as_many_as_before(threads: Threads) -> None:
    threads(3)
    with native.own_threads():
        assert (torch.get_num_threads(), native.n_threads()) == (1, 3)
        with native.own_threads():
            assert (torch.get_num_threads(), native.n_threads()) == (1, 3)
        assert (torch.get_num_threads(), native.n_threads()) == (1, 3)
    assert (torch.get_num_threads(), native.n_threads()) == (3, 3)
    with pytest.raises(ValueError, match="inside"), native.own_threads():
        raise ValueError("inside")
    threads(2)
    assert (torch.get_num_threads(), native.n_threads()) == (2, 2)

"""choose and rank against their twins: the same noise, the same tokens, ties and padding included."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro import rng
from saguaro.algo.verification import BROKEN
from saguaro.device.graphs import as_float
from saguaro.kernels import sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Rows = tuple[Tensor, Tensor, Tensor, Tensor]  # logits, temperature, seeds, positions
Rules = tuple[Tensor, Tensor, Tensor]


def rows(n: int, n_vocab: int, temperatures: tuple[float, ...], seed: int = 0) -> Rows:
    """Random rows, the temperatures in turn."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, n_vocab, generator=generator)
    temperature = torch.tensor(temperatures)[torch.arange(n) % len(temperatures)]
    seeds = torch.randint(2**63 - 1, (n,), generator=generator)
    positions = torch.randint(2**31 - 1, (n,), generator=generator)
    return logits.to(DEVICE), temperature.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE)


def split(given: Rows) -> tuple[Tensor, Rules]:
    """The logits, and the rest."""
    return given[0], given[1:]


@pytest.mark.parametrize(("n", "n_vocab"), [(120, 97), (90, 1000), (6, 2048), (6, 5003)])
def test_choose_is_the_twins(n: int, n_vocab: int) -> None:
    given = rows(n, n_vocab, (0.0, 1.0, 0.3))
    assert sample.choose(*given, n_vocab).tolist() == sample.choose_plain(*given, n_vocab).tolist()


@pytest.mark.parametrize(("n_vocab", "n"), [(97, 97), (1000, 65), (5003, 7)])
def test_rank_is_the_twins(n_vocab: int, n: int) -> None:
    given = rows(4, n_vocab, (1.0, 0.0, 0.3, 2.0))
    tokens, scores = sample.rank(*given, n_vocab, n)
    expected, expected_scores = sample.rank_plain(*given, n_vocab, n)
    assert torch.equal(tokens, expected)
    assert torch.allclose(scores, expected_scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[:, 0], sample.choose(*given, n_vocab))


def test_the_best_may_lie_side_by_side_or_far_apart() -> None:
    """All in one group of tokens, one in each of many, and both."""
    n_vocab, n = 6000, 9
    logits, rules = split(rows(3, n_vocab, (0.0, 1.0)))
    logits[0, 130 : 130 + n] += 50
    logits[1, torch.arange(n) * 600 + 7] += 50
    logits[2, [0, 1, 2, 3, 2047, 2048, 4096, 5998, 5999]] += 50
    tokens, _ = sample.rank(logits, *rules, n_vocab, n)
    assert torch.equal(tokens, sample.rank_plain(logits, *rules, n_vocab, n)[0])


def test_noise_is_that_of_rng() -> None:
    """Equal logits at temperature 1: the scores are the noise itself, of every token, the largest seed included."""
    n_vocab = 99
    seeds = torch.tensor([0, 2**63 - 1, 2**32, 2**32 - 1], device=DEVICE)
    positions = torch.tensor([0, 2**31 - 1, 1, 77], device=DEVICE)
    tokens, scores = sample.rank(torch.zeros(4, n_vocab, device=DEVICE), 0.0 * seeds + 1, seeds, positions, n_vocab, 99)
    noise = rng.gumbel_all(seeds, positions, n_vocab)
    assert torch.allclose(scores, noise.gather(1, tokens), rtol=3e-6, atol=3e-6)
    assert torch.equal(tokens.sort().values, torch.arange(n_vocab, device=DEVICE).expand(4, -1))


@pytest.mark.parametrize("padding", [1e30, math.inf, -math.inf, math.nan])
def test_padding_is_never_chosen(padding: float) -> None:
    logits, rules = split(rows(6, 128, (0.0, 1.0)))
    logits[:, 97:] = padding
    tokens, scores = sample.rank(logits, *rules, 97, 5)
    expected, _ = sample.rank_plain(logits, *rules, 97, 5)
    assert torch.equal(tokens, expected)
    assert bool(scores.isfinite().all())


def test_ties_go_to_the_lower_token_also_between_zeros() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, 0.0], [2.0, 2.0, 1.0, 2.0], [-math.inf] * 4], device=DEVICE)
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens, _ = sample.rank(logits, zeros.float(), zeros, zeros, 4, 4)
    assert tokens.tolist() == [[1, 2, 3, 0], [0, 1, 3, 2], [0, 1, 2, 3]]


def test_absent_tokens_come_last() -> None:
    """A reduced head gives -inf to tokens it does not have: a known token all the same, but the last."""
    logits, rules = split(rows(2, 40, (0.0, 1.0)))
    logits[:, 3:] = -math.inf
    tokens, scores = sample.rank(logits, *rules, 40, 6)
    assert bool((tokens[:, :3] < 3).all())
    assert bool(scores[:, 3:].isneginf().all())
    assert tokens[:, 3:].tolist() == [[3, 4, 5]] * 2


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, (heat, seeds, positions) = split(rows(9, 300, (1.0, 0.0, 0.7)))
    _, together = sample.rank(logits, heat, seeds, positions, 300, 3)
    for i in range(9):
        one = slice(i, i + 1)
        _, alone = sample.rank(logits[one], heat[one], seeds[one], positions[one], 300, 3)
        assert torch.equal(alone[0], together[i])


def test_rows_may_be_part_of_wider_ones() -> None:
    logits, rules = split(rows(3, 256, (1.0,)))
    part = logits[:, 16:116]
    assert torch.equal(sample.choose(part, *rules, 100), sample.choose(part.contiguous(), *rules, 100))


@pytest.mark.parametrize("n", [1, 4])
def test_a_value_may_be_of_several_rows_and_lie_in_a_line_of_others(n: int) -> None:
    """As the facts of a captured step's rows do, beside positions of the tokens before."""
    logits, (heat, seeds, positions) = split(rows(12, 300, (1.0, 0.0, 0.7)))
    lines = torch.zeros(4, 7, dtype=torch.int64, device=DEVICE)
    lines[:, 2], lines.view(torch.float32)[:, 10] = seeds[:4], heat[:4]
    own = heat[:4].repeat_interleave(3), seeds[:4].repeat_interleave(3), positions
    for rank in (sample.rank, sample.rank_plain):
        expected, found = (
            rank(logits, *own, 300, n),
            rank(logits, as_float(lines[:, 5]), lines[:, 2], positions - 1, 300, n, None, 1),
        )
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter, at a temperature of almost 0
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("n_vocab", [97, 5003])
def test_a_row_whose_logits_are_not_finite_has_no_token(odd: float, n_vocab: int) -> None:
    """That row alone, at any temperature; and what lies beyond the known tokens does not matter."""
    logits, rules = split(rows(8, n_vocab + 7, (0.0, 1.0, 1e-38)))
    logits[:, n_vocab:] = math.nan
    expected = sample.choose(logits, *rules, n_vocab)
    assert (expected >= 0).all()
    logits[[1, 3, 5], torch.tensor([0, n_vocab // 2, n_vocab - 1])] = odd
    expected[[1, 3, 5]] = BROKEN
    assert sample.choose(logits, *rules, n_vocab).tolist() == expected.tolist()
    for rank in (sample.rank, sample.rank_plain):
        tokens, scores = rank(logits, *rules, n_vocab, 3)
        assert scores[:, 0].isnan().tolist() == (expected == BROKEN).tolist()
        assert ((tokens >= 0) & (tokens < n_vocab)).all()
    given = sample.choose_plain(logits, *rules, n_vocab)
    assert (given == BROKEN).tolist() == (expected == BROKEN).tolist()


def test_tokens_that_cannot_be_said_are_no_reason_to_give_up() -> None:
    logits, rules = split(rows(4, 97, (0.0, 1.0)))
    logits[:, 5:] = -math.inf
    assert (sample.choose(logits, *rules, 97) < 5).all()
    assert (sample.choose_plain(logits, *rules, 97) < 5).all()

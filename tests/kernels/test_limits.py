"""Limits by searching, against their twin, which sorts, and against the definition of what is chosen."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.algo import sampling
from saguaro.algo.sampling import Rules
from saguaro.algo.verification import BROKEN
from saguaro.device.graphs import as_float
from saguaro.kernels import sample
from saguaro.kernels.limits import BLOCK, limits, limits_plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V = 97


def rows(top_k: list[int], top_p: list[float], min_p: list[float], temperature: list[float]) -> tuple[Tensor, Rules]:
    """A row for each way to combine them."""
    each = torch.cartesian_prod(*(torch.tensor(one, dtype=torch.float64) for one in (temperature, top_k, top_p, min_p)))
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(each), V, generator=generator)
    seeds = torch.randint(2**63 - 1, (len(each),), generator=generator)
    heat, k, p, m = each.unbind(1)
    rules = Rules(heat.float(), k.long(), p.float(), m.float(), seeds, torch.arange(len(each)))
    return logits.to(DEVICE), Rules(*(getattr(rules, name).to(DEVICE) for name in Rules.__dataclass_fields__))


def found(logits: Tensor, rules: Rules, by: str = "kernel", n_known: int = V) -> tuple[Tensor, Tensor]:
    """The limits of these rows."""
    given = (logits, rules.temperature, rules.top_k, rules.top_p, rules.min_p.log(), n_known)
    return limits(*given) if by == "kernel" else limits_plain(*given)


def chosen(logits: Tensor, rules: Rules, by: str = "kernel") -> Tensor:
    given = (logits, rules.temperature, rules.seeds, rules.positions, V, found(logits, rules, by))
    return sample.choose(*given) if by == "kernel" else sample.choose_plain(*given)


@pytest.mark.parametrize("by", ["kernel", "twin"])
def test_tokens_are_those_of_the_definition(by: str) -> None:
    """Every combination of rules, off and on, at once."""
    logits, rules = rows([0, 1, 7, V + 1], [1.0, 0.95, 0.3], [0.0, 0.05], [0.0, 0.7, 1.3])
    assert chosen(logits, rules, by).tolist() == sampling.choose(logits.clone(), rules).tolist()


def test_the_kernel_is_its_twin() -> None:
    logits, rules = rows([0, 5], [1.0, 0.9], [0.0, 0.1], [0.0, 0.8])
    for one, other in zip(found(logits, rules), found(logits, rules, "twin"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by", ["kernel", "twin"])
def test_rules_may_be_of_several_rows_and_lie_in_a_line_of_others(by: str) -> None:
    """As the facts of a captured step's rows do."""
    logits, rules = rows([0, 5], [1.0, 0.9], [0.0, 0.1], [0.0, 0.8])
    n_lines = len(logits) // 4
    lines = torch.zeros(n_lines, 9, dtype=torch.int64, device=DEVICE)
    lines[:, 1] = rules.top_k[:n_lines]
    floats = (rules.temperature, rules.top_p, rules.min_p.log())
    for column, values in zip((3, 4, 8), floats, strict=True):
        lines.view(torch.float32)[:, 2 * column] = values[:n_lines]
    heat, top_p, lowest = (as_float(lines[:, column]) for column in (3, 4, 8))
    find = limits if by == "kernel" else limits_plain
    own = [each[:n_lines].repeat_interleave(4) for each in (*floats[:1], rules.top_k, *floats[1:])]
    expected = find(logits, own[0], own[1], own[2], own[3], V)
    for one, other in zip(find(logits, heat, lines[:, 1], top_p, lowest, V), expected, strict=True):
        assert torch.equal(one, other)


def test_only_the_tokens_that_may_stay_are_ever_chosen() -> None:
    """With noise at two hundred positions."""
    logits, rules = rows([5], [0.8], [0.02], [1.5])
    n = 200
    best, least = (each.expand(n).contiguous() for each in found(logits, rules))
    kept = sampling.restrict(logits.clone(), rules)[0] > sampling.NEVER
    seeds, positions = torch.zeros(n, dtype=torch.int64, device=DEVICE), torch.arange(n, device=DEVICE)
    tokens = sample.choose(
        logits.expand(n, -1).contiguous(), rules.temperature.expand(n), seeds, positions, V, (best, least)
    )
    assert set(tokens.tolist()) == set(kept.nonzero()[:, 0].tolist())


def test_ties_at_a_limit_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -math.inf]], device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    for top_k, top_p, expected in [(2, 1.0, -1.0), (1, 1.0, 0.0), (5, 1.0, -2.0), (0, 0.5, -1.0), (2, 0.01, 0.0)]:
        rules = Rules(one, top_k * one.long(), top_p * one, 0 * one, one.long(), one.long())
        assert found(logits, rules, n_known=6)[1].tolist() == [expected]
        assert found(logits, rules, "twin", n_known=6)[1].tolist() == [expected]


def test_what_lies_beyond_the_known_tokens_does_not_matter() -> None:
    logits, rules = rows([3], [0.9], [0.05], [1.0])
    wide = torch.cat((logits, torch.full((1, BLOCK), math.inf, device=DEVICE)), 1)
    for one, other in zip(found(wide, rules), found(logits, rules), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_token(odd: float) -> None:
    """That row alone."""
    logits, rules = rows([0, 3], [0.9], [0.0], [1.0])
    expected = chosen(logits, rules).tolist()
    logits[1, 50] = odd
    assert chosen(logits, rules).tolist() == [expected[0], BROKEN]
    assert chosen(logits, rules, "twin").tolist() == [expected[0], BROKEN]

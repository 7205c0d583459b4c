"""Acceptance by comparison, exhaustively on a tiny vocabulary."""

from itertools import product

import pytest
import torch

from saguaro.algo.verification import accept

V = 3


def plain(targets: tuple[int, ...], tokens: tuple[int, ...], length: int) -> tuple[int, int]:
    """Accept while equal; the target's token after that is the bonus."""
    k = 0
    while k < length and tokens[k] == targets[k]:
        k += 1
    return k, targets[k]


@pytest.mark.parametrize("k", range(4))
def test_every_speculation_against_every_target(k: int) -> None:
    cases = [
        (targets, tokens, length)
        for targets in product(range(V), repeat=k + 1)
        for tokens in product(range(V), repeat=k)
        for length in range(k + 1)
    ]
    n_accepted, bonus = accept(
        torch.tensor([targets for targets, _, _ in cases]),
        torch.tensor([tokens for _, tokens, _ in cases], dtype=torch.int64).view(len(cases), k),
        torch.tensor([length for _, _, length in cases]),
    )
    found = list(zip(n_accepted.tolist(), bonus.tolist(), strict=True))
    assert found == [plain(*case) for case in cases]


def test_no_rows_give_no_outcome() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    n_accepted, bonus = accept(none.view(0, 3), none.view(0, 2), none)
    assert (n_accepted.shape, bonus.shape) == ((0,), (0,))


def test_a_match_after_a_mismatch_does_not_count() -> None:
    n_accepted, bonus = accept(torch.tensor([[1, 2, 0]]), torch.tensor([[0, 2]]), torch.tensor([2]))
    assert (n_accepted.tolist(), bonus.tolist()) == ([0], [1])

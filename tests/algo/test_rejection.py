"""Rejection verification on tiny vocabularies: every path, with its probability, gives the target's law."""

import itertools

import pytest
import torch
from torch import Tensor

from saguaro.algo.sampling import saguaro_logits
from saguaro.algo.verification import acceptance, reject, residual

V = 3


def table(seed: int, n_contexts: int) -> Tensor:
    """Distributions [n_contexts, V] in float64, some with zeros."""
    rows = torch.randn(n_contexts, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2)
    p = rows.softmax(-1)
    p[0, 0] = 0
    return p / p.sum(-1, keepdim=True)


def context(text: tuple[int, ...]) -> int:
    """A text's row in a table: all texts of up to two tokens."""
    row = 0
    for token in text:
        row = row * V + token + 1
    return row


def law_of_two_tokens(p: Tensor, q: Tensor, told: Tensor, k: int) -> Tensor:  # [V, V]
    """Law of the first two tokens when a chain of k tokens is drawn from q and verified as if drawn from `told`."""
    law = torch.zeros(V, V, dtype=torch.float64)
    for chain in itertools.product(range(V), repeat=k):
        drawn = torch.ones((), dtype=torch.float64)
        for j in range(k):
            drawn = drawn * q[context(chain[:j]), chain[j]]
        if drawn == 0:
            continue
        reached = drawn
        for n_accepted in range(k + 1):
            here = p[context(chain[:n_accepted])]
            if n_accepted < k:
                was = told[context(chain[:n_accepted])]
                taken = acceptance(here, was, torch.tensor(chain[n_accepted]))
                bonus, weight = residual(here, was), reached * (1 - taken)
                reached = reached * taken
            else:
                bonus, weight = here, reached
            for token in range(V):
                text = (*chain[:n_accepted], token)
                if len(text) == 1:  # the second token comes from the next round: the target's own law
                    law[text[0]] += weight * bonus[token] * p[context(text)]
                else:
                    law[text[0], text[1]] += weight * bonus[token]
    return law


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_the_law_is_the_targets(k: int, seed: int) -> None:
    p, q = table(seed, 13), table(seed + 100, 13)
    wanted = torch.stack([p[0, a] * p[context((a,))] for a in range(V)])
    # Chains of two tokens may give a third; only the law of the first two is looked at.
    assert torch.allclose(law_of_two_tokens(p, q, q, k), wanted, atol=1e-12, rtol=0)


def test_a_wrong_q_is_caught() -> None:
    p, q = table(0, 13), table(100, 13)
    wanted = torch.stack([p[0, a] * p[context((a,))] for a in range(V)])
    assert not torch.allclose(law_of_two_tokens(p, q, table(200, 13), 1), wanted, atol=1e-3, rtol=0)


def test_saguaro_sampling_keeps_the_law_and_moves_the_residual() -> None:
    p = torch.tensor([[0.4, 0.4, 0.1, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.41, 0.41, 0.09, 0.09]], dtype=torch.float64)
    shifted = saguaro_logits(q.log(), torch.tensor([2]), 0.7783, 4).softmax(-1)
    for drawn, on_top in ((q, 0.0), (shifted, 1.0)):
        taken = torch.minimum(p, drawn)
        rest = (1 - taken.sum()) * residual(p, drawn)
        assert torch.allclose(taken + rest, p, atol=1e-12)
        assert float(residual(p, drawn)[0, :2].sum()) == pytest.approx(on_top, abs=1e-9)
        assert float(taken.sum()) == pytest.approx(0.98, abs=1e-4)


def chain(n_rows: int, k: int) -> Tensor:  # [n_rows, k]
    """The parents of chains."""
    return torch.arange(-1, k - 1).expand(n_rows, k)


def test_rows_are_decided_by_their_own_coins_and_lengths() -> None:
    p = torch.full((3, 3, V), 1 / V)
    q = torch.full((3, 2, V), 1 / V)
    q[1, 1] = torch.tensor([0.0, 0.0, 1.0])
    tokens = torch.tensor([[0, 1], [0, 2], [0, 1]])
    coins = torch.tensor([[0.9, 0.9], [0.5, 0.5], [0.1, 0.1]])
    length = torch.tensor([2, 2, 1])
    n_accepted, path, law = reject(p, q, tokens, chain(3, 2), length, 1, lambda chance: coins < chance)
    assert n_accepted.tolist() == [2, 1, 1]
    assert path.tolist() == [[0, 1], [0, -1], [0, -1]]
    assert law[0].tolist() == p[0, 2].tolist()
    assert law[1].tolist() == [0.5, 0.5, 0.0]  # token 2 was over-drawn: nothing of it is left
    assert law[2].tolist() == p[2, 1].tolist()  # the row's speculation ended, so the target's own law


def test_an_empty_speculation_is_a_sample_of_the_target() -> None:
    p = torch.tensor([[[0.2, 0.5, 0.3]]])
    none = torch.zeros(1, 0, dtype=torch.int64)
    n_accepted, path, law = reject(p, torch.zeros(1, 0, V), none, none, torch.tensor([0]), 1, lambda chance: chance > 0)
    assert n_accepted.tolist() == [0]
    assert path.shape == (1, 0)
    assert law.equal(p[:, 0])


def test_frequencies_of_the_sampled_rule() -> None:
    """The function itself, with coins and noise, over many draws."""
    n = 60000
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0.2, 0.6, 0.2])
    tokens = q.expand(n, V).multinomial(1, generator=generator)
    coins = torch.rand(n, 1, generator=generator)
    noise = -(-torch.rand(n, V, generator=generator).log()).log()
    given = p.expand(n, 2, V), q.expand(n, 1, V), tokens, chain(n, 1), torch.ones(n, dtype=torch.int64), 1
    n_accepted, _, law = reject(*given, lambda chance: coins < chance)
    bonus = (law.log() + noise).argmax(-1)
    first = torch.where(n_accepted > 0, tokens[:, 0], bonus)
    found = first.bincount(minlength=V) / n
    assert torch.allclose(found, p, atol=0.01)
    assert float((n_accepted > 0).float().mean()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.01)

"""Planners choose the outcomes to prepare after a chain, and learn from the actual outcomes.

A planner plans for the speculations in flight and is then told their outcomes. Invariant: each planned row is learnt
from at most once, and only from its own outcome. A speculation may be cut before it is verified: then "all accepted"
means all that were verified. `plan` is a fixed sequence of tensor operations, so it can be captured; `learn` is not
captured, and changes in place the tensors that `plan` reads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from saguaro.algo import fanout
from saguaro.algo.calibrate import Recorded, fit_power_law, hit_curve, hit_table
from saguaro.algo.planning import Ahead, Planned, alternatives, by_fan_out, chance_of_length
from saguaro.types import Outcome

Kind = Literal["uniform", "geometric", "general"]


class Planner(Protocol):
    """Chooses outcomes to prepare."""

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """Choose at most `budget` outcomes for each row in flight."""

    def fan_out(self, shape: "Shape") -> Tensor:  # [2, K+1] int64
        """How many outcomes are planned after each number accepted of K: of backup and primary speculations."""

    def learn(self, outcome: Outcome) -> None:
        """Learn the outcomes of the rows last planned for; other rows are ignored."""


class Shape(NamedTuple):
    """The shape of a plan."""

    lookahead: int  # K
    n_candidates: int  # C
    budget: int  # M
    device: torch.device

    @staticmethod
    def of(ahead: Ahead, budget: int) -> "Shape":
        """The shape of a plan for these rows."""
        return Shape(ahead.tokens.shape[1], ahead.candidates.shape[2], budget, ahead.length.device)


def make_planner(rule: str, lists: Sequence[int] = (), n_rows: int = 0) -> Planner | None:
    """The planner of a growth rule; None if it has none. n_rows: rows to allocate, as captured state cannot grow.

    >>> make_planner("best") is None, make_planner("uniform")
    (True, FanOut('uniform'))
    """
    match rule:
        case "nothing" | "best":
            return None
        case "continuation":
            return Last(1)
        case "branch":
            return Last(None)
        case "list":
            return FanOut(tuple(lists), n_rows)
        case "uniform" | "geometric" | "general":
            return FanOut(rule, n_rows)
    raise AssertionError(f"no growth rule is called {rule!r}")


class Last:
    """Only "all accepted": one continuation (AMUSD, PEARL), or the whole budget at the branching point (SpecBranch)."""

    def __init__(self, fan_out: int | None) -> None:
        self._fan_out = fan_out  # None: the budget

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """The best candidates after the last token in flight."""
        width = ahead.candidates.shape[1]
        is_last = torch.arange(width, device=ahead.length.device) == ahead.length[:, None]
        return by_fan_out(ahead, is_last * self._at_most(budget), budget)

    def fan_out(self, shape: Shape) -> Tensor:
        """See Planner."""
        is_last = torch.arange(shape.lookahead + 1, device=shape.device) == shape.lookahead
        return (is_last * self._at_most(shape.budget)).repeat(2, 1)

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def _at_most(self, budget: int) -> int:
        return budget if self._fan_out is None else self._fan_out


class FanOut:
    """F_k candidates after k accepted tokens: one list per length, after primary and after backup speculations.

    uniform: Algorithm 1; geometric: Theorem 12; general: Theorem 18 on measured tables; or one list for K, of which a
    shorter speculation gets the first entries and the last.
    """

    A, R, SCALE = 0.8, 1.0, 0.5  # prior: acceptance rate, and miss rate SCALE F^-R
    STRENGTH = 8.0  # weight of the prior, in rounds
    WINDOW, REFIT = 2000, 32  # rounds kept of either kind; rounds between two fits

    def __init__(self, kind: Kind | tuple[int, ...], n_rows: int = 0) -> None:
        self._kind = kind
        self._waiting = _Waiting(n_rows)
        self._rounds: tuple[deque[_Round], deque[_Round]] = (deque(maxlen=self.WINDOW), deque(maxlen=self.WINDOW))
        self._n_new = 0
        self._lists: dict[Shape, Tensor] = {}  # [2, K+1 lengths, K+1]: backup, primary; M depends on the batch size

    def __repr__(self) -> str:
        return f"FanOut({self._kind!r})"

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """Apply the list for each row's length and kind."""
        self._waiting.expect(ahead)
        lists = self.lists(Shape.of(ahead, budget))
        return by_fan_out(ahead, lists[ahead.is_primary.long(), ahead.length], budget)

    def fan_out(self, shape: Shape) -> Tensor:
        """See Planner."""
        return self.lists(shape)[:, shape.lookahead]

    def learn(self, outcome: Outcome) -> None:
        """Record the rank of the bonus; now and then, fit the lists anew."""
        known = self._waiting.settle(outcome)
        if known is None or self._kind not in ("geometric", "general"):
            return
        facts = [known.is_known, known.ahead.is_primary, known.ahead.length, known.k, known.rank]
        for is_known, is_primary, length, k, rank in torch.stack([x.long() for x in facts], dim=1).tolist():
            if is_known:
                self._rounds[is_primary].append(_Round(length, k, rank))
                self._n_new += 1
        if self._n_new >= self.REFIT:
            self._n_new = 0
            for shape, lists in self._lists.items():
                lists.copy_(self._fit_both(shape))

    def recorded(self, is_primary: bool, K: int, N: int) -> Recorded | None:
        """The rounds kept of either kind, of chains of K tokens; None without any. A fixed list keeps none."""
        seen = [one for one in self._rounds[is_primary] if one.length == K]
        if not seen:
            return None
        rank = torch.tensor([one.rank if one.rank < N else -1 for one in seen], dtype=torch.int64)
        return Recorded(torch.tensor([one.k for one in seen], dtype=torch.int64), rank, K, N)

    def lists(self, shape: Shape) -> Tensor:  # [2, K+1, K+1] int64
        """The current fan-out lists: after backup and primary, for each length. The tensor keeps its address."""
        if shape not in self._lists:
            self._lists[shape] = self._fit_both(shape).to(shape.device)
        return self._lists[shape]

    def _fit_both(self, shape: Shape) -> Tensor:
        return torch.stack([self._fit(rounds, *shape[:3]) for rounds in self._rounds])

    def _fit(self, rounds: "deque[_Round]", K: int, N: int, M: int) -> Tensor:  # [K+1, K+1]
        """The lists for the lengths 0..K, padded with 0."""
        match self._kind:
            case tuple(given):
                lists = [[*given[:n], given[-1]] for n in range(K + 1)]
            case "uniform":
                lists = [fanout.uniform(n, M) for n in range(K + 1)]
            case "geometric":
                a, r = self._fit_rates(rounds, N)
                lists = [fanout.geometric(a, r, n, M) for n in range(K + 1)]
            case "general":
                p_k, h = self._fit_tables(rounds, K, N)
                lists = [fanout.greedy(p_k[n, : n + 1], torch.cat([h[:n], h[K:]]), M) for n in range(K + 1)]
        return torch.tensor([[*row, *[0] * (K + 1 - len(row))] for row in lists], dtype=torch.int64)

    def _fit_rates(self, rounds: "deque[_Round]", N: int) -> tuple[float, float]:
        """Acceptance rate a and exponent r, with the prior."""
        accepted = sum(seen.k for seen in rounds)
        rejected = sum(seen.k < seen.length for seen in rounds)
        a = (accepted + self.STRENGTH * self.A) / (accepted + rejected + self.STRENGTH)
        if N < 2:
            return a, self.R
        rank = torch.tensor([seen.rank if seen.rank < N else -1 for seen in rounds], dtype=torch.int64)
        return a, fit_power_law(self._drawn(hit_curve(rank, N), len(rank), N)).r

    def _fit_tables(self, rounds: "deque[_Round]", K: int, N: int) -> tuple[Tensor, Tensor]:
        """P(k) [K+1 lengths, K+1] and hits [K+1, N+1]; the last row of hits is for "all accepted" at any length."""
        seen = [one for one in rounds if one.length <= K]
        accepted, tested = torch.zeros(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        for one in seen:
            accepted[: one.k] += 1
            tested[: min(one.k + 1, one.length)] += 1
        a, _ = self._fit_rates(rounds, N)
        accept = (accepted + self.STRENGTH * a) / (tested + self.STRENGTH)
        p_k = chance_of_length(accept.expand(K + 1, K), torch.arange(K + 1))
        if not seen:
            return p_k, self._drawn(torch.zeros(N + 1), 0, N).expand(K + 1, N + 1)
        k = torch.tensor([one.k if one.k < one.length else K for one in seen])
        rank = torch.tensor([one.rank if one.rank < N else -1 for one in seen])
        return p_k, self._drawn(hit_table(Recorded(k, rank, K, N)), len(seen), N)

    def _drawn(self, h: Tensor, n: int, N: int) -> Tensor:  # [..., N+1]
        """Hit curve of n rounds, combined with the prior, so that every further candidate has a positive gain."""
        prior = fanout.power_law(self.R, N, self.SCALE)
        return (n * h + self.STRENGTH * prior) / (n + self.STRENGTH)


@dataclass(frozen=True)
class _Known:
    """The outcomes of the rows last planned for."""

    ahead: Ahead  # length cut to the tokens that were verified
    is_known: Tensor  # [B] bool: the other rows are undefined
    k: Tensor  # [B] int64, 0..length
    is_left: Tensor  # [B, C] bool: the candidates at k that could be the bonus
    is_bonus: Tensor  # [B, C] bool: the candidate that was the bonus, if any

    @property
    def rank(self) -> Tensor:  # [B] int64
        """The bonus's rank among the alternatives; -1: none of them."""
        place = (self.is_left.long().cumsum(1) * self.is_bonus).sum(1)
        return place - 1


class _Waiting:
    """The rows last planned for, until their outcomes are known. Its tensors keep their addresses."""

    def __init__(self, n_rows: int = 0) -> None:
        self._n_rows = n_rows  # minimum number of rows to allocate
        self._is_captured = False  # captured graphs hold the tensors' addresses
        self.held: Ahead | None = None  # the most rows so far; slot -1: not waiting

    def make_room(self, ahead: Ahead) -> Ahead:
        """Allocate room for these rows if needed, and return it."""
        if self.held is None or not _has_room(self.held, ahead):
            assert not self._is_captured, f"{len(ahead.slots)} rows, and those before were captured with less room"
            n = max(self._n_rows, len(ahead.slots))
            self.held = Ahead(*(x.new_zeros(n, *x.shape[1:]) for x in _tensors(ahead)))
            self.held.slots.fill_(-1)
        is_cuda = ahead.slots.device.type == "cuda"
        self._is_captured |= is_cuda and torch.cuda.is_current_stream_capturing()
        return self.held

    def expect(self, ahead: Ahead) -> None:
        """Wait for the outcomes of these rows only."""
        n, all_held = len(ahead.slots), self.make_room(ahead)
        for held, new in zip(_tensors(all_held), _tensors(ahead), strict=True):
            held[:n].copy_(new)
        all_held.slots[n:].fill_(-1)

    def settle(self, outcome: Outcome) -> _Known | None:
        """Match the outcome to the held rows by slot; None if no row can match."""
        ahead = self.held
        if ahead is None or len(outcome.slots) == 0 or len(ahead.slots) == 0:
            return None
        outcome = _moved(outcome, ahead.slots.device)
        slots, length, n_accepted, bonus = outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus
        is_same = (ahead.slots[:, None] == slots) & (length <= ahead.length[:, None])  # [B, n]
        is_known = is_same.any(1)
        ahead.slots.masked_fill_(is_known, -1)
        at = is_same.long().argmax(1)
        k = torch.where(is_known, n_accepted[at], 0)
        ahead = replace(ahead, length=torch.where(is_known, length[at], ahead.length))
        is_left = _at(alternatives(ahead), k)
        is_bonus = is_left & (_at(ahead.candidates, k) == bonus[at][:, None])
        return _Known(ahead, is_known, k, is_left, is_bonus)


def _moved(outcome: Outcome, device: torch.device) -> Outcome:
    slots, length, n_accepted, bonus = (
        x.to(device) for x in (outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus)
    )
    return Outcome(slots, length, n_accepted, bonus)


def _tensors(ahead: Ahead) -> tuple[Tensor, ...]:
    return (ahead.slots, ahead.tokens, ahead.length, ahead.candidates, ahead.is_known, ahead.is_primary)


def _has_room(held: Ahead, ahead: Ahead) -> bool:
    """Whether these rows fit by number, shape and device."""
    return (
        len(held.slots) >= len(ahead.slots)
        and held.slots.device == ahead.slots.device
        and held.candidates.shape[1:] == ahead.candidates.shape[1:]
    )


class _Round(NamedTuple):
    """One recorded outcome."""

    length: int
    k: int
    rank: int


def _at(x: Tensor, k: Tensor) -> Tensor:  # [B, K+1, C], [B] -> [B, C]
    """Select each row's entry at its k."""
    return x.gather(1, k[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]

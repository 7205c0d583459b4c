"""Planners choose the outcomes to prepare, and learn from the actual outcomes.

A planner plans for the speculations in flight and is then told their outcomes. Invariant: each planned row is learnt
from at most once, and only from its own outcome. A speculation may be cut before it is verified: then "all accepted"
means all that were verified.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from saguaro.algo import fanout
from saguaro.algo.calibrate import Recorded, fit_power_law, hit_curve, hit_table
from saguaro.algo.planning import (
    NEVER,
    Ahead,
    Planned,
    alternatives,
    by_chance,
    by_fan_out,
    leads,
    outcome_chance,
    ranks,
    trust,
)
from saguaro.errors import ConfigError
from saguaro.types import Outcome

Kind = Literal["uniform", "geometric", "general"]


class Planner(Protocol):
    """Chooses outcomes to prepare."""

    @property
    def is_fixed(self) -> bool:
        """Whether it always runs the same tensor operations, without host synchronization, so it can be captured."""

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """Choose at most `budget` outcomes for each row in flight."""

    def learn(self, outcome: Outcome) -> None:
        """Learn the outcomes of the rows last planned for; other rows are ignored."""


class JointKernel(Protocol):
    """The two methods of Joint on the device. They change Joint's state in place, at fixed addresses."""

    def plan(
        self,
        ahead: Ahead,
        held: Ahead,  # R >= B rows: those last planned for; is_primary is not kept
        tables: tuple[Tensor, Tensor],  # accept, bonus: [3, n_bins] float64: hits, trials, curve
        edges: tuple[Tensor, Tensor, Tensor],  # of the bins of leads, trusts and ranks
        strength: float,
        M: int,
    ) -> Planned:
        """Hold the rows, and plan the M most likely outcomes of each."""

    def learn(
        self,
        outcome: Outcome,
        held: Ahead,
        tables: tuple[Tensor, Tensor],
        edges: tuple[Tensor, Tensor, Tensor],
        decay: float,
    ) -> None:
        """Count the outcomes of the held rows, and release the rows."""


def make_planner(name: str, joint: JointKernel | None = None, n_rows: int = 0) -> Planner | None:
    """The planner of a method; None plans nothing. n_rows: rows to allocate, as captured state cannot grow.

    >>> make_planner("nothing") is None, make_planner("joint")
    (True, Joint())
    """
    match name:
        case "nothing":
            return None
        case "last" | "continuation":
            return Last(1)
        case "branch":
            return Last(None)
        case "uniform" | "geometric" | "general":
            return FanOut(name, n_rows)
        case "joint":
            return Joint(joint, n_rows)
    raise ConfigError(
        f"planner is {name!r}; give nothing, last, continuation, branch, uniform, geometric, general or joint"
    )


class Last:
    """Only "all accepted": one continuation (AMUSD, PEARL), or the whole budget at the branching point (SpecBranch)."""

    is_fixed = True

    def __init__(self, fan_out: int | None) -> None:
        self._fan_out = fan_out  # None: the budget

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """The best candidates after the last token in flight."""
        width = ahead.candidates.shape[1]
        is_last = torch.arange(width, device=ahead.length.device) == ahead.length[:, None]
        return by_fan_out(ahead, is_last * (budget if self._fan_out is None else self._fan_out), budget)

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class FanOut:
    """F_k candidates after k accepted tokens: one list per length, after primary and after backup speculations.

    uniform: Algorithm 1; geometric: Theorem 12; general: Theorem 18 on measured tables.
    """

    A, R, SCALE = 0.8, 1.0, 0.5  # prior: acceptance rate, and miss rate SCALE F^-R
    STRENGTH = 8.0  # weight of the prior, in rounds
    WINDOW, REFIT = 2000, 32  # rounds kept of either kind; rounds between two fits

    def __init__(self, kind: Kind, n_rows: int = 0) -> None:
        self._kind: Kind = kind
        self._waiting = _Waiting(n_rows)
        self._rounds: tuple[deque[_Round], deque[_Round]] = (deque(maxlen=self.WINDOW), deque(maxlen=self.WINDOW))
        self._n_new = 0
        self._lists = torch.zeros(0, dtype=torch.int64)  # [2, K+1 lengths, K+1]: backup, primary
        # By K, C and M: M depends on the batch size, and captured graphs hold the tensors' addresses.
        self._fitted: dict[tuple[int, int, int], Tensor] = {}

    def __repr__(self) -> str:
        return f"FanOut({self._kind!r})"

    @property
    def is_fixed(self) -> bool:
        """True if nothing is fitted."""
        return self._kind == "uniform"

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """Apply the list for each row's length and kind."""
        self._waiting.expect(ahead)
        shape = (ahead.tokens.shape[1], ahead.candidates.shape[2], budget)
        if self._n_new >= self.REFIT:
            self._fitted, self._n_new = {}, 0
        if shape not in self._fitted:
            lists = torch.stack([self._fit(rounds, *shape) for rounds in self._rounds])
            self._fitted[shape] = lists.to(ahead.length.device)
        self._lists = self._fitted[shape]
        return by_fan_out(ahead, self._lists[ahead.is_primary.long(), ahead.length], budget)

    def learn(self, outcome: Outcome) -> None:
        """Record the rank of the bonus."""
        known = self._waiting.settle(outcome)
        if known is None or self._kind == "uniform":
            return
        facts = [known.is_known, known.ahead.is_primary, known.ahead.length, known.k, known.rank]
        for is_known, is_primary, length, k, rank in torch.stack([x.long() for x in facts], dim=1).tolist():
            if is_known:
                self._rounds[is_primary].append(_Round(length, k, rank))
                self._n_new += 1

    def lists(self) -> Tensor:  # [2, K+1, K+1] int64
        """The current fan-out lists: after backup and primary, for each length."""
        return self._lists

    def _fit(self, rounds: "deque[_Round]", K: int, N: int, M: int) -> Tensor:  # [K+1, K+1]
        """The lists for the lengths 0..K, padded with 0."""
        match self._kind:
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
        ones = torch.ones(K + 1, K + 1, 1, dtype=torch.float64)
        p_k = outcome_chance(accept.expand(K + 1, K), ones, torch.arange(K + 1))[..., 0]
        if not seen:
            return p_k, self._drawn(torch.zeros(N + 1), 0, N).expand(K + 1, N + 1)
        k = torch.tensor([one.k if one.k < one.length else K for one in seen])
        rank = torch.tensor([one.rank if one.rank < N else -1 for one in seen])
        return p_k, self._drawn(hit_table(Recorded(k, rank, K, N)), len(seen), N)

    def _drawn(self, h: Tensor, n: int, N: int) -> Tensor:  # [..., N+1]
        """Hit curve of n rounds, combined with the prior, so that every further candidate has a positive gain."""
        prior = fanout.power_law(self.R, N, self.SCALE)
        return (n * h + self.STRENGTH * prior) / (n + self.STRENGTH)


class Joint:
    """The most likely outcomes of each row, from the draft's scores and tables updated online.

    P(k, t) = P(accepted)_0 .. P(accepted)_(k-1) x P(rejected)_k x P(t | k). The acceptance of a token depends on
    its lead. The probability that an alternative is the bonus depends on its rank and lead among the alternatives, and
    on the lead of the rejected token, or on "all accepted". The tables start from a curve and decay slowly.
    """

    DECAY = 0.999  # of the counts, per round learnt
    STRENGTH = 16.0  # weight of the prior curve in each bin
    is_fixed = True

    def __init__(self, kernel: JointKernel | None = None, n_rows: int = 0) -> None:
        """Uses the kernel, if given."""
        self._kernel = kernel
        self._waiting = _Waiting(n_rows)
        self._bins = _Bins()
        self._accept = _Table(_curve(torch.zeros(1), self._bins.leads()), self.STRENGTH)
        self._bonus = _Table(_curve(*self._bins.bonuses()), self.STRENGTH)

    def __repr__(self) -> str:
        return "Joint()"

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """Plan the most likely outcomes."""
        if self._kernel is not None:
            held = self._waiting.make_room(ahead)
            return self._kernel.plan(ahead, held, *self._state(held.slots.device), self.STRENGTH, budget)
        self._waiting.expect(ahead)
        return by_chance(ahead, self.chance(ahead), budget)

    def chance(self, ahead: Ahead) -> Tensor:  # [B, K+1, C] float64
        """P(k accepted, then this candidate), as estimated now."""
        accept, bonus = self._accept.rate(self._bins.accept(ahead)), self._bonus.rate(self._bins.bonus(ahead))
        return outcome_chance(accept, bonus, ahead.length)

    def learn(self, outcome: Outcome) -> None:
        """Count the accepted tokens, and which alternative was the bonus."""
        if self._kernel is not None:
            held = self._waiting.held
            if held is not None and len(outcome.slots) > 0:
                device = held.slots.device
                self._kernel.learn(_moved(outcome, device), held, *self._state(device), self.DECAY)
            return
        known = self._waiting.settle(outcome)
        if known is None:
            return
        ahead, k, is_known = known.ahead, known.k[:, None], known.is_known[:, None]
        kept = self.DECAY ** is_known.sum().double()
        step = torch.arange(ahead.tokens.shape[1], device=k.device)
        is_tested = step < torch.minimum(k + 1, ahead.length[:, None])
        self._accept.learn(self._bins.accept(ahead), step < k, is_tested & is_known, kept)
        self._bonus.learn(_at(self._bins.bonus(ahead), known.k), known.is_bonus, known.is_left & is_known, kept)

    def _state(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Tables and edges."""
        return (self._accept.on(device), self._bonus.on(device)), self._bins.edges(device)


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
        is_left = _at(alternatives(ahead), k) > NEVER
        is_bonus = is_left & (_at(ahead.candidates, k) == bonus[at][:, None])
        return _Known(ahead, is_known, k, is_left, is_bonus)


def _moved(outcome: Outcome, device: torch.device) -> Outcome:
    slots, length, n_accepted, bonus = (
        x.to(device) for x in (outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus)
    )
    return Outcome(slots, length, n_accepted, bonus)


def _tensors(ahead: Ahead) -> tuple[Tensor, ...]:
    return (ahead.slots, ahead.tokens, ahead.length, ahead.candidates, ahead.scores, ahead.is_primary)


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


class _Table:
    """Decayed success counts per bin, with a prior curve. The tensor keeps its address."""

    def __init__(self, curve: Tensor, strength: float) -> None:  # [n_bins]
        self._state = torch.stack([curve * 0, curve * 0, curve])  # hits, trials, curve
        self._strength = strength

    def rate(self, bins: Tensor) -> Tensor:  # int64 -> float64
        """The success rate of these bins."""
        hits, trials, curve = self.on(bins.device)
        rates: Tensor = (hits + self._strength * curve) / (trials + self._strength)
        return rates[bins]

    def learn(self, bins: Tensor, is_hit: Tensor, is_trial: Tensor, kept: Tensor) -> None:
        """Decay the counts, then add trials and hits."""
        all_hits, all_trials, _ = self.on(bins.device)
        trials = is_trial.double().flatten()
        all_trials.mul_(kept).index_add_(0, bins.flatten(), trials)
        all_hits.mul_(kept).index_add_(0, bins.flatten(), trials * is_hit.flatten())

    def on(self, device: torch.device) -> Tensor:  # [3, n_bins]: hits, trials, curve
        """The state, moved to this device."""
        self._state = self._state.to(device)
        return self._state


class _Bins:
    """Maps a token in flight, or an alternative to it, to its bin."""

    def __init__(self) -> None:
        edges = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
        self._leads = torch.tensor([-edge for edge in edges[:0:-1]] + edges, dtype=torch.float64)
        self._trusts = torch.tensor([0.5, 1.5, 3.0], dtype=torch.float64)  # leads of the rejected token: coarser
        self._ranks = torch.tensor([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
        self._n_groups = len(self._trusts) + 2  # the last is "all accepted"

    def accept(self, ahead: Ahead) -> Tensor:  # [B, K] int64
        """Bins by lead."""
        self.edges(ahead.scores.device)
        return torch.bucketize(trust(ahead).double(), self._leads, right=True)

    def bonus(self, ahead: Ahead) -> Tensor:  # [B, K+1, C] int64
        """Bins by the rejected token's lead, and by the candidate's rank and lead."""
        self.edges(ahead.scores.device)
        scores = alternatives(ahead)
        group = torch.bucketize(trust(ahead).double(), self._trusts, right=True)
        group = torch.nn.functional.pad(group, (0, 1))
        is_last = torch.arange(scores.shape[1], device=scores.device) == ahead.length[:, None]
        group = torch.where(is_last, self._n_groups - 1, group)[..., None]
        rank = torch.bucketize(ranks(scores), self._ranks, right=True)
        lead = torch.bucketize(leads(scores).double(), self._leads, right=True)
        return (group * (len(self._ranks) + 1) + rank) * (len(self._leads) + 1) + lead

    def leads(self) -> Tensor:  # [n_bins of a lead]
        """The middle of each bin; 1 beyond the edge for the outer bins."""
        padded = torch.cat([self._leads[:1] - 2, self._leads, self._leads[-1:] + 2])
        return (padded[1:] + padded[:-1]) / 2

    def bonuses(self) -> tuple[Tensor, Tensor]:  # [n_bins of a bonus] twice
        """The lowest rank and the middle lead of each bin."""
        rank, lead = torch.cat([torch.zeros(1), self._ranks]), self.leads()
        n = self._n_groups
        return rank.repeat_interleave(len(lead)).repeat(n), lead.repeat(len(rank) * n)

    def edges(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The edges of leads, trusts and ranks, moved to this device."""
        self._leads, self._trusts, self._ranks = (x.to(device) for x in (self._leads, self._trusts, self._ranks))
        return self._leads, self._trusts, self._ranks


def _curve(rank: Tensor, lead: Tensor) -> Tensor:
    """Prior probability that the target chooses a candidate of this rank and lead."""
    return torch.where(rank == 0, (1.2 * lead - 0.4).sigmoid(), 0.55 * (lead / 1.2).exp().clamp(max=1) / (1 + rank))


def _at(x: Tensor, k: Tensor) -> Tensor:  # [B, K+1, C], [B] -> [B, C]
    """Select each row's entry at its k."""
    return x.gather(1, k[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]

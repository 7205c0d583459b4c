"""Who chooses the outcomes to prepare, and learns from those that came.

A planner plans for what is in flight and is then told what became of it. Invariant: each row planned for is learnt from
at most once, and only from its own outcome. A speculation may be cut before it is verified: then "all accepted" means
all that were verified.
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
        """Whether it does the same tensor operations each time and asks nothing of the host: such work is captured."""

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """At most `budget` outcomes for each row in flight."""

    def learn(self, outcome: Outcome) -> None:
        """What became of the rows that were last planned for; others are ignored."""


class JointKernel(Protocol):
    """Joint's two methods as device work, on state that is Joint's: it is changed in place, and stays where it is."""

    def plan(
        self,
        ahead: Ahead,
        held: Ahead,  # R >= B rows: those last planned for; is_primary is not kept
        tables: tuple[Tensor, Tensor],  # accept, bonus: [3, n_bins] float64: hits, trials, curve
        edges: tuple[Tensor, Tensor, Tensor],  # of the bins: leads, trusts, ranks
        strength: float,
        M: int,
    ) -> Planned:
        """Hold the rows, and plan the M likeliest outcomes of each."""

    def learn(
        self,
        outcome: Outcome,
        held: Ahead,
        tables: tuple[Tensor, Tensor],
        edges: tuple[Tensor, Tensor, Tensor],
        decay: float,
    ) -> None:
        """Count what became of the held rows, and hold them no longer."""


def make_planner(name: str, joint: JointKernel | None = None, n_rows: int = 0) -> Planner | None:
    """The planner of a method; None plans nothing. n_rows: room from the start, since what is captured cannot grow.

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
    """Only "all accepted": one continuation (AMUSD, PEARL), or the whole budget on the branching point (SpecBranch)."""

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
    """F_k candidates after k accepted tokens: one list for each length, after primary and after backup speculations.

    uniform: Algorithm 1; geometric: Theorem 12; general: Theorem 18 on measured tables.
    """

    A, R, SCALE = 0.8, 1.0, 0.5  # what is believed before anything is known: acceptance rate, and misses SCALE F^-R
    STRENGTH = 8.0  # rounds that this belief is worth
    WINDOW, REFIT = 2000, 32  # rounds remembered of either kind; rounds between two fits

    def __init__(self, kind: Kind, n_rows: int = 0) -> None:
        self._kind: Kind = kind
        self._waiting = _Waiting(n_rows)
        self._rounds: tuple[deque[_Round], deque[_Round]] = (deque(maxlen=self.WINDOW), deque(maxlen=self.WINDOW))
        self._n_new = 0
        self._lists = torch.zeros(0, dtype=torch.int64)  # [2, K+1 lengths, K+1]: backup, primary
        # By K, C and M: each batch size may have an M of its own, and what was captured has the tensors' addresses.
        self._fitted: dict[tuple[int, int, int], Tensor] = {}

    def __repr__(self) -> str:
        return f"FanOut({self._kind!r})"

    @property
    def is_fixed(self) -> bool:
        """Where nothing is fitted."""
        return self._kind == "uniform"

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """The list of each row's length and kind."""
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
        """Record where the bonus stood."""
        known = self._waiting.settle(outcome)
        if known is None or self._kind == "uniform":
            return
        facts = [known.is_known, known.ahead.is_primary, known.ahead.length, known.k, known.rank]
        for is_known, is_primary, length, k, rank in torch.stack([x.long() for x in facts], dim=1).tolist():
            if is_known:
                self._rounds[is_primary].append(_Round(length, k, rank))
                self._n_new += 1

    def lists(self) -> Tensor:  # [2, K+1, K+1] int64
        """The fan-out lists in use: after backup and primary, for each length."""
        return self._lists

    def _fit(self, rounds: "deque[_Round]", K: int, N: int, M: int) -> Tensor:  # [K+1, K+1]
        """The list of every length 0..K, padded with 0."""
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
        """Acceptance rate a and exponent r, drawn toward what is believed."""
        accepted = sum(seen.k for seen in rounds)
        rejected = sum(seen.k < seen.length for seen in rounds)
        a = (accepted + self.STRENGTH * self.A) / (accepted + rejected + self.STRENGTH)
        if N < 2:
            return a, self.R
        rank = torch.tensor([seen.rank if seen.rank < N else -1 for seen in rounds], dtype=torch.int64)
        return a, fit_power_law(self._drawn(hit_curve(rank, N), len(rank), N)).r

    def _fit_tables(self, rounds: "deque[_Round]", K: int, N: int) -> tuple[Tensor, Tensor]:
        """P(k) [K+1 lengths, K+1] and hits [K+1, N+1], whose last row is for "all accepted" at any length."""
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
        """Hits of n rounds, drawn toward what is believed: every further candidate then gains a little."""
        prior = fanout.power_law(self.R, N, self.SCALE)
        return (n * h + self.STRENGTH * prior) / (n + self.STRENGTH)


class Joint:
    """The likeliest outcomes of each row: from the draft's own scores, through tables kept up to date.

    P(k, t) = P(accepted)_0 .. P(accepted)_(k-1) x P(rejected)_k x P(t | k). How likely a token is accepted depends on
    how far it leads; how likely an alternative is the bonus, on its rank and lead among the alternatives, and on how
    far the rejected token had led, or that all were accepted. The tables start from a curve and forget slowly.
    """

    DECAY = 0.999  # of what is remembered, for each round learnt
    STRENGTH = 16.0  # times that a curve counts as seen, in each bin
    is_fixed = True

    def __init__(self, kernel: JointKernel | None = None, n_rows: int = 0) -> None:
        """A kernel does the work, if there is one."""
        self._kernel = kernel
        self._waiting = _Waiting(n_rows)
        self._bins = _Bins()
        self._accept = _Table(_curve(torch.zeros(1), self._bins.leads()), self.STRENGTH)
        self._bonus = _Table(_curve(*self._bins.bonuses()), self.STRENGTH)

    def __repr__(self) -> str:
        return "Joint()"

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """The likeliest outcomes."""
        if self._kernel is not None:
            held = self._waiting.make_room(ahead)
            return self._kernel.plan(ahead, held, *self._state(held.slots.device), self.STRENGTH, budget)
        self._waiting.expect(ahead)
        return by_chance(ahead, self.chance(ahead), budget)

    def chance(self, ahead: Ahead) -> Tensor:  # [B, K+1, C] float64
        """P(k accepted, then this candidate), as far as is known."""
        accept, bonus = self._accept.rate(self._bins.accept(ahead)), self._bonus.rate(self._bins.bonus(ahead))
        return outcome_chance(accept, bonus, ahead.length)

    def learn(self, outcome: Outcome) -> None:
        """Count which tokens were accepted, and which alternative the bonus was."""
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
    """What became of the rows last planned for."""

    ahead: Ahead  # as if only the tokens that were verified had been in flight
    is_known: Tensor  # [B] bool: only these rows mean anything
    k: Tensor  # [B] int64, 0..length
    is_left: Tensor  # [B, C] bool: the candidates at k that could be the bonus
    is_bonus: Tensor  # [B, C] bool: which of them it was; none, if none

    @property
    def rank(self) -> Tensor:  # [B] int64
        """The bonus's place among the alternatives; -1: it was none of them."""
        place = (self.is_left.long().cumsum(1) * self.is_bonus).sum(1)
        return place - 1


class _Waiting:
    """The rows last planned for, each until its outcome is known. Its tensors stay where they are while they last."""

    def __init__(self, n_rows: int = 0) -> None:
        self._n_rows = n_rows  # room for as many, at least
        self._is_captured = False  # what was captured has the tensors' addresses
        self.held: Ahead | None = None  # as many rows as ever were; slot -1: not waited for

    def make_room(self, ahead: Ahead) -> Ahead:
        """Where to hold these rows."""
        if self.held is None or not _has_room(self.held, ahead):
            assert not self._is_captured, f"{len(ahead.slots)} rows, and those before were captured with less room"
            n = max(self._n_rows, len(ahead.slots))
            self.held = Ahead(*(x.new_zeros(n, *x.shape[1:]) for x in _tensors(ahead)))
            self.held.slots.fill_(-1)
        is_cuda = ahead.slots.device.type == "cuda"
        self._is_captured |= is_cuda and torch.cuda.is_current_stream_capturing()
        return self.held

    def expect(self, ahead: Ahead) -> None:
        """From now on, wait for the outcomes of these rows, and of no others."""
        n, all_held = len(ahead.slots), self.make_room(ahead)
        for held, new in zip(_tensors(all_held), _tensors(ahead), strict=True):
            held[:n].copy_(new)
        all_held.slots[n:].fill_(-1)

    def settle(self, outcome: Outcome) -> _Known | None:
        """Match the outcome with the rows by slot; None: it is about none of them."""
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
    """Whether rows of this shape, and not more than there are, can be copied in."""
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
    """How often something came true, bin by bin: counts that fade, drawn toward a curve. They stay where they are."""

    def __init__(self, curve: Tensor, strength: float) -> None:  # [n_bins]
        self._state = torch.stack([curve * 0, curve * 0, curve])  # hits, trials, curve
        self._strength = strength

    def rate(self, bins: Tensor) -> Tensor:  # int64 -> float64
        """The chance in each of these bins."""
        hits, trials, curve = self.on(bins.device)
        rates: Tensor = (hits + self._strength * curve) / (trials + self._strength)
        return rates[bins]

    def learn(self, bins: Tensor, is_hit: Tensor, is_trial: Tensor, kept: Tensor) -> None:
        """Fade, then count what came true where it was tried."""
        all_hits, all_trials, _ = self.on(bins.device)
        trials = is_trial.double().flatten()
        all_trials.mul_(kept).index_add_(0, bins.flatten(), trials)
        all_hits.mul_(kept).index_add_(0, bins.flatten(), trials * is_hit.flatten())

    def on(self, device: torch.device) -> Tensor:  # [3, n_bins]: hits, trials, curve
        """All of it, on this device from now on."""
        self._state = self._state.to(device)
        return self._state


class _Bins:
    """Which bin of its table a token in flight, or an alternative to it, belongs to."""

    def __init__(self) -> None:
        edges = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
        self._leads = torch.tensor([-edge for edge in edges[:0:-1]] + edges, dtype=torch.float64)
        self._trusts = torch.tensor([0.5, 1.5, 3.0], dtype=torch.float64)  # of the rejected token: coarser
        self._ranks = torch.tensor([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
        self._n_groups = len(self._trusts) + 2  # the last: "all accepted"

    def accept(self, ahead: Ahead) -> Tensor:  # [B, K] int64
        """By lead."""
        self.edges(ahead.scores.device)
        return torch.bucketize(trust(ahead).double(), self._leads, right=True)

    def bonus(self, ahead: Ahead) -> Tensor:  # [B, K+1, C] int64
        """By the lead of the rejected token, rank and lead."""
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
        """The middle of each bin, and 1 beyond the outer edges."""
        padded = torch.cat([self._leads[:1] - 2, self._leads, self._leads[-1:] + 2])
        return (padded[1:] + padded[:-1]) / 2

    def bonuses(self) -> tuple[Tensor, Tensor]:  # [n_bins of a bonus] twice
        """The first rank and the middle lead of each bin."""
        rank, lead = torch.cat([torch.zeros(1), self._ranks]), self.leads()
        n = self._n_groups
        return rank.repeat_interleave(len(lead)).repeat(n), lead.repeat(len(rank) * n)

    def edges(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of leads, trusts and ranks, on this device from now on."""
        self._leads, self._trusts, self._ranks = (x.to(device) for x in (self._leads, self._trusts, self._ranks))
        return self._leads, self._trusts, self._ranks


def _curve(rank: Tensor, lead: Tensor) -> Tensor:
    """P(the target takes a candidate of this rank and lead), before anything is known."""
    return torch.where(rank == 0, (1.2 * lead - 0.4).sigmoid(), 0.55 * (lead / 1.2).exp().clamp(max=1) / (1 + rank))


def _at(x: Tensor, k: Tensor) -> Tensor:  # [B, K+1, C], [B] -> [B, C]
    """Each row's part at its k."""
    return x.gather(1, k[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]

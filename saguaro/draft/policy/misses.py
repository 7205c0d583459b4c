"""Drafts the rows that missed: with always the same proposer, or with the one that pays.

A draft model drafts well, but all rows wait for it, and each verified token takes time. MeasuredMisses maximizes tokens
per second. With the model it decides before every growth step whether to take it, and at the end which nodes are
verified:

    a step    P(it adds an accepted token)  >  current tokens per second x (a step + verifying one more token)
    a node    P(the text runs through it)   >  current tokens per second x verifying one more token

Where the model does not pay, the backup drafts as many tokens as pay; that may be none, which is autoregressive
decoding.

These decisions depend on the tokens before the end, not on later ones. So verified tokens are still distributed as q,
and rejection stays exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from saguaro.draft.policy.average import Average
from saguaro.draft.policy.budget import budget_at
from saguaro.draft.policy.depth import Growing, captured_steps
from saguaro.draft.policy.kept import State, numbers
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.rows import DraftRow, DraftRows, GrowthBudget, Proposal, Proposer, Wanted
from saguaro.types import EMPTY, Outcome

EVERY = 32  # one of so many chains of the backup has a token at least, to keep measuring
EVERY_FULL = 64  # one of so many drafts takes all steps
SLOW = 2  # first drafts that are not timed, because they are slow
SPENT = 0.005  # share of the time for trials of what does not seem to pay
TRIES, AHEAD = 3, 4  # drafts per trial, and misses before it in which texts are read again
BETTER = 1.02  # the other choice is taken if it is so many times as fast: estimates vary by some percent
KEPT_TRIES = 2  # drafts of the trial of a model that was kept as not paying; its first one is not timed
KEPT_ROUNDS = 2.0  # most rounds whose time that trial may take
REST = 8  # misses that are not decided on after one for which nothing pays
MOST_SAVED = 60.0  # seconds: with so much, even a trial that seems to cost more takes place


class Misses(Protocol):
    """Drafts the rows that missed."""

    @property
    def reads(self) -> bool:
        """Whether the model should read texts now, because it may draft soon."""

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """Put a speculation in flight for each of these rows, a part of the rows asked about."""

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Learn the outcome of the speculations in flight. Called before the commit."""

    def read(self, seconds: float) -> None:
        """Reading texts took so long."""

    def state(self) -> State:
        """To be kept (kept.py), beside what Learnt keeps."""

    def restore(self, state: State) -> None:
        """Continue from a kept state."""


class TreeProposer(Growing, Protocol):
    """A Proposer of trees that grow step by step."""

    source: int

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """See Proposer; stops when the budget says so."""


class NoProposer:
    """Proposes no tokens."""

    source = EMPTY

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """Always empty."""
        return Proposal([[] for _ in rows])


class FixedMisses:
    """Uses one proposer for every miss."""

    reads = True

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Misses."""
        put_in_flight(self._proposer, missed)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to learn."""

    def read(self, seconds: float) -> None:
        """Nothing to learn."""

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


@dataclass(frozen=True)
class _Round:
    """What a round is expected to give and to take."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class MeasuredMisses:
    """Uses the model as far as it pays, or the backup."""

    def __init__(self, model: TreeProposer, backup: Proposer | None, learnt: Learnt) -> None:
        """backup: None: whether the model drafts is decided elsewhere (free.py), here only how far."""
        self._model, self._backup, self._learnt = model, backup, learnt
        self._is_model = True  # what seems to pay
        self._n_drafts = self._n_chains = 0
        self._n_resting = 0
        self._n_left = 0  # misses until the trial ends
        self._saved = 0.0  # seconds for trials
        self._read_s = 0.0  # spent on reading texts for the last trial
        self._tried = Average(kept=0.8)  # accepted tokens per speculation of the model in a trial
        self._at = learnt.now()
        self._is_kept = False  # whether what was kept against the model is not tried yet
        self._is_free, self._n_trial = False, TRIES  # of the trial: whether it is paid for, and its drafts

    @property
    def reads(self) -> bool:
        """See Misses: not while the backup drafts and there is no trial."""
        return self._is_model or self._n_left > 0

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Misses; sometimes tries the other choice, to keep measuring."""
        self._n_resting -= 1
        if not missed or self._n_resting > 0:
            return
        room = max(n for _, n in missed)
        expected: Sequence[_Round] = self._expected(missed, asked, room)
        if self._backup is None:
            self._by_model(missed, asked, room, max((each.rate for each in expected[:1]), default=0.0))
            return
        rate = max((each.rate for each in expected), default=0.0)
        if self._chooses_model(expected, asked):
            self._by_model(missed, asked, room, rate)
        else:
            self._by_backup(missed, rate)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Misses. The rest is learnt by Learnt."""
        if self._n_left and not self._is_model:
            for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
                row = rows.get(slot)
                if row is not None and row.source == self._model.source:
                    self._tried.add(k)

    def read(self, seconds: float) -> None:
        """Reading for a trial is a part of its cost."""
        if not self._is_model:
            self._read_s += seconds
            self._saved -= seconds

    def state(self) -> State:
        """See Misses."""
        return {"is_model": self._is_model, "read_s": self._read_s}

    def restore(self, state: State) -> None:
        """See Misses."""
        (self._read_s,) = numbers([state["read_s"]], 1)
        self._is_model, self._n_drafts = bool(state["is_model"]), SLOW - 1
        self._is_kept = not self._is_model

    def _expected(
        self, missed: Sequence[Wanted], asked: Sequence[DraftRow], room: int
    ) -> tuple[_Round, _Round] | tuple[()]:
        """A round in which the model drafts, and one in which the backup does; nothing before there are measurements
        of both drafting and verifying."""
        learnt, n_rows, n_missed = self._learnt, len(asked), len(missed)
        verification, drafting = learnt.verification, learnt.drafting(n_missed)
        if not (verification.n and drafting.n):
            return ()
        accepted, length = learnt.model_accepts(asked, room), learnt.by_model.length.mean(room)
        usual = max(1.0, learnt.steps.mean(1.0))
        steps = captured_steps(self._model, learnt, missed, asked) or usual
        part = learnt.by_steps.at(steps) / learnt.by_steps.at(usual) if steps < usual else 1.0
        by_model = _Round(
            n_rows + part * accepted,
            verification.at(n_rows * (1 + length)) + drafting.at(steps),
        )
        hit = (n_rows - n_missed) / n_rows  # were drafted by the model
        by_backup = _Round(
            n_rows + hit * accepted + n_missed * learnt.by_backup.accepted.mean(0.0),
            verification.at(n_rows * (1 + hit * length) + n_missed * learnt.by_backup.length.mean(0.0)),
        )
        return by_model, by_backup

    def _chooses_model(self, expected: Sequence[_Round], asked: Sequence[DraftRow]) -> bool:
        """Whether the model drafts: if it pays, or for a trial."""
        if not expected:
            return True
        if len(self._learnt.verification.known) < 2:
            return False  # two numbers of tokens show what a token takes
        by_model, by_backup = expected
        chosen, other = (by_model, by_backup) if self._is_model else (by_backup, by_model)
        if other.rate > chosen.rate * BETTER:
            self._is_model, self._n_left = not self._is_model, 0
            chosen, other = other, chosen
        return self._is_model != self._tries(chosen, other, asked)

    def _tries(self, chosen: _Round, other: _Round, asked: Sequence[DraftRow]) -> bool:
        """Whether the other choice is taken for a trial. Trials are paid for by a small share of the time."""
        now = self._learnt.now()
        self._saved, self._at = min(MOST_SAVED, self._saved + SPENT * (now - self._at)), now
        loss = max(0.0, other.seconds - other.tokens / chosen.rate)  # of a round
        if not self._n_left:
            short = min(loss, self._loss_of_a_step(chosen, asked))
            is_free = self._is_kept and KEPT_TRIES * short + self._read_s <= KEPT_ROUNDS * chosen.seconds
            self._is_kept = False
            if is_free or self._saved >= min(MOST_SAVED, TRIES * loss + self._read_s):
                self._is_free, self._n_trial = is_free, KEPT_TRIES if is_free else TRIES
                self._n_left = self._n_trial + (0 if self._is_model else AHEAD)
                self._read_s, self._tried = 0.0, Average(kept=0.8)
            return False
        self._n_left -= 1
        if not self._is_model and self._n_left >= self._n_trial:  # texts are read
            return False
        self._saved -= 0.0 if self._is_free else loss
        if not self._is_model and self._n_left <= 1 and self._seems_better(other, chosen, asked):
            self._n_left = 2
        return True

    def _loss_of_a_step(self, chosen: _Round, asked: Sequence[DraftRow]) -> float:
        """Seconds that a round loses in which the model drafts a token per row."""
        learnt, n_rows = self._learnt, len(asked)
        if self._model.step_choices or not learnt.by_model.stands:
            return math.inf  # it may take more steps
        seconds = learnt.drafting(n_rows).at(1) + n_rows * learnt.verification.slope()
        return max(0.0, seconds - n_rows * learnt.by_model.stands[0].mean(0.0) / chosen.rate)

    def _seems_better(self, other: _Round, chosen: _Round, asked: Sequence[DraftRow]) -> bool:
        """Whether the model would pay if all its speculations were accepted as those of this trial."""
        tokens = len(asked) * (1 + self._tried.mean(0.0))
        return tokens / other.seconds > BETTER * chosen.rate

    def _by_model(self, missed: Sequence[Wanted], asked: Sequence[DraftRow], room: int, rate: float) -> None:
        """Grow as far as pays at this rate, tokens per second."""
        learnt, began = self._learnt, self._learnt.now()
        is_full = self._n_drafts % EVERY_FULL == 0  # shows what more steps are worth by now
        steps = None if is_full else captured_steps(self._model, learnt, missed, asked)
        budget = budget_at(rate, learnt, len(missed), steps)
        proposal = self._model.propose([row for row, _ in missed], room, budget)
        send(proposal, missed, self._model.source)
        is_any = any(proposal.tokens)
        self._n_drafts += is_any
        if is_any and self._n_drafts > SLOW:
            learnt.drafted(len(missed), self._model.n_steps, learnt.now() - began)
            for levels in self._model.levels.values():
                learnt.by_steps.add(levels[: self._model.n_steps])

    def _by_backup(self, missed: Sequence[Wanted], rate: float) -> None:
        """As many tokens as pay at this rate, tokens per second."""
        self._n_chains += 1
        limit = self._learnt.by_backup.worth(rate * self._learnt.verification.slope())
        if not limit and self._n_chains % EVERY == 0:
            limit = 1
        self._n_resting = 0 if limit or self._n_left or self._is_model else REST
        assert self._backup is not None
        put_in_flight(self._backup, missed, limit)


def put_in_flight(proposer: Proposer, missed: Sequence[Wanted], limit: int | None = None) -> None:
    """Draft as many tokens as each row has room for, at most `limit`."""
    if not missed or limit == 0:
        return
    room = [(row, n if limit is None else min(n, limit)) for row, n in missed]
    send(proposer.propose([row for row, _ in room], max(n for _, n in room)), room, proposer.source)


def send(proposal: Proposal, missed: Sequence[Wanted], source: int) -> None:
    """Put a proposal in flight, limited by each row's room."""
    for index, (row, n) in enumerate(missed):
        q = proposal.q[index] if proposal.q else None
        parents = proposal.parents[index] if proposal.parents else None
        row.propose(proposal.tokens[index][:n], source, q, None if parents is None else parents[:n])

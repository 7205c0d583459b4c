"""Misses with a proposer whose drafts cost nothing but their verification: what followed earlier in the text.

It says how likely each of its nodes is (Proposal.chances), so what a round gives is known before it is made:

    tokens per second   (rows + probabilities of all nodes) / seconds of verifying them

FreeMisses verifies the nodes with which this is highest. FreeFirst compares that with a round in which the model drafts
for some rows: its accepted tokens are learnt, apart for rows with different expectations of the free proposer, and the
seconds of its draft are added. What does not seem to pay is tried at first, and then for a small share of the time.
Reading texts for the model may make rounds longer. It is paid for by what the model's drafts save, and by that share.
"""

from collections.abc import Sequence
from typing import Protocol

from saguaro.device.graphs import bucket
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.kept import State
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import KEPT_ROUNDS, MOST_SAVED, SPENT, Misses, send
from saguaro.draft.rows import DraftRow, DraftRows, Proposal, Wanted
from saguaro.types import CACHE, DRAFT, Outcome

EVERY = 64  # one of so many decisions against verifying any node is reversed, to keep measuring
SLOW = 2  # first drafts of the model that are not timed
FIRST = 4  # drafts of the model before it is decided against
TRIES = 4  # decisions of a trial, of which one is a draft
MOST_OWED = 1.0  # seconds that texts are read beyond what was saved
RECENT = 4  # decisions against the model after which it does not read texts any more
OF_ALL = 4.0  # weight of all rows' acceptance in that of rows with one expectation


class FreeProposer(Protocol):
    """A proposer that says how likely its nodes are, and takes next to no time."""

    source: int

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """See Proposer; with chances, the likeliest nodes first."""


class FreeMisses:
    """Drafts for free, as many nodes as pay."""

    reads = True

    def __init__(self, free: FreeProposer, learnt: Learnt) -> None:
        self._free, self._learnt = free, learnt
        self._n_against = 0

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Misses."""
        if missed:
            proposal = self._free.propose([row for row, _ in missed], max(n for _, n in missed))
            paid, _ = paying(proposal, missed, asked, self._learnt)
            if any(proposal.tokens) and not any(paid.tokens):
                self._n_against += 1
                paid = proposal if self._n_against % EVERY == 0 else paid
            send(paid, missed, self._free.source)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to learn: the proposer learns from texts."""

    def read(self, seconds: float) -> None:
        """Nothing to learn."""

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


class FreeFirst:
    """Drafts for free, or leaves a row to other misses, which draft with a model, where those are worth their time."""

    def __init__(self, free: FreeProposer, others: Misses, learnt: Learnt) -> None:
        self._free, self._others, self._learnt = free, others, learnt
        self._seconds = learnt.new_drafting()  # of a draft by the model, by rows
        self._read_s = 0.0  # of reading texts in this round
        self._answered, self._n_tokens = 0.0, 0  # when the last reply was complete, and how many tokens are verified
        self._accepted: dict[int, Average] = {}  # of the model, by what the free proposer expected
        self._left: dict[DraftRow, int] = {}  # rows left to the model, and what was expected
        self._n_drafts = 0
        self._n_against = 0  # decisions since the last for the model
        self._n_trial = 0  # decisions until the trial ends; the first may be too early, if texts are to be read
        self._saved, self._at = 0.0, learnt.now()  # seconds for trials
        self._earned = 0.0  # seconds for reading texts
        self._is_kept = False  # whether what was kept is not tried yet

    @property
    def reads(self) -> bool:
        """See Misses: not where the text repeats itself for long, nor beyond what the model's drafts have saved."""
        is_paid = self._earned >= 0 or self._n_drafts < FIRST
        return is_paid and self._n_against <= RECENT and self._others.reads

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Misses."""
        self._left = {}
        if missed:
            self._draft(missed, asked)
        self._n_tokens = len(asked) + sum(len(row.speculation) for row in asked)
        self._answered = self._learnt.now()

    def _draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        proposal = self._free.propose([row for row, _ in missed], max(n for _, n in missed))
        paid, rate = paying(proposal, missed, asked, self._learnt)
        worth = [sum(chances) for chances in paid.chances]
        is_left = self._choose(missed, asked, paid, worth, rate)
        kept = [index for index, left in enumerate(is_left) if not left]
        send(_of(paid, kept), [missed[index] for index in kept], self._free.source)
        left = [missed[index] for index, leaves in enumerate(is_left) if leaves]
        self._left = {row: round(worth[index]) for index, (row, _) in enumerate(missed) if is_left[index]}
        began = self._learnt.now()
        free = {missed[index][0] for index in kept}
        self._others.draft(left, [row for row in asked if row not in free])
        if any(row.source == DRAFT for row in self._left):
            self._n_drafts, self._n_trial = self._n_drafts + 1, 0
            if self._n_drafts > SLOW:
                self._seconds.add(bucket(len(left)), self._learnt.now() - began)
        empty = [index for index, (row, _) in enumerate(missed) if not row.speculation and is_left[index]]
        send(_of(paid, empty), [missed[index] for index in empty], self._free.source)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Misses."""
        self._others.outcome(outcome, rows)
        more = self._learnt.now() - self._answered - self._learnt.verification.at(self._n_tokens)
        self._earned = max(self._earned - min(max(more, 0.0), self._read_s), -MOST_OWED)
        self._read_s = 0.0
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            row = rows.get(slot)
            if row is not None and row in self._left and row.source in (DRAFT, CACHE):
                self._accepted.setdefault(self._left[row], Average(kept=0.99)).add(k)

    def read(self, seconds: float) -> None:
        """See Misses."""
        self._read_s += seconds
        self._others.read(seconds)

    def state(self) -> State:
        """See Misses."""
        return {
            "others": self._others.state(),
            "seconds": self._seconds.state(),
            "accepted": {str(worth): each.state() for worth, each in self._accepted.items()},
        }

    def restore(self, state: State) -> None:
        """See Misses."""
        self._others.restore(state["others"])
        self._seconds.restore(state["seconds"])
        self._accepted = {int(worth): Average(kept=0.99).restore(each) for worth, each in state["accepted"].items()}
        self._n_drafts = FIRST if self._seconds.n else 0
        self._is_kept = self._n_drafts > 0

    def _choose(
        self,
        missed: Sequence[Wanted],
        asked: Sequence[DraftRow],
        paid: Proposal,
        worth: Sequence[float],
        rate: float,
    ) -> list[bool]:
        """Which rows are left to the model: those for which it is expected to be accepted more, if the round is the
        faster for it."""
        if rate == 0 or self._n_drafts < FIRST:  # little is measured
            return [True] * len(missed)
        hoped = [self._hoped(row, n, each) for (row, n), each in zip(missed, worth, strict=True)]
        is_left = [model > free for model, free in zip(hoped, worth, strict=True)]
        n_left = sum(is_left)
        if n_left:
            tokens, n_nodes = float(len(asked)), float(len(asked))
            length = self._learnt.by_model.length.mean(max(n for _, n in missed))
            for left, model, free, nodes in zip(is_left, hoped, worth, paid.tokens, strict=True):
                tokens, n_nodes = tokens + (model if left else free), n_nodes + (length if left else len(nodes))
            took = self._learnt.verification.at(n_nodes) + self._seconds.at(bucket(n_left))
            if tokens > rate * took:
                self._n_against = 0
                self._earned = min(MOST_SAVED, self._earned + tokens / rate - took)
                return is_left
        self._n_against += 1
        return [self._is_tried(len(missed))] * len(missed)

    def _is_tried(self, n_rows: int) -> bool:
        """Whether the model drafts although that does not seem to pay. A small share of the time pays for trials."""
        now, loss = self._learnt.now(), self._seconds.at(bucket(n_rows))
        share, self._at = SPENT * (now - self._at), now
        self._saved, self._earned = min(MOST_SAVED, self._saved + share), min(MOST_SAVED, self._earned + share)
        if self._is_kept and loss <= KEPT_ROUNDS * self._learnt.verification.at(n_rows):
            self._saved = max(loss, self._saved)
        self._is_kept = False
        if not self._n_trial and self._saved >= loss:
            self._saved -= loss
            self._n_trial, self._n_against = TRIES, 0
        self._n_trial = max(0, self._n_trial - 1)
        return self._n_trial > 0

    def _hoped(self, row: DraftRow, room: int, worth: float) -> float:
        """Tokens of the model that are expected to be accepted."""
        usual = self._learnt.model_accepts([row], room)
        known = self._accepted.get(round(worth))
        return usual if known is None else known.mean(usual, weight=OF_ALL)


def paying(
    proposal: Proposal, missed: Sequence[Wanted], asked: Sequence[DraftRow], learnt: Learnt
) -> tuple[Proposal, float]:
    """The nodes with which tokens per second are highest, and that rate; all of them, and 0, before a verification was
    measured. Rows that did not miss count with what is in flight for them."""
    if not learnt.verification.n:
        return proposal, 0.0
    lost = {row for row, _ in missed}
    hits = [row for row in asked if row not in lost]
    tokens = len(asked) + learnt.model_accepts(hits, 0)
    n_nodes = len(asked) + sum(len(row.speculation) for row in hits)
    best = tokens / learnt.verification.at(n_nodes)
    every = [
        (-chance, row)
        for row, (chances, (_, n)) in enumerate(zip(proposal.chances, missed, strict=True))
        for chance in chances[:n]
    ]
    every.sort()
    n_taken = 0
    for n, (cost, _) in enumerate(every, 1):
        tokens -= cost
        rate = tokens / learnt.verification.at(n_nodes + n)
        if rate > best:
            n_taken, best = n, rate
    taken = [0] * len(missed)
    for _, row in every[:n_taken]:
        taken[row] += 1
    return _cut(proposal, taken), best


def _cut(proposal: Proposal, lengths: Sequence[int]) -> Proposal:
    """The first nodes of each row."""
    return Proposal(
        [tokens[:n] for tokens, n in zip(proposal.tokens, lengths, strict=True)],
        parents=[parents and parents[:n] for parents, n in zip(proposal.parents, lengths, strict=False)],
        chances=[chances[:n] for chances, n in zip(proposal.chances, lengths, strict=True)],
    )


def _of(proposal: Proposal, rows: Sequence[int]) -> Proposal:
    """The proposal for some of the rows."""
    return Proposal(
        [proposal.tokens[index] for index in rows],
        parents=[proposal.parents[index] for index in rows] if proposal.parents else (),
        chances=[proposal.chances[index] for index in rows],
    )

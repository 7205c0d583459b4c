"""Drafting without a model: what followed the longest run of tokens that the text's end repeats, as a tree.

Each row has a suffix automaton over its prompt and output (draft/automaton.py). Optionally there is one over earlier
outputs of all rows (Store). The candidates after a run are the tokens that followed it; how likely each is, is learnt
from the length of the run and from how often each followed (draft/match_chance.py). A look-up takes some microseconds
per node, whatever the length of the text. Candidates are functions of the text, so under rejection their q is one-hot.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter

from saguaro.draft.automaton import ROOT, SuffixAutomaton
from saguaro.draft.best_first import Nodes, Source, best_nodes
from saguaro.draft.drafter import Prepared
from saguaro.draft.growth import Shape
from saguaro.draft.match_chance import MatchChances, share_bin
from saguaro.draft.policy.kept import State
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal, Wanted
from saguaro.types import SUFFIX, Outcome

CHUNK = 512  # tokens indexed between two looks at the clock
AHEAD = 256  # new tokens of a text that are indexed when it is drafted for
RUNS = 3  # runs asked for candidates after a text, longest first
CANDIDATES = 4  # per run
WIDE = 256  # a run with more different followers is not asked: it says little
END = -1  # between two outputs of the store; no token

Run = tuple[SuffixAutomaton, int, int]  # a run that occurred before: where, its state, its length
Runs = tuple[Run, ...]  # the longest first

now = time.perf_counter


@dataclass
class _Index:
    """What is known of a row's text."""

    row: DraftRow
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    elsewhere: list[Run] = field(default_factory=list)  # the longest runs at the end that occur in the store
    offered: list[tuple[int, int]] = field(default_factory=list)  # candidates for the next token, and their bins

    @property
    def n_left(self) -> int:
        """Tokens of the text that are not indexed."""
        return len(self.row.text) - len(self.own)

    def runs(self) -> Runs:
        """The runs at the end of what is indexed that occurred before, longest first."""
        found: list[Run] = []
        state = self.own.repeated
        while state != ROOT and len(found) < RUNS:
            found.append((self.own, state, self.own.length[state]))
            state = self.own.link[state]
        found += [run for run in self.elsewhere if run[2] > 0]
        found.sort(key=itemgetter(2), reverse=True)
        return tuple(found[:RUNS])


class Store:
    """The latest outputs of all rows, at least half of `most` tokens of them and never more than `most`."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self.parts = [SuffixAutomaton()]  # the earlier and the later half, of which the earlier one is dropped

    def add(self, output: Sequence[int]) -> None:
        """Add an output, or its last tokens if it is longer than half of the store."""
        kept = output[-self._half + 1 :]
        if len(self.parts[-1]) + len(kept) + 1 > self._half:
            self.parts = [self.parts[-1], SuffixAutomaton()]
        for token in (*kept, END):
            self.parts[-1].append(token)


class Suffix:
    """Follows texts and proposes what followed earlier. A Drafter that prepares nothing, and a proposer of trees."""

    source, prepares, n_steps = SUFFIX, False, 0

    def __init__(self, shape: Shape, n_vocab: int, n_stored: int = 0) -> None:
        """n_stored: most tokens of earlier outputs that are kept; 0: none are."""
        self._shape, self._n_vocab = shape, n_vocab
        self._store = Store(n_stored) if n_stored else None
        self._indexes: dict[int, _Index] = {}  # by slot
        self.chances = MatchChances()

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows."""
        for row in rows:
            self._indexes[row.slot] = _Index(row)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows; their outputs go into the store. Unknown slots are ignored."""
        for slot in slots:
            index = self._indexes.pop(slot, None)
            if index is not None and self._store is not None and index.row.request.output:
                self._store.add(index.row.request.output)

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Nothing is computed ahead."""

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """All rows: nothing was prepared."""
        return list(wanted)

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Index texts that are far behind, until done or late, or for about so many seconds."""
        began, is_any = now(), False
        for row in rows:
            index = self._indexes.get(row.slot)
            while index is not None and index.n_left > AHEAD:
                self._index(index, CHUNK)
                is_any = True
                if is_late() or now() - began >= seconds:
                    return True
        return is_any

    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """Nothing is prepared: a look-up takes next to no time."""
        return None

    def warm(self, size: int) -> None:
        """Ignored."""

    def state(self) -> State:
        """See Drafter."""
        return {"matches": self.chances.state()}

    def restore(self, state: State) -> None:
        """See Drafter."""
        self.chances.restore(state["matches"])

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """The likeliest nodes after each text, at most `lookahead`, best first; empty if nothing is repeated."""
        shape = self._shape.at(len(rows), lookahead)
        found = [self.nodes(row, shape, lookahead) for row in rows]
        return Proposal(
            [nodes.tokens for nodes in found],
            parents=() if shape.is_chain else [nodes.parents for nodes in found],
            chances=[nodes.chances for nodes in found],
        )

    def nodes(self, row: DraftRow, shape: Shape, room: int, drafted: Nodes | None = None) -> Nodes:
        """The likeliest nodes after a text, together with those that a model drafted."""
        index = self._indexes.get(row.slot)
        runs: Runs = ()
        if index is not None and index.n_left <= AHEAD:
            self._index(index, index.n_left)
            runs = index.runs()
        is_greedy = row.request.params.temperature == 0
        source: Source[Runs] = Source(lambda runs: self._rated(runs, is_greedy), _after)
        most, depth = min(shape.nodes, room), min(shape.lookahead, room)
        return best_nodes(source, runs, most, depth, is_chain=shape.is_chain, drafted=drafted)

    def _rated(self, runs: Runs, is_greedy: bool) -> list[tuple[int, float]]:
        return [(token, self.chances.rate(at)) for token, at in self._candidates(runs, is_greedy)]

    def _candidates(self, runs: Runs, is_greedy: bool) -> list[tuple[int, int]]:
        """Tokens that followed these runs, each with the bin of the longest run that it followed."""
        found: dict[int, int] = {}
        for rank, (automaton, state, length) in enumerate(runs):
            if automaton.n_followers(state) > WIDE:
                continue
            after = list(automaton.followers(state))
            times = sum(count for _, count, _ in after)
            first = self.chances.first_bin(length, times, rank, is_greedy)
            if len(after) > CANDIDATES:
                after = nlargest(CANDIDATES, after, key=itemgetter(1))
            for token, count, _ in after:
                if token not in found and 0 <= token < self._n_vocab:
                    found[token] = first + share_bin(count / times)
        return list(found.items())

    def _index(self, index: _Index, most: int) -> None:
        """Index the next tokens of a text, and learn from those of the output."""
        own, request = index.own, index.row.request
        is_greedy, parts = request.params.temperature == 0, self._store.parts if self._store is not None else []
        kept = {id(run[0]): run for run in index.elsewhere}
        index.elsewhere = [kept.get(id(part), (part, ROOT, 0)) for part in parts]
        for token in request.tokens[len(own) : len(own) + most]:
            for candidate, at in index.offered:
                self.chances.learn(at, candidate == token)
            own.append(token)
            index.elsewhere = [(part, *part.follow(state, length, token)) for part, state, length in index.elsewhere]
            is_output = len(own) >= len(request.prompt)
            index.offered = self._candidates(index.runs(), is_greedy) if is_output else []


def _after(runs: Runs, token: int) -> Runs:
    """These runs and a token after them, as far as it followed them."""
    longer = ((automaton, automaton.step(state, token), length + 1) for automaton, state, length in runs)
    return tuple(run for run in longer if run[1] >= 0)

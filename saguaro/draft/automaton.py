"""A suffix automaton: every run of tokens that occurs in a text, with what followed it and how often.

It grows by one token at a time, in constant time on average, and has at most two states per token. A state holds runs
that end at the same places of the text; runs of one state differ in length only. The link of a state leads to the
longest shorter run that also ends elsewhere. So the link of the whole text is the longest run at its end that occurred
before:

    text     a b c a b        whole text ── link ──> "a b" ── link ──> root (the empty run)
                                                       └── c ──> "a b c"

Memory: five numbers of four bytes per state, and a dictionary for each state with more than one follower.
"""

from array import array
from collections.abc import Iterator

ROOT = 0
NO_STATE = -1
NO_TOKEN = -(2**31)
COUNTED = 32  # longest runs at an end whose counts grow with a token, so that a periodic text takes no longer


class SuffixAutomaton:
    """The runs of one text."""

    def __init__(self) -> None:
        self.length = array("i", [0])  # of the longest run of a state
        self.link = array("i", [NO_STATE])
        self.count = array("i", [0])  # places where the runs of a state end
        self._token, self._next = array("i", [NO_TOKEN]), array("i", [NO_STATE])  # the first follower
        self._others: dict[int, dict[int, int]] = {}  # further followers, of states that have any
        self.whole = ROOT  # the state of the whole text

    def __len__(self) -> int:
        """The number of tokens."""
        return self.length[self.whole]

    def append(self, token: int) -> None:
        """Add a token at the end of the text.

        >>> automaton = SuffixAutomaton()
        >>> for token in (5, 6, 7, 5, 6, 8, 5, 6, 7, 5, 6):
        ...     automaton.append(token)
        >>> state = automaton.repeated
        >>> automaton.length[state], [(token, count) for token, count, _ in automaton.followers(state)]
        (5, [(8, 1)])
        >>> state = automaton.link[state]
        >>> automaton.length[state], [(token, count) for token, count, _ in automaton.followers(state)]
        (2, [(7, 2), (8, 1)])
        """
        link, at = self.link, self.whole
        new = self._add(self.length[at] + 1, ROOT, 0)
        while at >= 0 and self._set_new(at, token, new):
            at = link[at]
        if at >= 0:
            link[new] = self._exactly(at, token)
        self.whole = new
        self._count(new)

    @property
    def repeated(self) -> int:
        """The state of the longest run at the text's end that occurred before; the root: none."""
        return max(self.link[self.whole], ROOT)

    def step(self, state: int, token: int) -> int:
        """The state of a run and this token after it; NO_STATE: it never followed."""
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return NO_STATE if others is None else others.get(token, NO_STATE)

    def n_followers(self, state: int) -> int:
        """How many different tokens followed."""
        return (self._token[state] != NO_TOKEN) + len(self._others.get(state, ()))

    def followers(self, state: int) -> Iterator[tuple[int, int, int]]:
        """The tokens that followed a run: token, how often, and the state of the run with it."""
        if self._token[state] != NO_TOKEN:
            yield self._token[state], self.count[self._next[state]], self._next[state]
        for token, after in self._others.get(state, {}).items():
            yield token, self.count[after], after

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest run at the end of another text that occurs here, after that text grew by a token: its state and
        length, given those before."""
        while True:
            while length <= self.length[self.link[state]] and state != ROOT:  # the state was split since
                state = self.link[state]
            after = self.step(state, token)
            if after >= 0:
                return after, length + 1
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            length = self.length[state]

    def _add(self, length: int, link: int, count: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self._token.append(NO_TOKEN)
        self._next.append(NO_STATE)
        return len(self.length) - 1

    def _set_new(self, state: int, token: int, after: int) -> bool:
        """Add a follower; False if this token followed before."""
        if self._token[state] == NO_TOKEN:
            self._token[state], self._next[state] = token, after
            return True
        if self._token[state] == token:
            return False
        return self._others.setdefault(state, {}).setdefault(token, after) == after

    def _exactly(self, state: int, token: int) -> int:
        """The state of the longest run of `state` and this token after it; split off if its state has longer runs."""
        after, length = self.step(state, token), self.length[state] + 1
        if self.length[after] == length:
            return after
        split = self._add(length, self.link[after], self.count[after])
        self._token[split], self._next[split] = self._token[after], self._next[after]
        if after in self._others:
            self._others[split] = dict(self._others[after])
        while state >= 0 and self.step(state, token) == after:
            if self._token[state] == token:
                self._next[state] = split
            else:
                self._others[state][token] = split
            state = self.link[state]
        self.link[after] = split
        return split

    def _count(self, state: int) -> None:
        """The longest runs at the end occurred once more."""
        for _ in range(COUNTED):
            if state <= ROOT:
                return
            self.count[state] += 1
            state = self.link[state]

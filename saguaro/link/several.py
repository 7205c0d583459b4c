"""Several draft services for one target: rows are shared out among them.

Invariant: a row belongs to one draft, so no two drafts grow the same nodes. If a draft comes or goes, all rows are
shared out anew in the next round. In the round in which one is late or lost, only its own rows have no speculation.

    target --- rows 0, 2, 4 ... --- draft
           \\-- rows 1, 3, 5 ... --- draft
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from saguaro.link.apart import Apart
from saguaro.types import DraftTimes, Interval, Joined, Outcome, Speculation


class Several:
    """Links to several drafts as one. Not thread-safe."""

    def __init__(self, links: Sequence[Apart]) -> None:
        self.links = links
        self.was_asked = False  # any of them, in the last round
        self._usable: set[int] = set()  # drafts that rows are shared out among
        self._owners: dict[int, int] = {}  # by slot: the draft

    @property
    def n_starts(self) -> int:
        """Times a draft was reached or tried, beyond the first of each."""
        return 1 + sum(max(0, link.n_starts - 1) for link in self.links)

    @property
    def n_deaths(self) -> int:
        """Drafts lost."""
        return sum(link.n_deaths for link in self.links)

    @property
    def n_late(self) -> int:
        """Replies that came too late."""
        return sum(link.n_late for link in self.links)

    @property
    def n_ready(self) -> int:
        """Times a draft was ready."""
        return sum(link.n_ready for link in self.links)

    def rest(self) -> None:
        """Ask nothing until wake(). The drafts lose their rows."""
        for link in self.links:
            link.rest()

    def wake(self) -> None:
        """Ask again, once all rows are introduced."""
        for link in self.links:
            link.wake()

    def wait_ready(self, seconds: float) -> None:
        """Wait until all drafts are ready. Raises DraftError if one fails or takes longer."""
        for link in self.links:
            link.wait_ready(seconds)

    def is_fresh(self) -> bool:
        """Whether rows must be shared out anew: a draft has come, or one has gone and another is left."""
        fresh = {at for at, link in enumerate(self.links) if link.is_fresh()}
        usable = {at for at, link in enumerate(self.links) if link.is_in_step}
        is_changed = bool(fresh) or (usable != self._usable and bool(usable))
        if is_changed:
            for link in self.links:  # or a draft would keep rows that another has from now on
                link.retire(list(self._owners))
            self._usable, self._owners = usable, {}
        return is_changed

    def admit(self, rows: Sequence[Joined]) -> None:
        """Give each row to the draft that has the fewest."""
        n_rows = {at: sum(owner == at for owner in self._owners.values()) for at in sorted(self._usable)}
        for row in rows:
            if n_rows:
                self._owners[row.slot] = owner = min(n_rows, key=n_rows.__getitem__)
                n_rows[owner] += 1
        for at, link in enumerate(self.links):
            link.admit([row for row in rows if self._owners.get(row.slot) == at])

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows, whichever draft has them."""
        for link in self.links:
            link.retire(slots)
        for slot in slots:
            self._owners.pop(slot, None)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Ask all drafts at once, each for its rows."""
        places: list[list[int]] = []
        self.was_asked = False
        for at, link in enumerate(self.links):
            own = [place for place, slot in enumerate(slots) if self._owners.get(slot) == at]
            others = [slot for slot in outcome.slots.tolist() if self._owners.get(slot) != at]
            told = outcome.without(others)
            if own or len(told.slots):
                link.ask(told, [slots[place] for place in own], [room[place] for place in own])
                self.was_asked |= link.was_asked
            places.append(own)
        found = [(link.collect(), own) for link, own in zip(self.links, places, strict=True)]
        return merged([(spec, own) for spec, own in found if spec is not None], len(slots))

    def overlap(self) -> None:
        """Nothing to do: drafts prepare after their replies."""

    def close(self) -> None:
        """Close all links."""
        for link in self.links:
            link.close()


def merged(parts: Sequence[tuple[Speculation, Sequence[int]]], n_rows: int) -> Speculation:
    """One speculation of several, each with the places of its rows.

    >>> one, two = Speculation.of([[7], [8]], 1, [2, 2]), Speculation.of([[4, 5]], 2, [1])
    >>> both = merged([(one, [0, 2]), (two, [1])], 4)
    >>> both.tokens.tolist(), both.length.tolist(), both.source.tolist()
    ([[7, 0], [4, 5], [8, 0], [0, 0]], [1, 2, 1, 0], [2, 1, 2, 0])
    """
    parts = [(spec, own) for spec, own in parts if len(own)]
    if not parts:
        return Speculation.empty(n_rows)
    n_nodes = max(spec.tokens.shape[1] for spec, _ in parts)
    length, source = torch.zeros(n_rows, dtype=torch.int64), torch.zeros(n_rows, dtype=torch.int64)
    tokens = torch.zeros(n_rows, n_nodes, dtype=torch.int64)
    parent = torch.arange(-1, n_nodes - 1).repeat(n_rows, 1)
    laws = [spec.q for spec, _ in parts if spec.q is not None]
    q: Tensor | None = None
    if laws:
        q = laws[0].new_zeros(n_rows, max(each.shape[1] for each in laws), laws[0].shape[2])
    for spec, own in parts:
        at, n = torch.tensor(own), spec.tokens.shape[1]
        length[at], source[at], tokens[at, :n] = spec.length, spec.source, spec.tokens
        if spec.parent is not None:
            parent[at, :n] = spec.parent
        if q is not None and spec.q is not None:
            q[at, : spec.q.shape[1]] = spec.q
    is_tree = any(spec.parent is not None for spec, _ in parts)
    times = [spec.times for spec, _ in parts if spec.times is not None]
    return Speculation(tokens, length, source, q, _together(times) if times else None, parent if is_tree else None)


def _together(times: Sequence[DraftTimes]) -> DraftTimes:
    """From the first beginning to the last end."""

    def hull(each: Sequence[Interval]) -> Interval:
        return min(began for began, _ in each), max(ended for _, ended in each)

    is_prepared = any(each.is_prepared for each in times)
    return DraftTimes(hull([each.respond for each in times]), hull([each.prepare for each in times]), is_prepared)

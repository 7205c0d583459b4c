"""Statistics of an engine's rounds, and a file of rounds. Both are observers: `engine.round.observers.append(...)`.

Definitions. A row-round is one request in one round that gave it tokens.

    tokens per round    tokens / row-rounds; the round that reads the end of a prompt is one, with nothing speculated
    acceptance          speculated tokens accepted / verified
    ... by position     P(token i accepted | it was verified and all before it were accepted); of a tree: of its level
    nodes by depth      speculated tokens verified, and accepted, by depth: 1 is the first token after the text
    nodes by rank       the same by rank among siblings, in the order of the speculation; 1 is the first, and the only
                        rank of a chain, which is a tree with one child per node
    nodes per token     speculated tokens verified / tokens
    hit rate            row-rounds whose speculation came from the cache / eligible row-rounds: those with room for a
                        speculation, of a request that had a round before (so that its outcome could be prepared),
                        in rounds with preparation, for requests that allow preparation
    prepared            rounds with preparation / rounds with a draft
    after primary       hit rate if the request's previous speculation was a hit; after backup: if it was a miss
    by k                hit rate by the number of tokens accepted in the previous outcome
    hidden              the draft's working time (preparing, responding) while the target was verifying
    exposed             the rest of the draft's working time
    round               wait for the draft + verify + overlap (drafting in the target's own thread) + rest: the time
                        between two rounds that have a request in common; if a device verifies, verify is its time,
                        overlap is part of that, and rest is everything else: the host's time

Invariant: memory does not grow with the number of rounds or requests.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from saguaro.algo.tree import paths, ranks
from saguaro.errors import ConfigError
from saguaro.types import SOURCES, Interval, RoundEvent, RowEvent

MAX_REQUESTS = 4096  # whose last outcome is kept; the least recently seen are dropped first
MAX_VERIFYING = 16  # intervals in which the target verified: those of the last 8 rounds
MAX_DEPTH, MAX_RANK = 64, 8  # counted one by one; what is above is counted together
MORE = "more"  # the name of what is above


@dataclass
class Rate:
    """How often an event happened, out of all cases."""

    n: int = 0
    of: int = 0

    def count(self, happened: bool) -> None:
        """Count one case."""
        self.n += happened
        self.of += 1

    @property
    def value(self) -> float | None:
        """The rate; None without cases."""
        return self.n / self.of if self.of else None


class NumberedRates:
    """Rates of things numbered from 1; those above the limit are counted together, as the last rate.

    >>> rates = NumberedRates(2)
    >>> rates.count([1, 7, 8], happened=[1, 8])
    >>> rates.named()
    {'1': Rate(n=1, of=1), '2': Rate(n=0, of=0), 'more': Rate(n=1, of=2)}
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: list[int] = []  # by number, from 1 up to the largest so far; the one after the limit is for all above
        self._n: list[int] = []

    def count(self, cases: Sequence[int], happened: Sequence[int]) -> None:
        """Count cases of the things with these numbers; `happened` are those of them that did."""
        if max(cases) > self._limit + 1:
            cases, happened = ([min(number, self._limit + 1) for number in each] for each in (cases, happened))
        more = [0] * (max(cases) - len(self._of))
        self._of += more
        self._n += more
        for number in cases:
            self._of[number - 1] += 1
        for number in happened:
            self._n[number - 1] += 1

    def named(self) -> dict[str, Rate]:
        """The rates by number, up to the largest one counted."""
        rates = [Rate(n, of) for n, of in zip(self._n, self._of, strict=False)]
        return {str(at + 1) if at < self._limit else MORE: rate for at, rate in enumerate(rates)}


class Summary:
    """Statistics of all rounds so far. All times are in seconds."""

    def __init__(self) -> None:
        self.n_rounds = self.n_row_rounds = self.n_tokens = 0
        self.is_drafted = False  # whether there is a draft
        self.accepted = Rate()  # speculated tokens
        self.by_position: list[Rate] = []
        self.by_depth, self.by_rank = NumberedRates(MAX_DEPTH), NumberedRates(MAX_RANK)  # speculated tokens
        self.asked, self.prepared = Rate(), Rate()  # rounds
        self.hits, self.hits_after_primary, self.hits_after_backup = Rate(), Rate(), Rate()
        self.hits_by_k: dict[int, Rate] = {}
        self.by_source = dict.fromkeys(SOURCES, 0)  # row-rounds
        self.busy_s = self.hidden_s = 0.0  # of the draft
        self.wait_s = self.verify_s = self.overlap_s = self.rest_s = 0.0
        self._before: OrderedDict[str, RowEvent] = OrderedDict()  # the previous row-round of each request
        self._verifying: deque[Interval] = deque(maxlen=MAX_VERIFYING)
        self._counted_until = float("-inf")  # draft time before this is already counted
        self._ended, self._together = 0.0, frozenset[str]()  # the last round: its end and its requests

    def add(self, event: RoundEvent) -> None:
        """Count a round."""
        self.n_rounds += 1
        self.asked.count(event.is_asked)
        for row in event.rows:
            self._add_row(row, event.is_asked and (event.draft is None or event.draft.is_prepared))
        self._add_times(event)
        if event.draft is not None:
            self.is_drafted = True
            self.prepared.count(event.draft.is_prepared)
            self._add_draft(event.draft.prepare)
            self._add_draft(event.draft.respond)

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens per row-round."""
        return self.n_tokens / self.n_row_rounds if self.n_row_rounds else None

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the verified tokens; None without speculation."""
        return self.accepted.value

    @property
    def nodes_per_token(self) -> float | None:
        """Speculated tokens verified per token; None without speculation."""
        return self.accepted.of / self.n_tokens if self.accepted.of and self.n_tokens else None

    @property
    def hit_rate(self) -> float | None:
        """Hits per eligible row-round; None without a draft or preparation."""
        return self.hits.value if self.is_drafted else None

    @property
    def exposed_s(self) -> float:
        """The draft's working time while the target did not verify."""
        return self.busy_s - self.hidden_s

    @property
    def hidden_share(self) -> float | None:
        """Hidden share of the draft's working time; None if it did not work."""
        return self.hidden_s / self.busy_s if self.busy_s else None

    def as_dict(self) -> dict[str, Any]:
        """All statistics, for JSON. Values without cases are null; times are milliseconds per round."""
        per_round = 1e3 / max(self.n_rounds, 1)
        return {
            "rounds": self.n_rounds,
            "row_rounds": self.n_row_rounds,
            "tokens": self.n_tokens,
            "tokens_per_round": self.tokens_per_round,
            "speculated": self.accepted.of,
            "accepted": self.accepted.n,
            "acceptance": self.acceptance,
            "acceptance_by_position": [rate.value for rate in self.by_position],
            "nodes_per_token": self.nodes_per_token,
            "nodes_by_depth": _counts(self.by_depth),
            "nodes_by_rank": _counts(self.by_rank),
            "asked": self.asked.value if self.is_drafted else None,
            "prepared": self.prepared.value,
            "hit_rate": self.hit_rate,
            "hit_rate_after_primary": self.hits_after_primary.value if self.is_drafted else None,
            "hit_rate_after_backup": self.hits_after_backup.value if self.is_drafted else None,
            "hit_rate_by_k": {str(k): self.hits_by_k[k].value for k in sorted(self.hits_by_k) if self.is_drafted},
            "sources": {name: n / self.n_row_rounds for name, n in self.by_source.items() if n},
            "hidden_share": self.hidden_share,
            "draft_ms": {"hidden": self.hidden_s * per_round, "exposed": self.exposed_s * per_round},
            "round_ms": {
                "wait": self.wait_s * per_round,
                "verify": self.verify_s * per_round,
                "overlap": self.overlap_s * per_round,
                "rest": self.rest_s * per_round,
            },
        }

    def __str__(self) -> str:
        """Two to five lines for a terminal."""
        facts = self.as_dict()
        lines = [
            f"{self.n_rounds} rounds, {self.n_tokens} tokens, {_number(self.tokens_per_round)} per round and request"
        ]
        if self.is_drafted:
            lines[0] += (
                f"; acceptance {_number(self.acceptance)}, by position {_numbers(facts['acceptance_by_position'])}"
            )
            if self.accepted.of:
                lines.append(
                    f"{_number(self.nodes_per_token)} nodes verified per token; accepted by depth "
                    f"{_listed(self.by_depth)}, by rank among siblings {_listed(self.by_rank)}"
                )
            is_always = self.asked.n == self.asked.of
            asked = "" if is_always else f"asked the draft in {_number(self.asked.value)} of the rounds; "
            lines.append(
                f"{asked}prepared {_number(self.prepared.value)} of the rounds{'' if is_always else ' that asked'}; "
                f"hit rate {_number(self.hit_rate)}: "
                f"{_number(facts['hit_rate_after_primary'])} after a hit, "
                f"{_number(facts['hit_rate_after_backup'])} after a miss; by outcome before "
                f"{_named(facts['hit_rate_by_k'], 'k=')}; speculations from {_named(facts['sources'])}"
            )
        if self.busy_s:
            draft = facts["draft_ms"]
            lines.append(
                f"draft {draft['hidden'] + draft['exposed']:.1f} ms a round, {_number(self.hidden_share)} of it hidden "
                f"behind verification"
            )
        parts = facts["round_ms"]
        split = " + ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
        lines.append(f"round {sum(parts.values()):.1f} ms = {split}")
        return "\n".join(lines)

    def _add_row(self, row: RowEvent, is_prepared: bool) -> None:
        self.n_row_rounds += 1
        self.n_tokens += row.n_tokens
        self.by_source[row.source] += 1
        self.accepted.n += row.k
        self.accepted.of += row.length
        if row.length:
            self._add_nodes(row)
        before = self._before.pop(row.request, None)
        if before is not None and row.room > 0 and is_prepared and row.prepares:
            after = self.hits_after_primary if _is_hit(before) else self.hits_after_backup
            for rate in (self.hits, after, self.hits_by_k.setdefault(before.k, Rate())):
                rate.count(_is_hit(row))
        if row.n_tokens > row.k:  # otherwise the request has ended, and its id may be reused
            self._before[row.request] = row
        if len(self._before) > MAX_REQUESTS:
            self._before.popitem(last=False)

    def _add_nodes(self, row: RowEvent) -> None:
        parents = row.parents or range(-1, row.length - 1)
        path = row.path if row.parents else range(row.k)
        depths, order = _levels(parents)
        self.by_depth.count(depths, [depths[node] for node in path])
        self.by_rank.count(order, [order[node] for node in path])
        deepest = max(depths)
        while len(self.by_position) < deepest:
            self.by_position.append(Rate())
        for position in range(min(row.k + 1, deepest)):
            self.by_position[position].count(position < row.k)

    def _add_times(self, event: RoundEvent) -> None:
        self.wait_s += _length(event.speculate)
        if event.verify is None:
            self.verify_s += _length(event.launch) + _length(event.collect)
            self.overlap_s += _length(event.overlap)
        else:
            self.verify_s += _length(event.verify)
            self.rest_s += max(0.0, event.collect[1] - event.launch[0] - _length(event.verify))
        requests = frozenset(row.request for row in event.rows)
        if requests & self._together:  # otherwise the engine was idle in between
            self.rest_s += max(0.0, event.speculate[0] - self._ended)
        self._ended, self._together = event.collect[1], requests
        self._verifying += (event.launch, event.collect) if event.verify is None else (event.verify,)

    def _add_draft(self, interval: Interval) -> None:
        """Count working time once: a draft that prepared nothing new reports the same interval again."""
        start, end = max(interval[0], self._counted_until), interval[1]
        if end > start:
            self.busy_s += end - start
            self.hidden_s += min(end - start, sum(_common((start, end), other) for other in self._verifying))
            self._counted_until = end


class Recorder:
    """Writes one JSON object per round: the fields of RoundEvent. An observer, and a context that closes the file.

    A full disk does not interrupt rounds: errors of the file are raised when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._file = OutputFile(path)

    def __call__(self, event: RoundEvent) -> None:
        """Write a round."""
        self._file.write(json.dumps(asdict(event)) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputFile:
    """A text file that is opened immediately. Write errors are raised on close."""

    def __init__(self, path: Path, keep: bool = False) -> None:
        self._path = path
        self._error: OSError | None = None
        try:
            self._file = path.open("a" if keep else "w", encoding="utf-8")
        except OSError as e:
            raise self._explained(e) from e

    def write(self, text: str) -> None:
        """Write, unless an earlier write failed."""
        if self._error is None:
            try:
                self._file.write(text)
            except OSError as e:
                self._error = e

    def close(self) -> None:
        """Close the file. Raises the first error since it was opened."""
        try:
            self._file.close()
        except OSError as e:
            self._error = self._error or e
        if self._error is not None:
            raise self._explained(self._error) from self._error

    def _explained(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write {self._path}: {error.strerror}; give a file in a folder with room for it")


@lru_cache(maxsize=256)  # chains and small trees recur; a batch has many rows
def _levels(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """The depth and the rank of each node."""
    return [len(path) for path in paths(parents)], ranks(parents)


def _is_hit(row: RowEvent) -> bool:
    return row.source == "cache"


def _length(interval: Interval) -> float:
    return interval[1] - interval[0]


def _common(one: Interval, other: Interval) -> float:
    """Length of the overlap of two intervals, in seconds.

    >>> _common((0.0, 2.0), (1.5, 3.0)), _common((0.0, 1.0), (1.0, 2.0))
    (0.5, 0.0)
    """
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _counts(rates: NumberedRates) -> dict[str, dict[str, int]]:
    return {name: {"verified": rate.of, "accepted": rate.n} for name, rate in rates.named().items()}


def _listed(rates: NumberedRates) -> str:
    return " ".join((f"{MORE} " if name == MORE else "") + _number(rate.value) for name, rate in rates.named().items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _numbers(values: Iterable[float | None]) -> str:
    return " ".join(map(_number, values))


def _named(values: Mapping[str, float | None], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{name} {_number(value)}" for name, value in values.items())

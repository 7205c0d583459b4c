"""The data types of a round, with their shapes.

B rows (sequences) in a batch, K lookahead, N tokens per row of a speculation (at most K), V vocabulary size.
A row is identified by its slot: a small number that a request keeps from admission until it leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from saguaro.config import SamplingParams

FinishReason = str  # "stop", "length", "abort" or "error"
Interval = tuple[float, float]  # seconds of time.perf_counter(), which all processes of a machine share; half-open

SOURCES = ("empty", "cache", "draft", "ngram", "random", "script", "suffix")  # the origin of a row's speculation
EMPTY, CACHE, DRAFT, NGRAM, RANDOM, SCRIPT, SUFFIX = range(len(SOURCES))


@dataclass(frozen=True)
class DraftTimes:
    """When the draft worked: on this reply, and before it on the preparation for this round."""

    respond: Interval
    prepare: Interval
    is_prepared: bool = True  # False if nothing was prepared


@dataclass(frozen=True)
class Speculation:
    """What the draft proposes for a batch: row b proposes a tree (algo/tree.py) of nodes tokens[b, :length[b]]."""

    tokens: Tensor  # [B, N] int64; padded with 0
    length: Tensor  # [B] int64, 0 <= length <= N
    source: Tensor  # [B] int64: index into SOURCES
    q: Tensor | None = None  # [B, F, V] what each family (algo/tree.py) was drawn from; zero, or None: it was not drawn
    times: DraftTimes | None = None
    parent: Tensor | None = None  # [B, N] int64: of each node, -1 for the root; None: chains

    @property
    def hit(self) -> Tensor:  # [B] bool
        """True for rows that came from the speculation cache."""
        return self.source == CACHE

    @staticmethod
    def empty(n_rows: int) -> "Speculation":
        """The speculation of autoregressive decoding."""
        none = torch.zeros(n_rows, dtype=torch.int64)
        return Speculation(torch.zeros(n_rows, 0, dtype=torch.int64), none, none)

    @staticmethod
    def of(
        proposed: Sequence[Sequence[int]],
        lookahead: int,
        sources: Sequence[int],
        parents: Sequence[Sequence[int] | None] = (),
    ) -> "Speculation":
        """Proposals of any length up to the lookahead, with the parents of trees; one without tokens has no source.

        >>> spec = Speculation.of([[7], []], lookahead=2, sources=[NGRAM, NGRAM])
        >>> spec.length.tolist(), [SOURCES[source] for source in spec.source]
        ([1, 0], ['ngram', 'empty'])
        """
        padded = [[*tokens, *[0] * (lookahead - len(tokens))] for tokens in proposed]
        length = torch.tensor([len(tokens) for tokens in proposed], dtype=torch.int64)
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(proposed), lookahead)
        source = [at if tokens else EMPTY for tokens, at in zip(proposed, sources, strict=True)]
        parent = None
        if any(parents):
            parent = torch.arange(-1, lookahead - 1).repeat(len(proposed), 1)
            for row, nodes in enumerate(parents):
                if nodes is not None:
                    parent[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
        return Speculation(tokens, length, torch.tensor(source, dtype=torch.int64), parent=parent)

    def parents(self) -> list[list[int] | None]:  # [B]
        """The parents of each row's nodes; None for a chain."""
        if self.parent is None:
            return [None] * len(self.length)
        return [nodes[:n] for nodes, n in zip(self.parent.tolist(), self.length.tolist(), strict=True)]

    def clip(self, limit: Tensor) -> "Speculation":  # limit: [B] int64
        """Limit the length of each row."""
        if bool((self.length <= limit).all()):
            return self
        length = self.length.minimum(limit)
        return replace(self, length=length, source=torch.where(length > 0, self.source, EMPTY))


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token's log-probability and the most likely alternatives, under the unmodified distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first
    rank: int | None = None  # only for prompt tokens: the rank among all tokens, from 1


@dataclass(frozen=True)
class Features:
    """Hidden states of the target, for a draft that reads them: of consecutive tokens of some rows' texts, row by row.

    A token's feature is the residual stream that enters some of the target's layers, one after the other.
    """

    slots: Tensor  # [R] int64
    start: Tensor  # [R] int64: position in the text of the first token
    length: Tensor  # [R] int64: number of tokens
    values: Tensor  # [T, F] float32 or bfloat16, T the sum of the lengths

    def without(self, slots: Sequence[int]) -> "Features":
        """Drop these rows.

        >>> two = Features(torch.tensor([3, 5]), torch.tensor([0, 9]), torch.tensor([2, 1]), torch.ones(3, 4))
        >>> [(slot, start, tuple(values.shape)) for slot, start, values in two.without([3]).rows()]
        [(5, 9, (1, 4))]
        """
        keep = ~torch.isin(self.slots, torch.tensor(slots, dtype=torch.int64))
        values = self.values[keep.repeat_interleave(self.length)]
        return Features(self.slots[keep], self.start[keep], self.length[keep], values)

    def rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Slot, position of the first token, and values [n, F] of each row."""
        each = self.values.split(self.length.tolist())
        return zip(self.slots.tolist(), self.start.tolist(), each, strict=True)


@dataclass(frozen=True)
class Outcome:
    """The result of verification: row b accepted n_accepted[b] tokens; bonus[b] is the target's next token."""

    slots: Tensor  # [B] int64: the rows that got a token in this round
    length: Tensor  # [B] int64: number of speculated tokens verified
    n_accepted: Tensor  # [B] int64, 0..length
    bonus: Tensor  # [B] int64; BROKEN (saguaro.algo.verification): none, the target's logits are not finite
    path: Tensor | None = None  # [B, N] int64: the accepted nodes from the root down; None: of chains, the first nodes
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row, for the accepted tokens and the bonus; or empty
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row of the batch, those wanted; or empty
    features: Features | None = None  # of what the round computed of texts; None: no draft reads them

    def without(self, slots: Sequence[int]) -> "Outcome":
        """Drop rows that left: they need no speculation, and their slots may be reused.

        >>> two = Outcome(torch.tensor([3, 5]), torch.tensor([2, 2]), torch.tensor([1, 2]), torch.tensor([7, 8]))
        >>> two.without([3]).bonus
        tensor([8])
        """
        if not slots:
            return self
        keep = ~torch.isin(self.slots, torch.tensor(slots, dtype=torch.int64))
        path = None if self.path is None else self.path[keep]
        features = None if self.features is None else self.features.without(slots)
        kept = (self.slots[keep], self.length[keep], self.n_accepted[keep], self.bonus[keep])
        return Outcome(*kept, path, features=features)

    def accepted(self) -> list[list[int]]:  # [B][n_accepted]
        """The accepted nodes of each row, from the root down."""
        if self.path is None:
            return [list(range(n)) for n in self.n_accepted.tolist()]
        return [nodes[:n] for nodes, n in zip(self.path.tolist(), self.n_accepted.tolist(), strict=True)]

    @staticmethod
    def nothing() -> "Outcome":
        """The outcome before the first round."""
        none = torch.zeros(0, dtype=torch.int64)
        return Outcome(none, none, none, none)


@dataclass(frozen=True)
class Joined:
    """A row that is introduced to the draft: its slot, text and decoding parameters.

    The draft uses the target's parameters and noise, so its tokens agree more often. They do not change the output.
    """

    slot: int
    tokens: Sequence[int]
    n_prompt: int = 0  # the first n_prompt tokens are the prompt; penalties treat it and the output differently
    seed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)


class DraftLink(Protocol):
    """The source of speculations. It never fails a request: if it has no proposal, the speculation is empty."""

    def is_fresh(self) -> bool:
        """Return True, once, if the draft has lost its rows and all rows must be introduced again."""

    def admit(self, rows: Sequence[Joined]) -> None:
        """Add these rows with their text."""

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Apply the last outcome, then propose at most `room` tokens for each of these rows, in this order."""

    def overlap(self) -> None:
        """Prepare the next speculations while the target verifies."""

    def close(self) -> None:
        """Release all resources."""


@dataclass(frozen=True)
class RowEvent:
    """The result of a round for one request."""

    request: str
    length: int  # speculated tokens that were verified
    k: int  # accepted tokens
    source: str  # one of SOURCES
    n_tokens: int  # tokens emitted; fewer than k + 1 if the request ended
    room: int  # the largest number of tokens that could have been speculated
    drafted: tuple[int, ...] = ()  # the speculated tokens, accepted or not
    prepares: bool = True  # whether outcomes may be prepared for it
    parents: tuple[int, ...] = ()  # of the speculated tokens, if they were a tree; empty: a chain
    path: tuple[int, ...] = ()  # the accepted nodes of a tree, from the root down


@dataclass(frozen=True)
class RoundEvent:
    """One round: the result per row, and when the target and the draft worked.

    speculate |------| launch |--------------| overlap |---| collect |----|      the target side, in this order
              waiting         verifying (CPU)  drafting here  verifying (GPU)
    """

    number: int
    n_computed: int  # text and speculated tokens computed by the target
    rows: tuple[RowEvent, ...]
    speculate: Interval
    launch: Interval
    overlap: Interval
    collect: Interval
    draft: DraftTimes | None  # None without a draft
    verify: Interval | None = None  # device time from launch on; None on a CPU, where the host computes as drawn
    is_asked: bool = True  # False if asking a draft elsewhere does not pay, so that it was not


Observer = Callable[[RoundEvent], None]
Progress = Callable[[str, int, int], None]  # of a long operation: (label, done, total)

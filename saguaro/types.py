"""The nouns of a round, with their shapes.

B rows (sequences) in a batch, K lookahead, N nodes of a speculation (a chain has N = K), V vocabulary.
A row is named by its slot: a small number that a request keeps from admission until it leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from saguaro.config import SamplingParams

FinishReason = str  # "stop", "length", "abort" or "error"
Interval = tuple[float, float]  # seconds of time.perf_counter(), which all processes of one machine share; half-open

SOURCES = ("empty", "cache", "draft", "ngram", "random", "script")  # where a row's speculation came from
EMPTY, CACHE, DRAFT, NGRAM, RANDOM, SCRIPT = range(len(SOURCES))


@dataclass(frozen=True)
class DraftTimes:
    """When the draft worked: for this reply, and before it on what was prepared for this round."""

    respond: Interval
    prepare: Interval
    is_prepared: bool = True  # whether anything was; where it does not pay, nothing is


@dataclass(frozen=True)
class Speculation:
    """What the draft proposes for a batch: row b proposes tokens[b, :length[b]]."""

    tokens: Tensor  # [B, N] int64; beyond length: 0
    length: Tensor  # [B] int64, 0 <= length <= N
    source: Tensor  # [B] int64: index into SOURCES
    q: Tensor | None = None  # [B, N, V] what each token was drawn from; None: none was drawn, every q is one-hot
    times: DraftTimes | None = None

    @property
    def hit(self) -> Tensor:  # [B] bool
        """Which rows came from the speculation cache."""
        return self.source == CACHE

    @staticmethod
    def empty(n_rows: int) -> "Speculation":
        """The speculation of autoregressive decoding."""
        none = torch.zeros(n_rows, dtype=torch.int64)
        return Speculation(torch.zeros(n_rows, 0, dtype=torch.int64), none, none)

    @staticmethod
    def of(proposed: "Sequence[Sequence[int]]", lookahead: int, sources: "Sequence[int]") -> "Speculation":
        """Proposals of any length up to the lookahead; one without tokens has no source.

        >>> spec = Speculation.of([[7], []], lookahead=2, sources=[NGRAM, NGRAM])
        >>> spec.length.tolist(), [SOURCES[source] for source in spec.source]
        ([1, 0], ['ngram', 'empty'])
        """
        padded = [[*tokens, *[0] * (lookahead - len(tokens))] for tokens in proposed]
        length = torch.tensor([len(tokens) for tokens in proposed], dtype=torch.int64)
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(proposed), lookahead)
        source = [at if tokens else EMPTY for tokens, at in zip(proposed, sources, strict=True)]
        return Speculation(tokens, length, torch.tensor(source, dtype=torch.int64))

    def clip(self, limit: Tensor) -> "Speculation":  # limit: [B] int64
        """The same speculation, no row longer than its limit."""
        if bool((self.length <= limit).all()):
            return self
        length = self.length.minimum(limit)
        return replace(self, length=length, source=torch.where(length > 0, self.source, EMPTY))


@dataclass(frozen=True)
class TokenLogprobs:
    """One emitted token's log-probability and the likeliest alternatives, under the model's own distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first
    rank: int | None = None  # of a prompt's token among all tokens; the likeliest has 1


@dataclass(frozen=True)
class Outcome:
    """What verification decided: row b accepted n_accepted[b] tokens, then the target put bonus[b]."""

    slots: Tensor  # [B] int64: the rows that got a token this round
    length: Tensor  # [B] int64: how many speculated tokens were verified
    n_accepted: Tensor  # [B] int64, 0..length
    bonus: Tensor  # [B] int64; BROKEN (saguaro.algo.verification): none, the target's logits are not finite
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row, for the accepted tokens and the bonus; or empty
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row of the batch, those wanted; or empty

    def without(self, slots: Sequence[int]) -> "Outcome":
        """The same without some rows: one that left has no next speculation, and its slot may serve another.

        >>> two = Outcome(torch.tensor([3, 5]), torch.tensor([2, 2]), torch.tensor([1, 2]), torch.tensor([7, 8]))
        >>> two.without([3]).bonus
        tensor([8])
        """
        if not slots:
            return self
        keep = ~torch.isin(self.slots, torch.tensor(slots, dtype=torch.int64))
        return Outcome(self.slots[keep], self.length[keep], self.n_accepted[keep], self.bonus[keep])

    @staticmethod
    def nothing() -> "Outcome":
        """The outcome before the first round."""
        none = torch.zeros(0, dtype=torch.int64)
        return Outcome(none, none, none, none)


@dataclass(frozen=True)
class Joined:
    """A row the draft must know from now on: its slot, its text so far, and how it is decoded.

    Drafting with the target's parameters and noise is what makes a guess good; nothing here changes the output.
    """

    slot: int
    tokens: Sequence[int]
    n_prompt: int = 0  # of these tokens, from the prompt: penalties tell it from the output
    seed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)


class DraftLink(Protocol):
    """Where speculations come from. It never fails a request: what it cannot give is an empty speculation."""

    def is_fresh(self) -> bool:
        """Whether the draft knows no row since this was last asked, and every row must be introduced anew."""

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these rows and their text."""

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows; one that is not known is none to forget."""

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Take the last outcome to heart and propose for these rows, in this order, at most `room` tokens each."""

    def overlap(self) -> None:
        """Prepare the next speculations while the target verifies."""

    def close(self) -> None:
        """Give back whatever the link holds."""


@dataclass(frozen=True)
class RowEvent:
    """What a round did for one request."""

    request: str
    length: int  # tokens speculated and verified
    k: int  # of these, accepted
    source: str  # of SOURCES
    n_tokens: int  # that the request got; fewer than k + 1 where it ended
    room: int  # tokens that might have been speculated
    drafted: tuple[int, ...] = ()  # the speculated tokens, accepted or not
    prepares: bool = True  # whether outcomes may be prepared for it


@dataclass(frozen=True)
class RoundEvent:
    """One round: who got what, and when the target and the draft worked.

    speculate |------| launch |--------------| overlap |---| collect |----|      the target's side, in this order
              waiting         verifying (CPU)  drafting here  verifying (GPU)
    """

    number: int
    n_computed: int  # tokens of text and speculation the target computed
    rows: tuple[RowEvent, ...]
    speculate: Interval
    launch: Interval
    overlap: Interval
    collect: Interval
    draft: DraftTimes | None  # None where nobody drafts
    verify: Interval | None = None  # when a device computed, from launch on; None: the host itself did, as drawn above


Observer = Callable[[RoundEvent], None]
Progress = Callable[[str, int, int], None]  # of something that takes long: (what is happening, done, total)

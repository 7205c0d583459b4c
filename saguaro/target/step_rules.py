"""Which requests a captured step decides itself, and what their rows tell it of their rules.

    rule                                        how the step knows it
    temperature, top_k, top_p, min_p, seed      facts in the row's line
    repetition, presence, frequency penalty     facts; the text's counts in a table, whose changes are in the line
    logit_bias                                  a table, written when the request takes a seat
    grammar, allowed_token_ids, min_tokens      masks of the allowed tokens of each position, sent with the step
    logprobs                                    from the step's logits, after it

Masks depend on the text and the speculation, which are known before the step. Requests that `LEFT_TO_HOST` names are
decided on the host, and so are the rows beside them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from saguaro.attention.step import Segment
from saguaro.config import SamplingParams
from saguaro.device.graphs import float_bits
from saguaro.kernels.row_rules import BIASED, MASKED, MOST_BIASES, NOTHING, PENALISED, STRICT
from saguaro.runner.captured import Room
from saguaro.target.grammar import Mask
from saguaro.target.graphed import facts_of
from saguaro.target.request import Request
from saguaro.target.sampler import contexts, is_unadjusted

SEATED = PENALISED | BIASED
MOST_OUTPUT = 32_000  # counted tokens: counts are int16
EXTREME = 1e30  # penalties and biases within it keep finite logits finite


def is_penalised(params: SamplingParams) -> bool:
    """Whether tokens of the text are penalised."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_extreme(params: SamplingParams) -> bool:
    """Whether adjusted logits might not be finite."""
    furthest = max(map(abs, params.logit_bias.values()), default=0.0)
    return furthest > EXTREME or not 1 / EXTREME <= params.repetition_penalty <= EXTREME


def kinds_of(request: Request) -> int:
    """The rules by which a step adjusts the request's logits."""
    p = request.params
    kinds = PENALISED * is_penalised(p) | BIASED * bool(p.logit_bias)
    if request.grammar is not None:
        return kinds | MASKED  # if it leaves no token, all are allowed
    return kinds | (MASKED | STRICT) * (bool(p.allowed_token_ids) or must_continue(request))


def must_continue(request: Request) -> bool:
    """Whether the output may not end yet, because of min_tokens."""
    return request.n_output < request.params.min_tokens and bool(request.stop_ids)


def masks_of(request: Request, nodes: Sequence[int], parents: Sequence[int] | None, n_known: int) -> list[Mask | None]:
    """The tokens that are allowed after the text and after each node; None: all."""
    befores = [before for _, before in contexts(request, nodes, parents)]
    if request.grammar is not None:
        output = request.output
        return [request.grammar.mask([*output, *before]) for before in befores]
    if request.params.allowed_token_ids:
        return [_mask(request.params.allowed_token_ids, n_known, True)] * len(befores)
    n_left, ends = request.params.min_tokens - request.n_output, _mask(tuple(request.stop_ids), n_known, False)
    return [ends if len(before) < n_left else None for before in befores]


@lru_cache(64)
def _mask(tokens: tuple[int, ...], n_known: int, is_allowed: bool) -> Mask:
    """The mask that allows nothing but these tokens, or all but them."""
    may = np.full(n_known, not is_allowed)
    may[[token for token in tokens if token < n_known]] = is_allowed
    return np.packbits(may, bitorder="little")


LEFT_TO_HOST: dict[str, Callable[[Request], bool]] = {
    "min_tokens that are not reached, with a grammar or allowed tokens": lambda request: bool(
        must_continue(request) and (request.grammar is not None or request.params.allowed_token_ids)
    ),
    f"a bias of more than {MOST_BIASES} tokens": lambda request: len(request.params.logit_bias) > MOST_BIASES,
    f"penalties of more than {MOST_OUTPUT} tokens": lambda request: bool(
        is_penalised(request.params) and request.n_output > MOST_OUTPUT
    ),
    f"a penalty or bias beyond {EXTREME:g}": lambda request: is_extreme(request.params),
    "logprobs of logits that the step adjusts": lambda request: bool(
        request.params.logprobs is not None and kinds_of(request)
    ),
}


@dataclass(eq=False)
class _Seat:
    """What the tables hold of a request."""

    number: int
    counts: dict[int, int] = field(default_factory=dict)  # of each token of the text: see kernels.row_rules
    n_counted: int = 0  # tokens of the text
    n_told: int = -1  # how many of them the tables hold; -1: they hold another request's numbers

    def count(self, request: Request, n_known: int) -> None:
        """Count the tokens that are new."""
        n_prompt = len(request.prompt)
        for token in request.tokens[self.n_counted : n_prompt]:
            if token < n_known:
                self.counts[token] = 1
        for token in request.tokens[max(self.n_counted, n_prompt) :]:
            if token < n_known:
                self.counts[token] = self.counts.get(token, 1) + 1
        self.n_counted = len(request.tokens)

    def packed(self, tokens: Sequence[int]) -> list[int]:
        """The counts of these tokens."""
        return [self.counts[token] << 32 | token for token in tokens]


class StepRules:
    """Tells a captured step the rules of its rows. Knows which requests have seats in its tables.

    Invariant: a seat's `n_told` never counts a token before a step that was told of it has been launched.
    """

    def __init__(self, room: Room, n_known: int) -> None:
        self._room, self._n_known = room, n_known
        self._seats: OrderedDict[Request, _Seat] = OrderedDict()  # longest unused first
        self._telling: list[_Seat] = []

    def take(self, segments: Sequence[Segment], requests: Sequence[Request]) -> bool:
        """Whether the step can decide all of these requests, whose rows these are."""
        adjusted = [each for each in zip(segments, requests, strict=True) if not is_unadjusted(each[1].params)]
        if any(is_left(request) for _, request in adjusted for is_left in LEFT_TO_HOST.values()):
            return False
        n_masks = sum(len(segment.tokens) for segment, request in adjusted if kinds_of(request) & MASKED)
        n_seats = sum(kinds_of(request) & SEATED > 0 for _, request in adjusted)
        return n_seats <= self._room.seats and n_masks <= self._room.masks

    def told(self, segments: Sequence[Segment], requests: Sequence[Request]) -> list[Segment]:
        """These rows, which the step can `take`, with what it must know of them."""
        self._telling = []
        self._give_seats([request for request in requests if kinds_of(request) & SEATED])
        return [self._row(segment, request) for segment, request in zip(segments, requests, strict=True)]

    def launched(self) -> None:
        """The step that was told last is launched."""
        for seat in self._telling:
            seat.n_told = seat.n_counted

    def _give_seats(self, requests: Sequence[Request]) -> None:
        for request in [one for one in self._seats if one.finish_reason is not None]:
            del self._seats[request]
        for request in requests:
            if request in self._seats:
                self._seats.move_to_end(request)
        for request in requests:
            if request not in self._seats:
                if len(self._seats) == self._room.seats:
                    self._seats.popitem(last=False)
                taken = {seat.number for seat in self._seats.values()}
                number = next(at for at in range(self._room.seats) if at not in taken)
                self._seats[request] = _Seat(number)

    def _row(self, segment: Segment, request: Request) -> Segment:
        facts, told, kinds, p = facts_of(request), list[int](), kinds_of(request), request.params
        if kinds & SEATED:
            seat, n_changes = self._seats[request], self._room.changes
            if kinds & PENALISED:
                seat.count(request, self._n_known)
            changed, told = self._news(seat, request)
            penalties = map(float_bits, (p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
            facts += [kinds, seat.number, *penalties, *changed, *[NOTHING] * (n_changes - len(changed))]
            self._telling.append(seat)
        elif kinds:
            facts.append(kinds)
        if kinds & MASKED:
            masks = masks_of(request, segment.tokens[1:], segment.parents, self._n_known)
            segment = segment._replace(masks=masks)
        return segment._replace(facts=facts, told=told)

    def _news(self, seat: _Seat, request: Request) -> tuple[list[int], list[int]]:
        """The counts that have changed; or nothing, and all that belongs into the tables."""
        if seat.n_told >= 0:
            changed = {token for token in request.tokens[seat.n_told : seat.n_counted] if token < self._n_known}
            if len(changed) <= self._room.changes:
                return seat.packed(sorted(changed)), []
        seat.n_told = -1  # until the step is launched
        bias = sorted((token, value) for token, value in request.params.logit_bias.items() if token < self._n_known)
        biases = [token << 32 | float_bits(value) & 0xFFFFFFFF for token, value in bias]
        return [], [seat.number, len(seat.counts), *seat.packed(sorted(seat.counts)), *biases]

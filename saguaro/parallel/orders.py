"""What rank 0 tells the other ranks. Fixed layouts, never pickle.

An order with an answer (join, load, open) is JSON. The orders of a round are arrays of int64 without an answer. The
rows of a step travel as they are, and every rank lays them out as rank 0 does.

    |order|runner|order's own numbers ...|
    STEP   is_followed, n_rows, then of each row: 8 sizes, tokens, pages, parents, facts, told
    WARM   batch size
    MOVE   n, sources [n], KV indices [n]
    SCORE  n: hidden states that rank 0 exchanges
    CLOSE
"""

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saguaro.attention.step import Segment
from saguaro.config import build
from saguaro.errors import ConfigError
from saguaro.link.frame import Array, WireError
from saguaro.target.shape import RunnerShape

MOST_BYTES = 2**28  # of an order: more than the tables of all rows

_SIZES = 8  # tokens, pages, parents (-1: a chain), facts, told; start, n_wanted, slot


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join the group."""

    rank: int
    size: int
    backend: str  # parallel.exchange
    store: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load the rank's part of a model, in a weight format."""

    name: str
    path: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Open:
    """Allocate KV memory for the loaded model, and a runner of this number; compute with these cores and threads."""

    runner: int
    shape: dict[str, int]  # RunnerShape
    cores: list[int] | None  # None: any
    threads: int


class Order(enum.IntEnum):
    """The orders without an answer."""

    STEP = 1
    WARM = 2
    MOVE = 3
    SCORE = 4
    CLOSE = 5


class Numbers(NamedTuple):
    """An order without an answer."""

    order: Order
    runner: int
    rest: NDArray[np.int64]


Answered = Join | Load | Open
_KINDS: dict[str, type[Join] | type[Load] | type[Open]] = {"join": Join, "load": Load, "open": Open}


def encode_answered(order: Answered) -> list[memoryview]:
    """An order with an answer."""
    return [memoryview(json.dumps({type(order).__name__.lower(): asdict(order)}).encode())]


def decode_answered(body: Array) -> Answered:
    """The same, read back.

    >>> decode_answered(np.frombuffer(encode_answered(Load(name="m", path="/m", dtype="int8"))[0], np.uint8))
    Load(name='m', path='/m', dtype='int8')
    """
    try:
        [(name, values)] = json.loads(body.tobytes()).items()
        return build(_KINDS[name], **values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError) as e:
        raise WireError(f"this is no order: {e!r}") from e


def shape_of(order: Open) -> RunnerShape:
    """The shape in an order."""
    return build(RunnerShape, **order.shape)


def encode(order: Order, runner: int, rest: Sequence[int] = ()) -> list[memoryview]:
    """An order without an answer."""
    return [np.array([order, runner, *rest], np.int64).data.cast("B")]


def decode(body: Array) -> Numbers:
    """The same, read back."""
    if len(body) % 8 or len(body) < 16:
        raise WireError(f"an order of {len(body)} bytes")
    numbers = body.view(np.int64)
    try:
        return Numbers(Order(int(numbers[0])), int(numbers[1]), numbers[2:])
    except ValueError as e:
        raise WireError(str(e)) from e


def encode_rows(rows: Sequence[Segment], is_followed: bool) -> list[int]:
    """A step's rows.

    >>> rows = [Segment([5, 6], 3, [1], 2, [-1], slot=4, facts=[9], told=[0, 8])]
    >>> encode_rows(rows, True)
    [1, 1, 2, 1, 1, 1, 2, 3, 2, 4, 5, 6, 1, -1, 9, 0, 8]
    >>> decode_rows(np.array(encode_rows(rows, True))) == (rows, True)
    True
    """
    numbers = [int(is_followed), len(rows)]
    for row in rows:
        n_parents = -1 if row.parents is None else len(row.parents)
        numbers += [len(row.tokens), len(row.pages), n_parents, len(row.facts), len(row.told)]
        numbers += [row.start, row.n_wanted, row.slot]
        numbers += [*row.tokens, *row.pages, *(row.parents or ()), *row.facts, *row.told]
    return numbers


def decode_rows(numbers: NDArray[np.int64]) -> tuple[list[Segment], bool]:
    """The same, read back."""
    given: list[int] = numbers.tolist()
    rows: list[Segment] = []
    at = 2
    for _ in range(given[1]):
        n_tokens, n_pages, n_parents, n_facts, n_told, start, n_wanted, slot = given[at : at + _SIZES]
        ends = np.cumsum([at + _SIZES, n_tokens, n_pages, max(n_parents, 0), n_facts, n_told]).tolist()
        if min(n_tokens, n_pages, n_facts, n_told, n_parents + 1) < 0 or ends[-1] > len(given):
            raise WireError("a row of a step is cut off")
        tokens, pages, parents, facts, told = (given[a:b] for a, b in pairwise(ends))
        rows.append(Segment(tokens, start, pages, n_wanted, None if n_parents < 0 else parents, slot, facts, told))
        at = ends[-1]
    return rows, bool(given[0])

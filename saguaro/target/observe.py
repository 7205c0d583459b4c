"""Builds the event of a round for observers."""

from collections.abc import Sequence
from itertools import pairwise

from saguaro.target.scheduler import Batch, Commit
from saguaro.types import RoundEvent, RowEvent, Speculation


def round_event(
    number: int,
    batch: Batch,
    spec: Speculation,
    commits: Sequence[Commit],
    at: Sequence[float],  # five times: boundaries of the speculate, launch, overlap and collect intervals
    verify_s: float | None,  # device time
) -> RoundEvent:
    """The event of a round: its rows, the tokens computed, and the times."""
    rows = tuple(_row_event(commit) for commit in commits)
    speculate, launch, overlap, collect = pairwise(at)
    n_computed = sum(row.n_tokens for row in batch.rows) + int(spec.length.sum())
    verify = None if verify_s is None else (launch[0], launch[0] + verify_s)
    return RoundEvent(number, n_computed, rows, speculate, launch, overlap, collect, spec.times, verify)


def _row_event(c: Commit) -> RowEvent:
    tree = (tuple(c.parents), tuple(c.path))
    given = (c.request.id, c.length, c.k, c.source, len(c.tokens), c.room, tuple(c.drafted))
    return RowEvent(*given, c.request.params.prepare, *tree)

"""A round as its observers see it."""

from collections.abc import Sequence
from itertools import pairwise

from saguaro.target.scheduler import Batch, Commit
from saguaro.types import RoundEvent, RowEvent, Speculation


def round_event(
    number: int,
    batch: Batch,
    spec: Speculation,
    commits: Sequence[Commit],
    at: Sequence[float],  # five moments: asking, launching, overlapping and collecting lie between them
    verify_s: float | None,  # that a device computed
) -> RoundEvent:
    """What a round computed and gave, and when."""
    rows = tuple(_row_event(commit) for commit in commits)
    speculate, launch, overlap, collect = pairwise(at)
    n_computed = sum(row.n_tokens for row in batch.rows) + int(spec.length.sum())
    verify = None if verify_s is None else (launch[0], launch[0] + verify_s)
    return RoundEvent(number, n_computed, rows, speculate, launch, overlap, collect, spec.times, verify)


def _row_event(c: Commit) -> RowEvent:
    prepares = c.request.params.prepare
    return RowEvent(c.request.id, c.length, c.k, c.source, len(c.tokens), c.room, tuple(c.drafted), prepares)

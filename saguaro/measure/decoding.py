"""Which rounds are decoding alone: a full batch, no prompt being read. Prefill is excluded from speed by these."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from saguaro.types import RoundEvent


def counted(events: Sequence[RoundEvent], batch: int) -> Iterator[tuple[RoundEvent, RoundEvent]]:
    """The rounds with a full batch in which every row decodes, each after one of the same rows."""
    for before, event in pairwise(events):
        same = {row.request for row in before.rows} == {row.request for row in event.rows}
        if same and len(event.rows) >= batch and decodes(before) and decodes(event):
            yield before, event


def decodes(event: RoundEvent) -> bool:
    """Whether every row decodes: none reads its prompt."""
    return event.n_computed == sum(1 + row.length for row in event.rows)


def decoding_rate(events: Sequence[RoundEvent], batch: int) -> float | None:
    """Tokens per second over the counted rounds, each from the end of the round before; None without such rounds."""
    n_tokens, seconds = 0, 0.0
    for before, event in counted(events, batch):
        n_tokens += sum(row.n_tokens for row in event.rows)
        seconds += event.collect[1] - before.collect[1]
    return n_tokens / seconds if seconds else None

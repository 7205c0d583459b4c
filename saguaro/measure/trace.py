"""A trace of rounds in Chrome's format, for chrome://tracing or https://ui.perfetto.dev.

target  |------------- round 7 -------------|------- round 8 ...
        |speculate|--launch--|overlap|collect|
draft     |respond|------- prepare --------|
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from saguaro.measure.metrics import OutputFile
from saguaro.types import Interval, RoundEvent

TARGET, DRAFT, DEVICE = 1, 2, 3  # lanes


class Trace:
    """Writes each round as it ends. An observer, and a context that completes the file."""

    def __init__(self, path: Path) -> None:
        self._file = OutputFile(path)
        self._began: float | None = None
        self._prepared: Interval | None = None  # the last interval written; a draft may report it again
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._file.write(",\n".join(json.dumps(name) for name in _names()))

    def __call__(self, event: RoundEvent) -> None:
        """Write a round's slices. Time 0 is the start of the first round, or of the draft's preparation before it."""
        if self._began is None:
            has_prepared = event.draft is not None and event.draft.prepare[1] > event.draft.prepare[0]
            self._began = event.draft.prepare[0] if event.draft and has_prepared else event.speculate[0]
        if event.draft is not None and event.draft.prepare == self._prepared:
            event = replace(event, draft=replace(event.draft, prepare=(event.draft.respond[0],) * 2))
        elif event.draft is not None:
            self._prepared = event.draft.prepare
        for piece in slices(event, self._began):
            self._file.write(",\n" + json.dumps(piece))

    def close(self) -> None:
        """Complete the file."""
        self._file.write("\n]}\n")
        self._file.close()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slices(event: RoundEvent, began: float = 0.0) -> Iterator[dict[str, Any]]:
    """The slices of a round, in microseconds after `began`: the round, its four parts, and the draft's work."""
    rows = {
        "rows": len(event.rows),
        "computed": event.n_computed,
        "speculated": [row.length for row in event.rows],
        "k": [row.k for row in event.rows],
        "tokens": [row.n_tokens for row in event.rows],
        "sources": [row.source for row in event.rows],
        "hits": sum(row.source == "cache" for row in event.rows),
    }
    yield _slice(f"round {event.number}", TARGET, (event.speculate[0], event.collect[1]), began, rows)
    for name in ("speculate", "launch", "overlap", "collect"):
        yield _slice(name, TARGET, getattr(event, name), began, {})
    if event.verify is not None:
        yield _slice("verify", DEVICE, event.verify, began, {"round": event.number})
    if event.draft is not None:
        answer = {"round": event.number, "sources": rows["sources"], "hits": rows["hits"]}
        if event.draft.prepare[1] > event.draft.prepare[0]:
            yield _slice("prepare", DRAFT, event.draft.prepare, began, {"round": event.number, "hits": rows["hits"]})
        yield _slice("respond", DRAFT, event.draft.respond, began, answer)


def _slice(name: str, lane: int, interval: Interval, began: float, args: dict[str, Any]) -> dict[str, Any]:
    start, end = ((at - began) * 1e6 for at in interval)
    return {"name": name, "ph": "X", "pid": 1, "tid": lane, "ts": start, "dur": end - start, "args": args}


def _names() -> list[dict[str, Any]]:
    """The names of the process and its lanes."""
    lanes = [("process_name", TARGET, "saguaro"), ("thread_name", TARGET, "target"), ("thread_name", DRAFT, "draft")]
    lanes.append(("thread_name", DEVICE, "target's device"))
    return [{"name": kind, "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}} for kind, lane, name in lanes]

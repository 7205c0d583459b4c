"""Servers measured over HTTP: streams of one server at a fixed concurrency, and the figures of them.

    send ---- first text ---- text ---- text ---- end
         TTFT            gap       gap

All times are the client's, for every server alike. A gap is the time between two events with text; an event may hold
several tokens. TTFT is the time to the first text, per token is (last text - first text) / (tokens - 1).
Tokens are those that the server's `usage` counts; without it, events with text, which is a lower bound.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from saguaro.client.client import Stream
from saguaro.errors import PeerError

PERCENTILES = (50, 90, 99)

Ask = Callable[[int], Stream]  # sends the request of this number


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One answer and its times, in seconds."""

    text: str
    ttft: float
    gaps: tuple[float, ...]
    seconds: float  # from sending to the end of the stream
    n_tokens: int
    n_prompt: int | None  # None: the server does not count
    is_counted: bool  # whether n_tokens is the server's count

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        return sum(self.gaps) / (self.n_tokens - 1) if self.n_tokens > 1 else None


@dataclass
class Run:
    """The answers of one server at one concurrency."""

    concurrency: int
    readings: dict[int, Reading] = field(default_factory=dict)  # by number of the request
    seconds: float = 0.0  # wall time

    @property
    def n_tokens(self) -> int:
        """Tokens generated."""
        return sum(one.n_tokens for one in self.readings.values())

    @property
    def tok_s(self) -> float:
        """Tokens per second, over all streams."""
        return self.n_tokens / self.seconds if self.seconds else 0.0


class ServedEntry:
    """A server in a comparison. After a failure it is asked no more."""

    def __init__(self, name: str, ask: Ask, abort: Callable[[], None], *, is_comparable: bool, is_ours: bool) -> None:
        self.name, self._ask, self._abort = name, ask, abort
        self.is_comparable = is_comparable  # whether its text must equal the reference's
        self.is_ours = is_ours
        self.runs: dict[int, Run] = {}  # by concurrency
        self.failure: str | None = None

    def read(self, number: int) -> Reading:
        """Send a request and read the answer to its end."""
        with self._ask(number) as stream:
            return read_stream(stream)

    def measure(self, numbers: Sequence[int], concurrency: int) -> None:
        """Send these requests, as many at a time as `concurrency`, and keep the answers. A failure is kept too."""
        if self.failure is not None:
            return
        run = self.runs.setdefault(concurrency, Run(concurrency))
        began = time.perf_counter()
        try:
            readings = self._together(numbers, concurrency)
        except PeerError as e:
            self.failure = str(e)
            return
        run.seconds += time.perf_counter() - began
        run.readings.update(zip(numbers, readings, strict=True))

    def warm(self, numbers: Sequence[int], concurrency: int) -> None:
        """Send requests that are not measured."""
        if self.failure is None:
            try:
                self._together(numbers, concurrency)
            except PeerError as e:
                self.failure = str(e)

    def _together(self, numbers: Sequence[int], concurrency: int) -> list[Reading]:
        pool = ThreadPoolExecutor(concurrency)
        try:
            return list(pool.map(self.read, numbers))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self._abort()
            raise
        finally:
            pool.shutdown()


def read_stream(stream: Stream) -> Reading:
    """Read a stream to its end."""
    pieces, times, usage = [], [], None
    for chunk in stream:
        if chunk.text or chunk.reasoning:
            times.append(time.perf_counter())
            pieces.append(chunk.reasoning + chunk.text)
        usage = chunk.usage or usage
    ended = time.perf_counter()
    first = times[0] if times else ended
    return Reading(
        text="".join(pieces),
        ttft=first - stream.began,
        gaps=tuple(after - before for before, after in pairwise(times)),
        seconds=ended - stream.began,
        n_tokens=usage.completion if usage else len(times),
        n_prompt=usage.prompt if usage else None,
        is_counted=usage is not None,
    )


def figures(entry: ServedEntry, concurrency: int, reference: ServedEntry) -> dict[str, Any]:
    """The results of an entry at a concurrency, for tables and JSON; null if not applicable."""
    run, other = entry.runs.get(concurrency, Run(concurrency)), reference.runs.get(concurrency, Run(concurrency))
    readings = list(run.readings.values())
    per_token = [one.per_token for one in readings if one.per_token is not None]
    prompts = [one.n_prompt for one in readings if one.n_prompt is not None]
    return {
        "entry": entry.name,
        "concurrency": concurrency,
        "requests": len(readings),
        "tokens": run.n_tokens,
        "tokens_counted_by": "usage" if all(one.is_counted for one in readings) else "events",
        "prompt_tokens": sum(prompts) if len(prompts) == len(readings) else None,
        "seconds": run.seconds,
        "tok_s": run.tok_s,
        "ratio": run.tok_s / other.tok_s if other.tok_s else None,
        "ttft_ms": spread([one.ttft for one in readings]),
        "per_token_ms": spread(per_token),
        "gap_ms": spread([gap for one in readings for gap in one.gaps]),
        "request_ms": spread([one.seconds for one in readings]),
        "compared": len(run.readings.keys() & other.readings.keys()) if entry.is_comparable else None,
        "same_text": n_same(run, other) if entry.is_comparable else None,
        "failure": entry.failure,
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing.

    >>> spread([0.001, 0.002, 0.003])
    {'mean': 2.0, 'p50': 2.0, 'p90': 2.8, 'p99': 2.98}
    """
    if not seconds:
        return None
    found = np.percentile(seconds, PERCENTILES)
    named = {"mean": float(np.mean(seconds))} | {f"p{n}": float(one) for n, one in zip(PERCENTILES, found, strict=True)}
    return {name: round(1e3 * value, 3) for name, value in named.items()}


def n_same(run: Run, other: Run) -> int:
    """How many requests have the same text as in another run."""
    return sum(
        number in other.readings and one.text == other.readings[number].text for number, one in run.readings.items()
    )

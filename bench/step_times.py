"""Times of a target's steps that were measured elsewhere, by number of tokens and of rows."""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.config import MAX_STEP
from saguaro.errors import ConfigError

# Milliseconds of a step at batch 1. The 32B shape was measured by bench.gpu on an H200; the others are stated, not
# measured here, and the same for every number of tokens.
PRESETS = {
    "32b": ("16.0@1", "16.2@5", "16.2@9", "16.6@16", "18.1@32"),  # one H200
    "70b": ("16.0",),  # four H100
    "8b": ("4.6",),  # one H200
}

Point = tuple[int, float]  # tokens, milliseconds


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step. Between two measured numbers of tokens it is interpolated."""

    name: str
    tables: dict[float, list[Point]]  # by the largest number of rows that they are for; by tokens, ascending

    def seconds(self, n_tokens: int, n_rows: int) -> float:
        """The time of a step. Steps that read prompts may be longer than any measured one: the last two measurements
        are extended.

        >>> times = parse_times("32b", PRESETS["32b"])
        >>> [round(1e3 * times.seconds(n, 1), 2) for n in (1, 3, 16, 24, 48)]
        [16.0, 16.1, 16.6, 17.35, 19.6]
        """
        points = self._points(n_rows)
        if len(points) == 1:
            return points[0][1] / 1e3
        at = min(max(bisect_left(points, (n_tokens, 0.0)), 1), len(points) - 1)
        (n, ms), (next_n, next_ms) = points[at - 1 : at + 1]
        share = max(0.0, (n_tokens - n) / (next_n - n))
        return (ms + share * (next_ms - ms)) / 1e3

    def check(self, n_tokens: int, n_rows: int) -> None:
        """Raise unless verifications of so many tokens were measured.

        >>> parse_times("32b", PRESETS["32b"]).check(64, 1)
        Traceback (most recent call last):
        saguaro.errors.ConfigError: 1 row verifies up to 64 tokens, and the step times 32b end at 32; add MS@64
        """
        most = self._points(n_rows)[-1][0]
        if n_tokens > most:
            rows = "1 row verifies" if n_rows == 1 else f"{n_rows} rows verify"
            raise ConfigError(
                f"{rows} up to {n_tokens} tokens, and the step times {self.name} end at {most}; add MS@{n_tokens}"
            )

    def _points(self, n_rows: int) -> list[Point]:
        known = [rows for rows in self.tables if rows >= n_rows]
        if not known:
            most = max(self.tables)
            raise ConfigError(
                f"a batch has {n_rows} rows, and the step times {self.name} are for up to {most:g}; add MS@TOKENSx"
                f"{n_rows}"
            )
        return self.tables[min(known)]


def parse_times(name: str, entries: Sequence[str]) -> StepTimes:
    """Read times written as MS (any number of tokens), MS@TOKENS (any number of rows) or MS@TOKENSxROWS (up to so many
    rows).

    >>> parse_times("given", ["16.5@16", "18@32", "20@64x8"]).tables
    {inf: [(16, 16.5), (32, 18.0)], 8.0: [(64, 20.0)]}
    >>> parse_times("given", ["40"]).seconds(1000, 64)
    0.04
    """
    tables: dict[float, list[Point]] = {}
    for entry in entries:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:@(\d+)(?:x(\d+))?)?", entry)
        if found is None or not float(found[1]) or (found[2] and not int(found[2])):
            raise ConfigError(f"a step time is {entry!r}; write MS, MS@TOKENS or MS@TOKENSxROWS, such as 18.1@32")
        rows = float(found[3]) if found[3] else math.inf
        tables.setdefault(rows, []).append((int(found[2] or MAX_STEP), float(found[1])))
    for points in tables.values():
        points.sort()
        if len({n for n, _ in points}) < len(points):
            raise ConfigError(f"step times are {' '.join(entries)}; give one time for each number of tokens")
    if len(entries) > 1 and not all("@" in entry for entry in entries):
        raise ConfigError(f"step times are {' '.join(entries)}; one without a number of tokens must be the only one")
    if not tables:
        raise ConfigError(f"there are no step times; give some, or a preset: {', '.join(PRESETS)}")
    return StepTimes(name, tables)

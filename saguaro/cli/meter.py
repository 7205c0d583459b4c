"""The speed of one streamed output, for the terminal."""

import time

from saguaro.engine.results import Delta


class Meter:
    """Counts deltas; a delta is a round."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._n_tokens = self._n_rounds = 0

    def add(self, delta: Delta) -> None:
        """Count a delta that has just arrived."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._n_tokens += len(delta.token_ids)
        self._n_rounds += bool(delta.token_ids)

    def __str__(self) -> str:
        if not self._n_rounds:
            return "no tokens"
        seconds = self._last - self._first
        speed = (self._n_tokens - 1) / seconds if seconds > 0 else 0.0
        return (
            f"{self._n_tokens} tokens, {self._n_tokens / self._n_rounds:.2f} per round, "
            f"first after {(self._first - self._began) * 1e3:.0f} ms, then {speed:.1f} tok/s"
        )

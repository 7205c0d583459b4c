"""Throttled work: it pauses after each call, so that other threads get most of the interpreter's time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

REST = 4.0  # pause, relative to the duration of a call


class Paced:
    """Calls functions with a pause after each. Not thread-safe.

    >>> ticks, slept = iter([0.0, 0.0, 0.5, 1.0, 2.5, 2.6]), []
    >>> paced = Paced(clock=lambda: next(ticks), sleep=slept.append)
    >>> paced(len, "first: takes 0.5 s"), paced(len, "second: 0.5 s later, 1.5 s too early")
    (18, 36)
    >>> slept
    [0.0, 1.5]
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._rested = 0.0  # when the next call may begin

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        """Call the function, after the pause since the last call."""
        self._sleep(max(0.0, self._rested - self._clock()))
        began = self._clock()
        try:
            return function(*args)
        finally:
            ended = self._clock()
            self._rested = ended + REST * (ended - began)

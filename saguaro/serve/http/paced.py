"""Work that gives way: after each call it rests, so that what it shares the interpreter with gets most of the time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

REST = 4.0  # as many times as long as a call took


class Paced:
    """Calls functions one after the other, with a rest after each. For one thread.

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
        """The function's result, once the rest after the last call is over."""
        self._sleep(max(0.0, self._rested - self._clock()))
        began = self._clock()
        try:
            return function(*args)
        finally:
            ended = self._clock()
            self._rested = ended + REST * (ended - began)

"""Threads that parse client input, separate from the event loop and the engine.

They are daemons, so a thread that hangs in a library does not prevent the process from ending.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Job = tuple["Future[Any]", Callable[..., Any], tuple[object, ...]]


class Readers:
    """A pool of daemon threads. A job whose caller is gone is not started."""

    def __init__(self, n_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(n_threads)]
        for thread in self._threads:
            thread.start()

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run the function and return its result."""
        future: Future[T] = Future()
        self._jobs.put((future, function, args))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after their current jobs."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as e:
                    future.set_exception(e)
            del job, future, function, args  # releases the request while the thread is idle

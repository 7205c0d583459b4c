"""Fair turns: of several sessions that share a draft model, one computes at a time.

Invariant: what a target waits for comes before every preparation, and equals come in the order in which they asked. A
preparation offers its turn after every step: to a request, or to the next preparation. So several sessions prepare in
turn, step by step, and a request waits for one step at most beside other requests.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HasNews = Callable[[], bool]


class _Wish:
    """A turn that is asked for. has_news: of a preparation, whether it only has to stop."""

    def __init__(self, has_news: HasNews | None) -> None:
        self.has_news = has_news


class Turns:
    """Hands out turns (link.answer.Turns). Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: _Wish | None = None
        self._waiting: list[_Wish] = []  # in the order in which they asked

    @property
    def is_free(self) -> bool:
        """Whether no session computes."""
        return self._holder is None

    @contextmanager
    def request(self) -> Iterator[None]:
        """A turn for what a target waits for."""
        self._take(_Wish(None))
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def preparation(self, has_news: HasNews) -> Iterator[HasNews]:
        """A turn for a preparation, which is over when its own session has news. Yields what it asks after every step;
        meanwhile others may have had turns."""
        self._take(_Wish(has_news))
        try:
            yield lambda: self._offer(has_news)
        finally:
            self._give()

    def _offer(self, has_news: HasNews) -> bool:
        """Give others a turn if any wants one, and then go on. Returns whether there is news, which is the end."""
        if has_news():
            return True
        with self._changed:
            is_wanted = bool(self._waiting)
        if is_wanted:
            self._give()
            self._take(_Wish(has_news))
        return has_news()

    def _take(self, wish: _Wish) -> None:
        with self._changed:
            if self._holder is None:
                self._holder = wish
                return
            self._waiting.append(wish)
            while self._holder is not wish:
                self._changed.wait()

    def _give(self) -> None:
        """Pass the turn on: to the first request, then to a preparation that only has to stop, then to the first."""
        with self._changed:
            requests = (wish for wish in self._waiting if wish.has_news is None)
            over = (wish for wish in self._waiting if wish.has_news is not None and wish.has_news())
            self._holder = next(requests, None) or next(over, None) or next(iter(self._waiting), None)
            if self._holder is not None:
                self._waiting.remove(self._holder)
                self._changed.notify_all()

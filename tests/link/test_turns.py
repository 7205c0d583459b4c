"""Turns: what a target waits for comes first, preparations alternate, and one computes at a time."""

import threading
from collections.abc import Callable

from saguaro.link.turns import Turns
from tests.link.target import until


class Player(threading.Thread):
    """Takes one turn in a thread, step by step, as it is told."""

    def __init__(self, turns: Turns, name: str, log: list[str], n_steps: int | None = None) -> None:
        """n_steps: of a preparation, until it has news; None: a request."""
        super().__init__(name=name)
        self.turns, self.log, self.n_steps = turns, log, n_steps
        self.has_news = False
        self.goes = threading.Semaphore(0)  # one for each step
        self.start()

    def run(self) -> None:
        if self.n_steps is None:
            with self.turns.request():
                self._step()
            return
        with self.turns.preparation(lambda: self.has_news) as is_late:
            for _ in range(self.n_steps):
                self._step()
                if is_late():
                    break
            self.log.append(f"{self.name} ends")

    def _step(self) -> None:
        self.log.append(self.name)
        self.goes.acquire()


def waiting(turns: Turns, n: int) -> Callable[[], bool]:
    """So many wait for a turn."""
    return lambda: len(turns._waiting) == n


def test_a_request_comes_before_preparations_and_after_earlier_requests() -> None:
    turns, log = Turns(), list[str]()
    first = Player(turns, "p", log, n_steps=2)
    until(lambda: log == ["p"])
    others = []
    for n, name in enumerate(("q", "a", "b")):
        others.append(Player(turns, name, log, n_steps=1 if name == "q" else None))
        until(waiting(turns, n + 1))
    for one in (first, *others):
        one.goes.release(2)
    for one in (first, *others):
        one.join()
    assert log == ["p", "a", "b", "q", "p", "q ends", "p ends"]
    assert turns._holder is None


def test_preparations_take_turns_step_by_step() -> None:
    turns, log = Turns(), list[str]()
    players = [Player(turns, "p", log, n_steps=3)]
    until(lambda: log == ["p"])
    players.append(Player(turns, "q", log, n_steps=3))
    until(waiting(turns, 1))
    for one in players:
        one.goes.release(3)
    for one in players:
        one.join()
    assert log == ["p", "q", "p", "q", "p", "q", "p ends", "q ends"]


def test_a_preparation_that_only_has_to_stop_comes_before_others() -> None:
    turns, log = Turns(), list[str]()
    players = [Player(turns, "p", log, n_steps=1)]
    until(lambda: log == ["p"])
    for n, name in enumerate(("q", "r")):
        players.append(Player(turns, name, log, n_steps=2))
        until(waiting(turns, n + 1))
    players[2].has_news = True
    for one in players:
        one.goes.release(2)
    for one in players:
        one.join()
    assert log[:4] == ["p", "r", "r ends", "q"]


def test_an_exception_gives_the_turn_back() -> None:
    turns = Turns()
    for _ in range(2):
        try:
            with turns.request():
                raise ValueError
        except ValueError:
            pass
        try:
            with turns.preparation(lambda: False):
                raise ValueError
        except ValueError:
            pass
    assert turns._holder is None


def test_many_at_once_and_never_two_together() -> None:
    turns, inside, most = Turns(), list[int](), list[int]()

    def play(n: int) -> None:
        for _ in range(50):
            with turns.request():
                inside.append(n)
                most.append(len(inside))
                inside.remove(n)
            with turns.preparation(lambda: False) as is_late:
                for _ in range(3):
                    inside.append(n)
                    most.append(len(inside))
                    inside.remove(n)
                    is_late()

    threads = [threading.Thread(target=play, args=(n,)) for n in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (len(most), set(most)) == (6 * 50 * 4, {1})

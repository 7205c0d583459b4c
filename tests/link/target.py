"""The target's side of a link, as Round plays it, with every speculation checked; and what the tests share."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from saguaro.config import DraftConfig, SamplingParams
from saguaro.link.apart import Apart, Timeouts
from saguaro.link.process import draft_process
from saguaro.types import EMPTY, SCRIPT, DraftLink, Joined, Outcome, Speculation
from tests.draft.config import new_config
from tests.link.echo import propose

V, K, ROWS = 1000, 3, 4
WORKER = (sys.executable, "-P", "-m", "tests.link.echo_worker")
AGES = 60.0  # seconds: longer than anything takes, however busy the machine is


def draft_config(draft: str = "", n_vocab: int = V) -> DraftConfig:
    """An Echo with these switches."""
    return new_config(n_vocab, draft=draft, lookahead=K, max_rows=ROWS, n_tokens=2**20)


def start(draft: str = "", timeout: float = AGES, n_vocab: int = V, patience: Timeouts | None = None) -> Apart:
    """A link to an Echo in a process of its own."""
    patience = patience or Timeouts(pauses=(0.0,))
    config = draft_config(draft, n_vocab)
    return draft_process(config, threads=1, cores=None, timeout=timeout, worker=WORKER, patience=patience)


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + AGES
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """The letter of a process's state: T if it was stopped, X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def rest(link: Apart) -> None:
    """Wait until a draft process waits for its next message: what it prepares is complete."""
    until(lambda: link.pid is not None and state_of(link.pid) == "S")


class Target:
    """Plays rounds with random outcomes; rows come and go."""

    def __init__(self, link: DraftLink, seed: int = 0, n_vocab: int = V, n_prompt: int = 5) -> None:
        self.link, self.random, self.n_vocab, self.n_prompt = link, random.Random(seed), n_vocab, n_prompt
        self.rows: dict[int, Joined] = {}
        self.texts: dict[int, list[int]] = {}
        self.left = list(range(ROWS))  # whoever had the link before
        self.joined: list[int] = []
        self.outcome = Outcome.nothing()
        self.n_fresh = self.n_spoken = 0

    def play(self) -> Speculation:
        """One round, as Round.play; what was speculated is right, or nothing."""
        if self.link.is_fresh():
            self.n_fresh += 1
            self.introduce_all()
        self._come_and_go()
        try:
            return self._play()
        except BaseException:
            self.introduce_all()
            raise

    def play_until(self, happened: Callable[[], bool]) -> None:
        """Play for as long as it takes."""
        until(lambda: self.play() is not None and happened())

    def introduce_all(self) -> None:
        """The draft knows nobody."""
        self.outcome, self.left, self.joined = Outcome.nothing(), list(range(ROWS)), list(self.rows)

    def _play(self) -> Speculation:
        left, joined, self.left, self.joined = self.left, self.joined, [], []
        self.link.retire(left)
        self.link.admit([self._joined(slot) for slot in joined])
        slots = self.random.sample(sorted(self.rows), self.random.randint(0, len(self.rows)))
        room = [self.random.randint(0, K + 1) for _ in slots]
        spec = self.link.speculate(self.outcome.without(left), slots, room)
        self._check(spec, slots, room)
        self.link.overlap()
        self._decide(spec, slots)
        return spec

    def _check(self, spec: Speculation, slots: list[int], room: list[int]) -> None:
        """All rows are spoken for, or none."""
        assert spec.length.shape == spec.source.shape == (len(slots),)
        if spec.tokens.shape[1] == 0:
            assert spec.length.tolist() == [0] * len(slots)
            assert spec.source.tolist() == [EMPTY] * len(slots)
            return
        self.n_spoken += 1
        for slot, n, length, source, tokens in zip(
            slots, room, spec.length.tolist(), spec.source.tolist(), spec.tokens.tolist(), strict=True
        ):
            expected = propose(self.rows[slot], self.texts[slot], min(n, K), self.n_vocab)
            assert (tokens[:length], source) == (expected, SCRIPT if expected else EMPTY)

    def _decide(self, spec: Speculation, slots: list[int]) -> None:
        accepted = [self.random.randint(0, n) for n in spec.length.tolist()]
        bonus = [self.random.randrange(self.n_vocab) for _ in slots]
        rows, k, last = (torch.tensor(column, dtype=torch.int64) for column in (slots, accepted, bonus))
        self.outcome = Outcome(rows, spec.length, k, last)
        for at, slot in enumerate(slots):
            self.texts[slot] += [*spec.tokens[at, : accepted[at]].tolist(), bonus[at]]

    def _come_and_go(self) -> None:
        for slot in range(ROWS):
            if slot in self.rows and self.random.random() < 0.05 and len(self.rows) > 1:
                del self.rows[slot], self.texts[slot]
                self.left.append(slot)
                self.joined = [other for other in self.joined if other != slot]
            elif slot not in self.rows and (not self.rows or self.random.random() < 0.3):
                self._join(slot)

    def _join(self, slot: int) -> None:
        r = self.random
        params = SamplingParams(temperature=r.random(), logit_bias={r.randrange(self.n_vocab): r.random()})
        text = [r.randrange(self.n_vocab) for _ in range(self.n_prompt)]
        self.rows[slot] = Joined(slot, (), len(text), r.randrange(2**63), params)
        self.texts[slot] = text
        self.joined.append(slot)

    def _joined(self, slot: int) -> Joined:
        row = self.rows[slot]
        return Joined(slot, tuple(self.texts[slot]), row.n_prompt, row.seed, row.params)

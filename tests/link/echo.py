"""A draft's side that is a pure function of the texts, and misbehaves as told: what the links' tests drive.

The draft's name is a list of switches, such as "slow:0.5,die:3": what to do, and at which turn or for how long.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from saguaro.config import DraftConfig
from saguaro.errors import ConfigError
from saguaro.link.frame import MessageKind, frame
from saguaro.link.wire import encode_reply
from saguaro.types import SCRIPT, DraftTimes, Joined, Outcome, Speculation


def propose(row: Joined, text: Sequence[int], n: int, n_vocab: int) -> list[int]:
    """What the draft says after a text: every token of it, and how it is decoded, makes a difference."""
    state = hash((row.seed, row.n_prompt, row.params.temperature, tuple(row.params.logit_bias.items()), *text))
    return [(state + i) % n_vocab for i in range(n)]


def q_of(tokens: torch.Tensor, n_vocab: int) -> torch.Tensor:
    """Some q, different for every token."""
    return (tokens[..., None] * 31 + torch.arange(n_vocab) % 1000).float()


class Echo:
    """Knows texts from admissions and outcomes alone, as a draft does."""

    def __init__(self, config: DraftConfig) -> None:
        switches = (config.draft or "").split(",")
        self.switches = {name: float(value or 0) for name, _, value in (switch.partition(":") for switch in switches)}
        self.config, self.n_turns, self.n_prepared, self.n_kept = config, 0, 0, 0
        self.rows: dict[int, Joined] = {}
        self.texts: dict[int, list[int]] = {}
        self.proposed: dict[int, list[int]] = {}
        if "refuse" in self.switches:
            raise ConfigError("n_vocab is 7; it must be 11; choose another draft")
        if "crash" in self.switches:
            raise RuntimeError("a draft that cannot be")
        time.sleep(self.switches.get("load", 0))

    def admit(self, joined: Sequence[Joined]) -> None:
        """Learn these rows."""
        for row in joined:
            assert row.slot not in self.rows, "admitted twice"
            self.rows[row.slot], self.texts[row.slot], self.proposed[row.slot] = row, list(row.tokens), []

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows."""
        for slot in slots:
            self.rows.pop(slot, None)

    def respond(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Commit, and say what follows."""
        began = time.perf_counter()
        self.n_turns += 1
        self._misbehave()
        columns = (column.tolist() for column in (outcome.slots, outcome.n_accepted, outcome.bonus))
        for slot, k, bonus in zip(*columns, strict=True):
            self.texts[slot] += [*self.proposed[slot][:k], bonus]
        tokens = [self._propose(slot, n) for slot, n in zip(slots, room, strict=True)]
        self.proposed |= dict(zip(slots, tokens, strict=True))
        spec = Speculation.of(tokens, self.config.lookahead, [SCRIPT] * len(slots))
        q = q_of(spec.tokens, self.config.n_vocab) if "q" in self.switches else None
        times = DraftTimes((began, time.perf_counter()), (float(self.n_prepared), float(len(self.rows))))
        return Speculation(spec.tokens, spec.length, spec.source, q, times)

    def prepare(self, is_late: Callable[[], bool] = lambda: True) -> None:
        """Count; and under "linger" go on until the next turn is there, which is the only way out."""
        self.n_prepared += 1
        while "linger" in self.switches and not is_late():
            time.sleep(0.0005)

    def keep(self) -> None:
        """Count."""
        self.n_kept += 1

    def _propose(self, slot: int, n: int) -> list[int]:
        if "threads" in self.switches:
            return [torch.get_num_threads()]
        n = min(n, self.config.lookahead)
        return propose(self.rows[slot], self.texts[slot], n, self.config.n_vocab)

    def _misbehave(self) -> None:
        time.sleep(self.switches.get("slow", 0))
        if self.n_turns == self.switches.get("die"):
            os._exit(7)
        if self.n_turns == self.switches.get("raise"):
            raise RuntimeError("the draft lost its thread")
        if self.n_turns == self.switches.get("garbage"):
            os.write(int(sys.argv[1]), b"what the target cannot understand")
        if self.n_turns == self.switches.get("stale"):
            os.write(int(sys.argv[1]), b"".join(frame(MessageKind.REPLY, 99, encode_reply(Speculation.empty(0)))))

"""Where the draft runs: in the target's thread, in a process of its own with some of the cores, or in a service that
may be on another machine. A service is never chosen: its address is the draft's name.

Which is faster depends on the machine and the pair. It is not guessed from the number of cores: `saguaro tune` measures
it, and what it found is kept in a file (KeptFile). Without one the draft runs in the target's thread and drafts just in
time, which takes no core from the target.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saguaro.config import EngineConfig
from saguaro.method import Method

BETTER = 1.02  # another placement than the first is taken if it is so many times as fast

Rates = Mapping["Placement", Mapping[int, float]]  # tokens per second, by batch size


@dataclass(frozen=True)
class Placement:
    """A place for the draft.

    >>> print(Placement(), "|", Placement("process", 1), "|", Placement("process", 2), "|", Placement("service"))
    in the target's thread | own process, 1 core | own process, 2 cores | draft service
    """

    link: str = "inline"  # or process, or service
    threads: int = 1  # and cores, of a process

    def __str__(self) -> str:
        cores = "1 core" if self.threads == 1 else f"{self.threads} cores"
        return {"inline": "in the target's thread", "service": "draft service"}.get(self.link, f"own process, {cores}")

    @property
    def is_apart(self) -> bool:
        """Whether the draft is not in this process."""
        return self.link != "inline"

    @property
    def is_service(self) -> bool:
        """Whether a draft service runs it."""
        return self.link == "service"

    @property
    def takes_cores(self) -> bool:
        """Whether the draft has some of the target's cores for itself."""
        return self.link == "process"


@dataclass(frozen=True)
class Placed:
    """The placement of an engine's draft, and why: asked, tuned, untuned (assumed), only (there is no other)."""

    placement: Placement
    why: str


def possible_placements(n_cores: int, threads: int | None = None) -> list[Placement]:
    """The placements on so many cores; the first takes no core from the target, the others at most half of them.

    >>> [each.threads for each in possible_placements(9)[1:]], [each.threads for each in possible_placements(9, 3)[1:]]
    ([1, 2, 4], [3])
    """
    sizes = [threads] if threads is not None else [2**n for n in range(n_cores.bit_length())]
    if os.name != "posix":  # a process inherits its socket
        return [Placement()]
    return [Placement(), *(Placement("process", n) for n in sizes if n <= n_cores // 2)]


def fastest(rates: Rates, allowed: Sequence[Placement]) -> Placement | None:
    """The fastest of the allowed placements by what was measured; None if one of them was not measured.

    A batch of b rows counts 1 / b, because the placement cannot change with the batch and small ones are usual where a
    CPU drafts. An earlier placement is kept unless a later one is faster beyond noise.

    >>> inline, apart = possible_placements(2)
    >>> print(fastest({inline: {1: 100.0, 8: 300.0}, apart: {1: 120.0, 8: 290.0}}, [inline, apart]))
    own process, 1 core
    >>> print(fastest({inline: {1: 100.0}, apart: {1: 101.0}}, [inline, apart]))
    in the target's thread
    >>> fastest({inline: {1: 100.0}}, [inline, apart])
    """
    if not allowed or any(each not in rates for each in allowed):
        return None
    batches = set.intersection(*(set(rates[each]) for each in allowed))
    if not batches:
        return None
    best = allowed[0]
    for each in allowed[1:]:
        gain = math.fsum(math.log(rates[each][b] / rates[best][b]) / b for b in batches)
        if gain > math.log(BETTER) * math.fsum(1 / b for b in batches):
            best = each
    return best


def choose_placement(
    config: EngineConfig, method: Method, rates: Rates, *, draft_on: str, target_on: str, n_cores: int
) -> Placed:
    """Choose where the draft runs. draft_on, target_on: the kinds of their devices.

    A method that always prepares gets a process if there is a core for it, tuned or not: preparing in the target's
    thread would hide nothing. So does a draft on a CPU beside a target on a GPU, which needs no core.

    >>> from saguaro.method import find_method
    >>> kinds = {"draft_on": "cpu", "target_on": "cpu", "n_cores": 8}
    >>> served = EngineConfig(draft="tcp://box")
    >>> [choose_placement(served, find_method(name), {}, **kinds).placement.link for name in ("ssd", "ngram")]
    ['service', 'inline']
    """
    if config.is_served and method.needs_model:
        return Placed(Placement("service"), "only")
    threads = config.draft_threads or 1
    allowed = possible_placements(n_cores, config.draft_threads)
    if config.link != "auto":
        same = [each for each in allowed if each.link == config.link]
        found = fastest(rates, same) if config.draft_threads is None else None
        return Placed(found or Placement(config.link, threads), "asked")
    if not method.prepares or draft_on != "cpu" or len(allowed) < 2:
        return Placed(Placement(), "only")
    found = fastest(rates, allowed)
    if found is not None:
        return Placed(found, "tuned")
    is_forced = method.prepare == "always" or target_on != "cpu"
    return Placed(Placement("process", threads) if is_forced and n_cores > threads + 1 else Placement(), "untuned")


def state_of(rates: Rates) -> dict[str, Any]:
    """Rates as plain JSON values.

    >>> state_of({Placement("process", 2): {1: 3.5}})
    {'placements': [{'link': 'process', 'threads': 2, 'tok_s': {'1': 3.5}}]}
    """
    each = ((place, {str(batch): rate for batch, rate in found.items()}) for place, found in rates.items())
    return {"placements": [{"link": place.link, "threads": place.threads, "tok_s": found} for place, found in each]}


def rates_of(state: Mapping[str, Any]) -> dict[Placement, dict[int, float]]:
    """The same, read back; raises KeyError, TypeError, ValueError or AttributeError if it is damaged."""
    rates = {}
    for each in state["placements"]:
        found = {int(batch): float(rate) for batch, rate in each["tok_s"].items()}
        if each["link"] not in ("inline", "process") or not all(b >= 1 and 0 < r < math.inf for b, r in found.items()):
            raise ValueError(f"{each!r} is no placement that was measured")
        rates[Placement(each["link"], int(each["threads"]))] = found
    return rates

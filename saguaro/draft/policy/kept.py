"""What was learnt, kept in a file from one start to the next.

The file is JSON, named after a digest of the circumstances it was learnt in: machine, models and settings. It is
written to a temporary file that then takes its place, so readers never see a part of it. A file that cannot be read, is
damaged, or was written in other circumstances is ignored: learning starts anew. Nothing depends on it but speed.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FORMAT = 2  # of the file
FIRST_S, EVERY_S = 3.0, 30.0  # seconds until it is written for the first time, and between two times

MOST = 1e15  # of a number: sums of larger ones could overflow

State = dict[str, Any]  # plain JSON values


@dataclass(frozen=True)
class KeptFile:
    """A file, and the circumstances in which its content holds."""

    path: Path
    facts: Mapping[str, Any]

    def read(self) -> State | None:
        """What it says; None if there is none that fits."""
        return read(self.path, self.facts)

    def write(self, state: State) -> None:
        """Replace it. Raises OSError if that fails."""
        write(self.path, self.facts, state)


class Kept:
    """The file of one engine's draft side, written now and then."""

    def __init__(self, path: Path, facts: Mapping[str, Any], now: Callable[[], float]) -> None:
        self.path, self._facts, self._now = path, dict(facts), now
        self._due = now() + FIRST_S

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return self._now() >= self._due

    def read(self) -> State | None:
        """What the file says; None if there is none that fits."""
        return read(self.path, self._facts)

    def write(self, state: State) -> None:
        """Replace the file. If that fails, nothing is kept."""
        self._due = self._now() + EVERY_S
        try:
            write(self.path, self._facts, state)
        except OSError as e:
            log.debug("what was learnt cannot be kept in %s: %s", self.path, e)
            self._due = math.inf


def write(path: Path, facts: Mapping[str, Any], state: State) -> None:
    """Replace a file by what was learnt in these circumstances. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, temporary = tempfile.mkstemp(prefix="partial-", dir=path.parent)
    try:
        with os.fdopen(number, "w") as file:
            json.dump({"format": FORMAT, "facts": dict(facts), "learnt": state}, file)
        Path(temporary).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read(path: Path, facts: Mapping[str, Any]) -> State | None:
    """What a file says that was written in these circumstances."""
    try:
        found = json.loads(path.read_text())
        if found["format"] == FORMAT and found["facts"] == facts and isinstance(found["learnt"], dict):
            return dict(found["learnt"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        log.warning("%s is ignored, it is damaged: %s", path, e)
    return None


def file_name(facts: Mapping[str, Any]) -> str:
    """The name of the file for these circumstances.

    >>> file_name({"target": "a"}) == file_name({"target": "b"})
    False
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def numbers(values: Any, n: int | None = None) -> list[float]:
    """Check that these are n numbers, not negative and not above MOST, as all sums and counts are.

    >>> numbers([1, 2.5], 2)
    [1.0, 2.5]
    """
    if not isinstance(values, list) or (n is not None and len(values) != n):
        raise ValueError(f"{values!r} is not a list of {n} numbers")
    found = [float(value) for value in values]
    if not all(0 <= value <= MOST for value in found):
        raise ValueError(f"a number is not between 0 and {MOST:g}")
    return found

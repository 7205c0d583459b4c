"""The folder of a report: one file for each finished cell, written under another name and renamed.

    DIR/cells/NAME.json    {"fingerprint": ..., "measured": {...}, ...}
    DIR/report.json        all of them, and what they depend on
    DIR/report.html        the page

Invariant: a cell's file is complete, or not there. It counts if its fingerprint is that of the cell as it would be
measured now: same settings, prompts, models, versions, code and machine.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from saguaro.errors import ConfigError
from saguaro.report.cell import Cell

OUTSIDE = ("cli", "serve", "client", "distill")  # parts of the package that measure nothing
Finished = dict[str, Any]


class Store:
    """Finished cells. basis: what all cells depend on; pairs: what the cells of each pair do."""

    def __init__(self, folder: Path, basis: Mapping[str, Any], pairs: Mapping[str, Any]) -> None:
        self.folder, self._basis, self._pairs = folder, dict(basis), dict(pairs)
        self._cells = folder / "cells"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, and keep other reports out of it."""
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock", timeout=0):
                yield
        except Timeout as e:
            raise ConfigError(f"another report is being measured in {self.folder}; wait, or give another --out") from e
        except OSError as e:
            raise ConfigError(
                f"cannot write to {self.folder} ({e.strerror}); give a folder with room for it with --out"
            ) from e

    def read(self, cell: Cell, texts: list[str]) -> Finished | None:
        """What was measured; None if it was not, or under other conditions."""
        found = self._file(cell)
        return found if found is not None and found["fingerprint"] == self.fingerprint(cell, texts) else None

    def is_outdated(self, cell: Cell, texts: list[str]) -> bool:
        """Whether the cell was measured under other conditions."""
        return self._file(cell) is not None and self.read(cell, texts) is None

    def write(self, cell: Cell, texts: list[str], found: Finished) -> Finished:
        """Keep a finished cell."""
        kept = {"fingerprint": self.fingerprint(cell, texts), "cell": asdict(cell), **found}
        write_whole(self._path(cell), json.dumps(kept, indent=1) + "\n")
        return kept

    def fingerprint(self, cell: Cell, texts: list[str]) -> str:
        """Digest of everything that the cell depends on."""
        return digest([self._basis, self._pairs.get(cell.pair), asdict(cell), texts])

    def _file(self, cell: Cell) -> Finished | None:
        try:
            found = json.loads(self._path(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or damaged by others
            return None
        return found if isinstance(found, dict) and {"fingerprint", "measured"} <= set(found) else None

    def _path(self, cell: Cell) -> Path:
        return self._cells / f"{slug(cell.name)}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file, or leave the one that was there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def slug(name: str) -> str:
    """A name as a file name.

    >>> slug("ranks, questions, T=0.7")
    'ranks-questions-T-0.7'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def digest(value: Any) -> str:
    """
    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def code_digest() -> str:
    """Digest of the code that decodes and measures. Not of what only draws: pages may be made anew at any time."""
    root, own = Path(__file__).parent.parent, Path(__file__).parent
    files = [path for kind in ("*.py", "*.h", "*.c") for path in root.rglob(kind)]
    known = [path for path in files if path.relative_to(root).parts[0] not in (*OUTSIDE, own.name)]
    measures = [*sorted(known), own / "measure.py", own / "engines.py"]
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in measures])


def files_of(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a model's files: whether it was changed."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]

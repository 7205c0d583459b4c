"""cpu.c as a shared library, compiled for this machine on first use and cached in __pycache__.

Without a C compiler there is no library, and asking for it raises an error.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import ConfigError

SOURCE = Path(__file__).parent / "c" / "cpu.c"  # includes the other files of its folder
COMPILERS = ("gcc", "cc", "clang")
# No -ffast-math: it would change the handling of denormal numbers in the whole process.
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip

_P, _I, _F, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64
_ARGUMENTS: dict[str, list[Any]] = {
    "advance": [_P, _P, _P, _P, _P, _P, ctypes.c_int64, _I, _I, _I, _P],
    "land": [_P, _P, _P, _I, _I, _P, _P, _P, _P, _P],
    "settle": [_P, _P],
    "show": [_P, _P, _P, _I, _I, _I, _P, _I],
    "worth": [_P, _I, _F, _P],
    "int8_format": [_P, _P, _P],
    "exchange": [_P, _I, _I, _L, _P, _L, _P, ctypes.c_double],
    "shared_bytes": [_I, _L],
    # each: the number of threads, then
    "prepare_rows": [_I, _P, _I, _I, _I, _P, _F, _I, _P, _P],
    "read_rows": [_I, _P, _P, _P, _I, _P, _P, _P],
    "read_heads": [_I, _P, _P, _P, _I, _P, _I, _I, _I, _P, _P, _F, _P, _P, _P, _P, _P],
    "read_gated": [_I, _P, _P, _P, _I, _P, _P],
    "write_rows": [_I, _P, _P, _I, _P, _P, _P, _F, _I, _I, _P, _P, _P],
    "attend": [_I, _P, _I, _I, _I, _I, _I, _F, _P, _P, _I, _P, _P, _P],
    "forward": [_I, _P, _P, _P],
    "unpack": [_I, _I, _P, _I, _I, _I, _P, _P, _I],
    "unpack_scaled": [_I, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _P, _P, _I],
    "rank": [_I, _P, _I, _I, _I, _P, _P, _P, _I, _I, _P, _P],
}


def library() -> ctypes.CDLL:
    """The library; ConfigError with the reason if it is not available."""
    found = find()
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def is_there() -> bool:
    """Whether the library is available."""
    return not isinstance(find(), str)


@functools.cache
def find() -> ctypes.CDLL | str:
    """The library, or the reason why it is not available; cached."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"no C compiler ({', '.join(COMPILERS)}) was found; install gcc or clang"
    try:
        return _load(compiler, SOURCE.parent / "__pycache__")
    except OSError:  # the folder is not writable or not executable, or the compiler failed
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="saguaro-") as folder:  # a loaded library does not need its file
            return _load(compiler, Path(folder))
    except OSError as e:
        return f"{compiler} could not compile {SOURCE.name} for {SOURCE.parent} or a temporary folder: {e}"


@dataclass(frozen=True)
class Int8Format:
    """How int8 products want their operands (dots.h)."""

    together: int  # inputs that lie side by side in a weight matrix
    zero: int  # added to the steps of input rows
    inputs: torch.dtype  # of input rows


@functools.cache
def int8_format() -> Int8Format:
    """The format of this machine."""
    found = [ctypes.c_int32() for _ in range(3)]
    library().int8_format(*map(ctypes.byref, found))
    together, zero, n_bytes = (each.value for each in found)
    return Int8Format(together, zero, torch.int16 if n_bytes == 2 else torch.uint8 if zero else torch.int8)


def at(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()


_team = threading.local()  # n: the number of threads within own_threads


def n_threads() -> int:
    """How many threads a call of the library uses: as many as torch's operations use outside of own_threads."""
    return getattr(_team, "n", None) or torch.get_num_threads()


@contextmanager
def own_threads() -> Iterator[None]:
    """In this thread, let torch's operations run on one thread; calls of the library use as many as before.

    Between calls of the library there are only small operations. Waking torch's threads for one takes 0.3 ms, and with
    other work on the machine several times as long.
    """
    n, before, of_torch = n_threads(), getattr(_team, "n", None), torch.get_num_threads()
    _team.n = n
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _team.n = before
        torch.set_num_threads(of_torch)


def _load(compiler: str, folder: Path) -> ctypes.CDLL:
    """Load the library from this folder; compile it first if it is missing."""
    path = folder / f"cpu-{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    found = ctypes.CDLL(str(path))
    for function, arguments in _ARGUMENTS.items():
        getattr(found, function).argtypes, getattr(found, function).restype = arguments, None
    found.advance.restype = found.settle.restype = found.unpack.restype = found.exchange.restype = _I
    found.shared_bytes.restype = _L
    return found


def _key(compiler: str) -> str:
    """Hash of everything that the library depends on: source, flags, and the compiler's macros for this machine."""
    about = subprocess.run(
        [compiler, *FLAGS[:2], "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, check=False
    ).stdout
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join([*sources, about, *(flag.encode() for flag in FLAGS)])).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="cpu-") as folder:
        made = Path(folder) / path.name
        # source before flags: the linker resolves symbols of earlier arguments
        done = subprocess.run(
            [compiler, str(SOURCE), "-o", str(made), *FLAGS, "-lm"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise OSError(done.stderr.strip()[-500:])
        made.replace(path)

"""cpu.c as a library, compiled for this machine when it is first needed and kept as Python keeps its bytecode.

A machine without a C compiler has no such library, and says so where it is asked for.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import ConfigError

SOURCE = Path(__file__).with_name("cpu.c")
COMPILERS = ("gcc", "cc", "clang")
# No -ffast-math: it would change how the whole process treats the smallest numbers.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

ALONE = ["-DALONE"]  # on one thread; the name says so in the key

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "prepare_rows": [_P, _I, _I, _I, _P, _F, _I, _P, _P],
    "read_rows": [_P, _P, _P, _I, _P, _P, _P],
    "read_heads": [_P, _P, _P, _I, _P, _I, _I, _I, _P, _P, _F, _P, _P, _P, _P, _P],
    "read_gated": [_P, _P, _P, _I, _P, _P],
    "write_rows": [_P, _P, _I, _P, _P, _P, _F, _I, _I, _P, _P, _P],
    "attend": [_P, _I, _I, _I, _I, _I, _P, _P, _I, _P, _P, _P],
    "rank": [_P, _I, _I, _I, _P, _P, _P, _I, _I, _P, _P],
}


def library() -> ctypes.CDLL:
    """The library; a ConfigError that says why where there can be none."""
    found = find()
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def is_there() -> bool:
    """Whether this machine has the library."""
    return not isinstance(find(), str)


@functools.cache
def find() -> ctypes.CDLL | str:
    """The library, or why there can be none; sought once."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"no C compiler ({', '.join(COMPILERS)}) was found; install gcc or clang"
    reason = ""
    for flags in filter(None, (_threads(), ALONE)):  # clang's threads are not those of torch: then alone
        try:
            return _load(compiler, [*FLAGS, *flags], SOURCE.parent / "__pycache__")
        except OSError:  # a folder that cannot be written to, or run from, or a compiler that fails
            pass
        try:
            with tempfile.TemporaryDirectory(prefix="saguaro-") as folder:  # what is loaded needs its file no more
                return _load(compiler, [*FLAGS, *flags], Path(folder))
        except OSError as e:
            reason = str(e)
    return f"{compiler} could not compile {SOURCE.name} for {SOURCE.parent} or a temporary folder: {reason}"


def at(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements lie, one after the other."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()


def _threads() -> list[str]:
    """How to share the threads of torch: by the very library that it came with."""
    home = Path(torch.__file__).parent
    found = sorted([*(home / "lib").glob("libgomp*.so*"), *(home.parent / "torch.libs").glob("libgomp*.so*")])
    return ["-fopenmp", str(found[0]), f"-Wl,-rpath,{found[0].parent}", "-Wl,--as-needed"] if found else []


def _load(compiler: str, flags: list[str], folder: Path) -> ctypes.CDLL:
    """The library out of this folder; compiled first if it is not there."""
    path = folder / f"cpu-{_key(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    found = ctypes.CDLL(str(path))
    for function, arguments in _ARGUMENTS.items():
        getattr(found, function).argtypes, getattr(found, function).restype = arguments, None
    return found


def _key(compiler: str, flags: list[str]) -> str:
    """What the library depends on: source, flags, compiler, and what it knows of the machine."""
    about = subprocess.run(
        [compiler, *FLAGS[:2], "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, check=False
    ).stdout
    return hashlib.sha256(b"\0".join([SOURCE.read_bytes(), about, *(flag.encode() for flag in flags)])).hexdigest()[:16]


def _compile(compiler: str, flags: list[str], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="cpu-") as folder:
        made = Path(folder) / path.name
        # the source before the flags: libraries are searched for what stands before them
        done = subprocess.run(
            [compiler, str(SOURCE), "-o", str(made), *flags, "-lm"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise OSError(done.stderr.strip()[-500:])
        made.replace(path)

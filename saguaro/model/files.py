"""Checks on the files of a model folder. Each must have a plain name and be a regular file, or a link to one.

The Hub's cache consists of links, so a link may lead out of the folder. A name stored in a model file may not: it must
name a file in the same folder. Pipes and devices are refused before they are opened, since reading one can block
forever.
"""

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from saguaro.errors import CorruptModel, ModelNotFound

MOST_JSON = 16 * 2**20  # bytes of config.json, or of an index of weights; parsing takes thirty times as much memory
LONGEST_NAME = 255  # bytes of a file name, the limit of file systems


def is_there(path: Path, most_bytes: int | None = None) -> bool:
    """Whether the file exists; an error if it is not a regular file or has more than most_bytes."""
    try:
        found = path.stat()
    except FileNotFoundError as e:
        if path.is_symlink():
            raise CorruptModel(f"{path} is a link to {brief(str(path.readlink()))}, which is not there; {AGAIN}") from e
        return False
    except (OSError, ValueError) as e:  # no permission, a cycle of links, a name that is too long or has a NUL
        raise CorruptModel(f"{shortened(path)} cannot be read ({_reason(e)}); {AGAIN}") from e
    if not stat.S_ISREG(found.st_mode):
        raise CorruptModel(f"{path} is {_kind(found.st_mode)}, not a file; {AGAIN}")
    if most_bytes is not None and found.st_size > most_bytes:
        raise CorruptModel(f"{path} is {found.st_size} bytes long; at most {most_bytes} are read: {AGAIN}")
    return True


def neighbour(path: Path, name: object) -> Path:
    """The file of this name in the folder of path. The name comes from path's content and must be a plain file name.

    >>> neighbour(Path("m/model.safetensors.index.json"), "a.safetensors")
    PosixPath('m/a.safetensors')
    """
    is_plain = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
    if not isinstance(name, str) or not is_plain or len(name.encode(errors="replace")) > LONGEST_NAME:
        raise CorruptModel(
            f"{path} names {brief(name)}; it must be the name of a file beside it, of at most {LONGEST_NAME} bytes "
            f"and without slashes: {AGAIN}"
        )
    return path.parent / name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    if not is_there(path, MOST_JSON):
        raise ModelNotFound(
            f"{path.parent} has no {path.name}; a model folder holds config.json, weights and tokenizer"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:  # JSONDecodeError, UnicodeDecodeError, thousands of digits or brackets
        raise CorruptModel(f"{path} is not valid JSON ({_reason(e)}); {AGAIN}") from e
    except OSError as e:
        raise CorruptModel(f"{path} cannot be read ({_reason(e)}); {AGAIN}") from e
    if not isinstance(content, dict):
        raise CorruptModel(f"{path} holds {type(content).__name__}, not an object; {AGAIN}")
    return content


def brief(value: object) -> str:
    """A value shortened for an error message.

    >>> brief("a" * 5000), brief([[[[1]]]])
    ("'aaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaa'", '[[[...]]]')
    """
    return _SHORT.repr(value)


def shortened(name: Path | str) -> str:
    """A path or name shortened for an error message."""
    text = str(name)
    return text if len(text) <= 500 else f"{text[:240]}...{text[-240:]}"


AGAIN = "download the model again"
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 43, 43, 43


def _reason(e: Exception) -> str:
    if isinstance(e, OSError):
        return e.strerror or str(e)
    return str(e) or type(e).__name__


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")

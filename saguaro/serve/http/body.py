"""A body: from bytes to a checked model. What it may hold is bounded before anything is built of it.

A request may be as large as --max-body and consist of millions of tiny values. Building these takes seconds and
gigabytes, and the others wait: so values are counted in the bytes first. Long texts and long lists of token ids are one
piece to the counter, so it costs little for what people really send.
"""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from saguaro.serve.http.errors import APIError

B = TypeVar("B", bound=BaseModel)

MAX_VALUES = 2**16  # objects, lists, texts (names of fields among them) and rows of numbers in one body
MAX_NUMBERS = 2**19  # numbers in these rows: token ids
SMALL = 2**15  # bytes of a body that is read on the event loop: it takes some milliseconds at most

# Pieces of a JSON text, each in time proportional to its length: no alternative gives back what it took.
_PIECES = re.compile(
    rb"""
      (?P<between> [^"\d\[{a-zA-Z-]++ )
    | (?P<numbers> [-\d] [-+.\deE,\s]*+ )         # in a row
    | "[^"\\]*+ (?:\\. [^"\\]*+)*+ (?:"|\\?\Z)    # a text, or one without an end
    | [\[{]
    | [a-zA-Z]++                                  # true, false, null
    """,
    re.DOTALL | re.VERBOSE,
)


def read_body(kind: type[B], raw: bytes) -> B:
    """The model of a body; raises an APIError that says what is wrong with it, the first thing only."""
    check_size(raw)
    try:
        data = from_json(raw)
    except ValueError as e:
        raise APIError(400, f"the body is not JSON: {e}") from e
    try:
        return kind.model_validate(data)
    except ValidationError as e:
        raise validation_error(e.errors(include_url=False, include_input=False, include_context=False)) from e


def check_size(raw: bytes) -> None:
    """Refuse a body of too many values.

    >>> check_size(b'{"prompt": ["a", "b"]}')
    >>> check_size(b"[" + b"{}," * 2**16 + b"{}]")
    Traceback (most recent call last):
    saguaro.serve.http.errors.APIError: the body holds more than 65536 values; send less
    """
    if len(raw) <= MAX_VALUES:  # every value takes a byte
        return
    n_values = n_numbers = 0
    for piece in _PIECES.finditer(raw):
        if piece.lastgroup == "between":
            continue
        n_values += 1
        if n_values > MAX_VALUES:
            raise APIError(400, f"the body holds more than {MAX_VALUES} values; send less")
        n_numbers += piece[0].count(b",") + 1 if piece.lastgroup == "numbers" else 0
        if n_numbers > MAX_NUMBERS:
            raise APIError(400, f"the body holds more than {MAX_NUMBERS} numbers; send less")


def validation_error(errors: list[Any]) -> APIError:
    """What is wrong, by the name that the client knows it by. Of alternatives, what came closest went deepest."""
    first = max(errors, key=lambda error: len(error["loc"]))
    # In a union pydantic names the alternatives, such as list[str]: no part of what the client wrote.
    place = [str(part) for part in first["loc"]]
    known = [part for part in place if re.fullmatch(r"[a-z_]+|\d+", part) and part not in ("str", "int")]
    param = ".".join(known) or None
    return APIError(400, f"{param or 'the body'}: {first['msg']}", param=param)

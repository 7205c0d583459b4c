"""Parses a request body into a checked model. The number of values is limited before anything is built.

A request may be as large as --max-body and consist of millions of tiny values. Building them takes seconds and
gigabytes, and delays other requests, so values are counted in the bytes first. A long text or list of token ids is one
piece for the counter, so it is cheap for typical requests.
"""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from saguaro.serve.http.errors import APIError

B = TypeVar("B", bound=BaseModel)

MAX_VALUES = 2**16  # objects, lists, texts (field names included) and rows of numbers in one body
MAX_NUMBERS = 2**19  # numbers in these rows: token ids
SMALL = 2**15  # bytes of a body that is parsed on the event loop: takes a few milliseconds at most

# Pieces of JSON text, each matched in linear time: the patterns are possessive.
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
    """Parse a body. Raises an APIError for the first problem."""
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
    """Refuse a body with too many values.

    >>> check_size(b'{"prompt": ["a", "b"]}')
    >>> check_size(b"[" + b"{}," * 2**16 + b"{}]")
    Traceback (most recent call last):
    saguaro.serve.http.errors.APIError: the body holds more than 65536 values; send less
    """
    if len(raw) <= MAX_VALUES:  # every value takes at least a byte
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
    """The error, with the client's name of the field. Of alternatives, the deepest location is the closest match."""
    first = max(errors, key=lambda error: len(error["loc"]))
    # In a union pydantic adds the names of alternatives, such as list[str], which are not in the body.
    place = [str(part) for part in first["loc"]]
    known = [part for part in place if re.fullmatch(r"[a-z_]+|\d+", part) and part not in ("str", "int")]
    param = ".".join(known) or None
    return APIError(400, f"{param or 'the body'}: {first['msg']}", param=param)

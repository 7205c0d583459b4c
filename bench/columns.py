"""Tables printed line by line: columns by name, each with its format."""

from collections.abc import Mapping


def line_of(columns: Mapping[str, str], values: Mapping[str, object] | None = None) -> str:
    """The values in their columns; - where there is none. Without values, the names.

    >>> columns = {"cell": "<6", "tok_s": ">7.1f", "batch": ">5"}
    >>> line_of(columns)
    'cell      tok_s  batch'
    >>> line_of(columns, {"cell": "sd:4", "tok_s": 99.25})
    'sd:4       99.2      -'
    """
    if values is None:
        values = {name: name for name in columns}
    parts = []
    for name, form in columns.items():
        value, place = values.get(name), form.partition(".")[0]
        shown = "-" if value is None else value
        parts.append(format(shown, form if isinstance(shown, float) else place))
    return "  ".join(parts)

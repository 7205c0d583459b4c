"""Server-sent events: lines of a stream, read as the data of its events."""

from collections.abc import Iterable, Iterator


def event_data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each complete event. Comments and other fields are skipped.

    >>> list(event_data([b": hello", b"data: 1", b"", b"event: x", b"data: 2", b"data:3", b"", b"data: cut"]))
    ['1', '2\\n3']
    """
    data: list[str] = []
    for line in lines:
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []

"""Which replica serves a session."""

import hashlib
from collections.abc import Sequence


def replica_of(session: str, replicas: Sequence[str]) -> str:
    """The replica of a session, the same in every proxy. If a replica ends, the sessions of others stay.

    >>> [replica_of(name, ["a", "b", "c"]) for name in ("1", "2", "3", "5")]
    ['c', 'b', 'a', 'b']
    >>> [replica_of(name, ["a", "b"]) for name in ("1", "2", "3", "5")]
    ['b', 'b', 'a', 'b']
    """
    return max(replicas, key=lambda replica: hashlib.sha256(f"{session}/{replica}".encode()).digest())

"""The process of a rank: python -m saguaro.parallel.worker LINK LIFE PARENT SHARED. Started by parallel.process.

Invariant: it ends as soon as rank 0 does, even while a model loads or a step runs. It ignores the signals that end a
program, because rank 0 may have requests to finish. LINK and LIFE are socket descriptors, PARENT is a process id, and
SHARED a descriptor of shared memory or empty.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from saguaro.link.worker import end_with


def main(arguments: Sequence[str]) -> NoReturn:
    """Follow rank 0 until it ends."""
    link, life = (socket.socket(fileno=int(number)) for number in arguments[:2])
    for one in (link, life):
        one.set_inheritable(False)  # child processes must not keep them open
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(life, int(arguments[2])), daemon=True).start()
    from saguaro.parallel.rank import serve  # after the life line is watched: torch takes seconds to load

    status = serve(link, int(arguments[3]) if arguments[3] else None)
    sys.stdout.flush()
    os._exit(status)  # a normal interpreter exit takes torch half a second


if __name__ == "__main__":
    main(sys.argv[1:])

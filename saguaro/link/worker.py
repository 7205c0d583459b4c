"""The draft process: python -m saguaro.link.worker LINK LIFE PARENT THREADS CORES. Started by link.child.

Invariant: it ends as soon as its parent does, even while a model loads or a draft step runs.

LINK and LIFE are socket descriptors, PARENT is a process id, CORES is a list such as 0,1 or empty. Only the standard
library is imported before the life line is watched and the cores are set, because torch takes seconds to load.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from saguaro.config import DraftConfig
    from saguaro.link.answer import Side


def main(arguments: Sequence[str], build_side: "Callable[[DraftConfig], Side]") -> NoReturn:
    """Run the draft until the other end closes."""
    link, life = (socket.socket(fileno=int(number)) for number in arguments[:2])
    for one in (link, life):
        one.set_inheritable(False)  # child processes must not keep them open
    parent, threads, cores = int(arguments[2]), int(arguments[3]), arguments[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends this process
    threading.Thread(target=end_with, args=(life, parent), daemon=True).start()
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    import torch

    from saguaro.link.answer import serve

    torch.set_num_threads(threads)
    status = serve(link, build_side)
    sys.stdout.flush()
    os._exit(status)  # a normal interpreter exit takes torch half a second


def end_with(life: socket.socket, parent: int) -> None:
    """Exit when the life line closes or the parent changes; a fork of the parent may keep the line open."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def build_draft(config: "DraftConfig") -> "Side":
    """Load the draft and build its side."""
    import torch

    from saguaro import methods
    from saguaro.draft.load import load_draft

    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return methods.warm_side(config, load_draft(config, None) if config.draft is not None else None)


if __name__ == "__main__":
    main(sys.argv[1:], build_draft)

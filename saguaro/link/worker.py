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
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from saguaro.config import DraftConfig
    from saguaro.link.channel import Channel
    from saguaro.link.frame import Message, MessageKind
    from saguaro.link.wire import DraftRequest
    from saguaro.types import Joined, Outcome, Speculation


class Side(Protocol):
    """The draft side of a round (saguaro.round.DraftSide, or a test double)."""

    def admit(self, joined: "Sequence[Joined]", /) -> None:
        """Add these rows."""

    def retire(self, slots: Sequence[int], /) -> None:
        """Drop these rows."""

    def respond(self, outcome: "Outcome", slots: Sequence[int], room: Sequence[int], /) -> "Speculation":
        """Commit the outcome and propose tokens."""

    def prepare(self, is_late: Callable[[], bool], /) -> None:
        """Prepare the next speculations; stop when is_late() is true."""

    def keep(self) -> None:
        """Write what was learnt, if there is a file for it. Called at the end."""


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

    torch.set_num_threads(threads)
    status = serve(link, build_side)
    sys.stdout.flush()
    os._exit(status)  # a normal interpreter exit takes torch half a second


def serve(link: socket.socket, build_side: "Callable[[DraftConfig], Side]") -> int:
    """Build the draft side and answer requests until the other end closes. Returns the exit status."""
    from saguaro.errors import SaguaroError
    from saguaro.link.channel import Channel
    from saguaro.link.frame import MessageKind, WireError
    from saguaro.link.wire import MAX_WORDS, encode_text

    channel = Channel(link, MAX_WORDS)
    try:
        _answer(channel, build_side)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the other end is gone
    except WireError:
        traceback.print_exc()
        return 1  # do not reply to an invalid message
    except Exception as e:
        traceback.print_exc()  # the link shows this output if the message is lost
        text = str(e) if isinstance(e, SaguaroError) else f"{type(e).__name__}: {e}"
        _send(channel, MessageKind.FAILED, encode_text(text))
        return 1
    raise AssertionError("turns ended by themselves")


def _answer(channel: "Channel", build_side: "Callable[[DraftConfig], Side]") -> None:
    """Read the settings, then loop: respond, and prepare while the target verifies."""
    from saguaro.link.frame import MessageKind
    from saguaro.link.wire import WireLimits, decode_request, decode_settings, encode_reply

    config = decode_settings(_next(channel, MessageKind.SETTINGS).body)
    limits = WireLimits.of(config)
    side = build_side(config)
    channel.limit = limits.n_turn
    _send(channel, MessageKind.READY, [])
    known: set[int] = set()
    while True:
        try:
            message = _next(channel, MessageKind.TURN)
        except (EOFError, ConnectionResetError):
            side.keep()
            raise
        turn = decode_request(message.body, limits)
        _introduce(side, turn, known)
        spec = side.respond(turn.outcome, turn.slots, turn.room)
        _send(channel, MessageKind.REPLY, encode_reply(spec))
        side.prepare(channel.has_news)


def _introduce(side: Side, turn: "DraftRequest", known: set[int]) -> None:
    """Drop rows that left or whose slot is reused, then add the new rows."""
    joining = {row.slot for row in turn.joined}
    leaving = (known if turn.is_afresh else known & joining) | set(turn.left)
    side.retire(sorted(leaving))
    side.admit(turn.joined)
    known -= leaving
    known |= joining


def _next(channel: "Channel", kind: "MessageKind") -> "Message":
    """Wait for the next message, and check its kind and number."""
    from saguaro.link.frame import WireError

    before = channel.received
    while (message := channel.receive()) is None:
        channel.wait(None)
    if message.kind is not kind or message.sequence != before + 1:
        given = f"a {message.kind.name} numbered {message.sequence}"
        raise WireError(f"{given} came where a {kind.name} numbered {before + 1} was due")
    return message


def _send(channel: "Channel", kind: "MessageKind", parts: Sequence[memoryview]) -> None:
    """Reply to the last message."""
    channel.post(kind, channel.received, parts)
    while not channel.flush():
        channel.wait(None)


def end_with(life: socket.socket, parent: int) -> None:
    """Exit when the life line closes or the parent changes; a fork of the parent may keep the line open."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def build_draft(config: "DraftConfig") -> Side:
    """Load the draft and build its side. On a GPU its steps are captured now, not in the first rounds."""
    import torch

    from saguaro import methods
    from saguaro.device.graphs import captured_sizes
    from saguaro.draft.load import load_draft
    from saguaro.kernels.bundle import kernels_for

    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = load_draft(config, None) if config.draft is not None else None
    kernels = kernels_for(device)
    side = methods.draft_side(config, model, kernels)
    for size in captured_sizes(config.max_rows) if kernels is not None else ():
        side.warm(size)
    return side


if __name__ == "__main__":
    main(sys.argv[1:], build_draft)

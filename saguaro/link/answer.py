"""The draft's end of a link: reads requests and answers them, whatever the messages travel over."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from socket import socket
from typing import Protocol

from saguaro.config import DraftConfig
from saguaro.errors import SaguaroError
from saguaro.link.channel import Channel
from saguaro.link.frame import Message, MessageKind, WireError
from saguaro.link.wire import (
    MAX_WORDS,
    DraftRequest,
    WireLimits,
    decode_request,
    decode_settings,
    encode_reply,
    encode_text,
)
from saguaro.types import Joined, Outcome, Speculation

IsLate = Callable[[], bool]  # whether the next request has arrived
GONE = (EOFError, BrokenPipeError, ConnectionResetError)  # the other end is gone


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


class Turns(Protocol):
    """When a draft may compute."""

    def request(self) -> AbstractContextManager[object]:
        """Context for what the target waits for."""

    def preparation(self, is_late: IsLate) -> AbstractContextManager[IsLate]:
        """Context for a preparation, and what it asks between two steps."""


class AnyTime:
    """A draft that shares its cores with none may always compute."""

    def request(self) -> AbstractContextManager[object]:
        """See Turns."""
        return nullcontext()

    def preparation(self, is_late: IsLate) -> AbstractContextManager[IsLate]:
        """See Turns."""
        return nullcontext(is_late)


def serve(link: socket, build_side: Callable[[DraftConfig], Side]) -> int:
    """Build the draft side and answer requests until the other end closes. Returns the exit status of a process."""
    channel = Channel(link, MAX_WORDS)
    try:
        answer(channel, build_side, AnyTime())
    except GONE:
        return 0
    except WireError:
        traceback.print_exc()
        return 1  # do not reply to an invalid message
    except Exception as e:
        traceback.print_exc()  # the link shows this output if the message is lost
        send(channel, MessageKind.FAILED, encode_text(words_of(e)))
        return 1
    raise AssertionError("turns ended by themselves")


def answer(channel: Channel, build_side: Callable[[DraftConfig], Side], turns: Turns) -> None:
    """Read the settings, then loop: respond, and prepare while the target verifies."""
    config = decode_settings(_next(channel, MessageKind.SETTINGS).body)
    limits = WireLimits.of(config)
    with turns.request():
        side = build_side(config)
    channel.limit = limits.n_turn
    send(channel, MessageKind.READY, [])
    known: set[int] = set()
    while True:
        try:
            message = _next(channel, MessageKind.TURN)
        except (EOFError, OSError):
            side.keep()
            raise
        request = decode_request(message.body, limits)
        with turns.request():
            _introduce(side, request, known)
            spec = side.respond(request.outcome, request.slots, request.room)
        send(channel, MessageKind.REPLY, encode_reply(spec))
        with turns.preparation(channel.has_news) as is_late:
            side.prepare(is_late)


def send(channel: Channel, kind: MessageKind, parts: Sequence[memoryview]) -> None:
    """Reply to the last message."""
    channel.post(kind, channel.received, parts)
    while not channel.flush():
        channel.wait(None)


def words_of(e: Exception) -> str:
    """What the other end is told of an error."""
    return str(e) if isinstance(e, SaguaroError) else f"{type(e).__name__}: {e}"


def _introduce(side: Side, request: DraftRequest, known: set[int]) -> None:
    """Drop rows that left or whose slot is reused, then add the new rows."""
    joining = {row.slot for row in request.joined}
    leaving = (known if request.is_afresh else known & joining) | set(request.left)
    side.retire(sorted(leaving))
    side.admit(request.joined)
    known -= leaving
    known |= joining


def _next(channel: Channel, kind: MessageKind) -> Message:
    """Wait for the next message, and check its kind and number."""
    before = channel.received
    while (message := channel.receive()) is None:
        channel.wait(None)
    if message.kind is not kind or message.sequence != before + 1:
        given = f"a {message.kind.name} numbered {message.sequence}"
        raise WireError(f"{given} came where a {kind.name} numbered {before + 1} was due")
    return message

"""The draft's end of a link, in a thread: it answers in order, and does not answer whom it cannot understand."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from saguaro.link.channel import Channel
from saguaro.link.frame import Kind, Message
from saguaro.link.wire import Limits, Turn, decode_reply, encode_settings, encode_turn
from saguaro.link.worker import serve
from saguaro.types import Joined
from tests.link.echo import Echo
from tests.link.target import draft_config

CONFIG = draft_config()


class Draft:
    """A worker, its side, and our end of the link."""

    def __init__(self, link: socket.socket, theirs: socket.socket) -> None:
        self.channel, self.sides, self.status = Channel(link, 10**6), list[Echo](), -1
        self.thread = threading.Thread(target=self._serve, args=(theirs,))
        self.thread.start()

    def ask(self, kind: Kind, sequence: int, parts: Sequence[memoryview]) -> Message:
        """Send a message and wait for the answer. EOFError: there is none."""
        self.channel.post(kind, sequence, parts)
        while (message := self.channel.exchange()) is None:
            self.channel.wait(None)
        return message

    def _build(self, config: object) -> Echo:
        assert config == CONFIG
        self.sides.append(Echo(CONFIG))
        return self.sides[-1]

    def _serve(self, theirs: socket.socket) -> None:
        with theirs:
            self.status = serve(theirs, self._build)


@contextmanager
def draft() -> Iterator[Draft]:
    """A worker that waits for its settings."""
    ours, theirs = socket.socketpair()
    one = Draft(ours, theirs)
    with ours:
        yield one
    one.thread.join()


def test_settings_then_turns_then_the_end() -> None:
    with draft() as one:
        assert one.ask(Kind.SETTINGS, 1, encode_settings(CONFIG))[:2] == (Kind.READY, 1)
        turn = Turn(joined=[Joined(0, [1]), Joined(1, [2])], slots=[1, 0], room=[2, 9])
        reply = one.ask(Kind.TURN, 2, encode_turn(turn))
        assert reply[:2] == (Kind.REPLY, 2)
        assert decode_reply(reply.body, 2, Limits.of(CONFIG)).length.tolist() == [2, CONFIG.lookahead]
    assert one.status == 0


def test_who_starts_afresh_is_known_for_no_row() -> None:
    with draft() as one:
        one.ask(Kind.SETTINGS, 1, encode_settings(CONFIG))
        one.ask(Kind.TURN, 2, encode_turn(Turn(joined=[Joined(0, [1]), Joined(1, [2]), Joined(2, [3])])))
        one.ask(Kind.TURN, 3, encode_turn(Turn(left=[0], joined=[Joined(1, [5])])))
        assert {slot: row.tokens for slot, row in one.sides[0].rows.items()} == {1: [5], 2: [3]}
        one.ask(Kind.TURN, 4, encode_turn(Turn(is_afresh=True, joined=[Joined(3, [6])])))
        assert list(one.sides[0].rows) == [3]


def refuses(*said: tuple[Kind, int, list[memoryview]]) -> bool:
    """Whether the last of these ends the worker."""
    with draft() as one:
        for message in said[:-1]:
            one.ask(*message)
        try:
            one.ask(*said[-1])
        except EOFError:
            pass
        else:
            return False
    return one.status == 1


def test_what_is_out_of_order_ends_it() -> None:
    settings, turn = encode_settings(CONFIG), encode_turn(Turn())
    ready = (Kind.SETTINGS, 1, settings)
    assert refuses((Kind.TURN, 1, turn))
    assert refuses((Kind.SETTINGS, 2, settings))
    assert refuses(ready, ready)
    assert refuses(ready, (Kind.TURN, 1, turn))
    assert refuses(ready, (Kind.TURN, 3, turn))
    assert refuses(ready, (Kind.TURN, 2, settings))
    assert refuses(ready, (Kind.TURN, 2, encode_turn(Turn(slots=[CONFIG.max_rows], room=[1]))))
    assert not refuses(ready, (Kind.TURN, 2, turn))

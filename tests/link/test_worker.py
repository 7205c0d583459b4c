"""The draft's end of a link, in a thread: it answers in order, and does not answer whom it cannot understand."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from saguaro import methods
from saguaro.kernels.bundle import plain_kernels
from saguaro.link.answer import serve
from saguaro.link.channel import Channel
from saguaro.link.frame import Message, MessageKind
from saguaro.link.wire import DraftRequest, WireLimits, decode_reply, encode_request, encode_settings
from saguaro.link.worker import build_draft
from saguaro.model.tiny import write_tiny
from saguaro.round import DraftSide
from saguaro.types import Joined
from tests.draft.config import new_config
from tests.link.echo import Echo
from tests.link.target import draft_config

CONFIG = draft_config()


class Draft:
    """A worker, its side, and our end of the link."""

    def __init__(self, link: socket.socket, theirs: socket.socket) -> None:
        self.channel, self.sides, self.status = Channel(link, 10**6), list[Echo](), -1
        self.thread = threading.Thread(target=self._serve, args=(theirs,))
        self.thread.start()

    def ask(self, kind: MessageKind, sequence: int, parts: Sequence[memoryview]) -> Message:
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
        assert one.ask(MessageKind.SETTINGS, 1, encode_settings(CONFIG))[:2] == (MessageKind.READY, 1)
        turn = DraftRequest(joined=[Joined(0, [1]), Joined(1, [2])], slots=[1, 0], room=[2, 9])
        reply = one.ask(MessageKind.TURN, 2, encode_request(turn))
        assert reply[:2] == (MessageKind.REPLY, 2)
        assert decode_reply(reply.body, 2, WireLimits.of(CONFIG)).length.tolist() == [2, CONFIG.lookahead]
        assert one.sides[0].n_kept == 0
    assert one.status == 0
    assert one.sides[0].n_kept == 1, "what was learnt is kept at the end"


def test_who_starts_afresh_is_known_for_no_row() -> None:
    with draft() as one:
        one.ask(MessageKind.SETTINGS, 1, encode_settings(CONFIG))
        one.ask(
            MessageKind.TURN, 2, encode_request(DraftRequest(joined=[Joined(0, [1]), Joined(1, [2]), Joined(2, [3])]))
        )
        one.ask(MessageKind.TURN, 3, encode_request(DraftRequest(left=[0], joined=[Joined(1, [5])])))
        assert {slot: row.tokens for slot, row in one.sides[0].rows.items()} == {1: [5], 2: [3]}
        one.ask(MessageKind.TURN, 4, encode_request(DraftRequest(is_afresh=True, joined=[Joined(3, [6])])))
        assert list(one.sides[0].rows) == [3]


def refuses(*said: tuple[MessageKind, int, list[memoryview]]) -> bool:
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
    settings, turn = encode_settings(CONFIG), encode_request(DraftRequest())
    ready = (MessageKind.SETTINGS, 1, settings)
    assert refuses((MessageKind.TURN, 1, turn))
    assert refuses((MessageKind.SETTINGS, 2, settings))
    assert refuses(ready, ready)
    assert refuses(ready, (MessageKind.TURN, 1, turn))
    assert refuses(ready, (MessageKind.TURN, 3, turn))
    assert refuses(ready, (MessageKind.TURN, 2, settings))
    assert refuses(ready, (MessageKind.TURN, 2, encode_request(DraftRequest(slots=[CONFIG.max_rows], room=[1]))))
    assert not refuses(ready, (MessageKind.TURN, 2, turn))


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_draft_is_captured_before_its_first_turn(
    is_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write_tiny(tmp_path, "llama")
    config = new_config(64, draft=str(tmp_path), target=str(tmp_path), max_rows=3)
    monkeypatch.setattr(methods, "kernels_for", lambda device: plain_kernels() if is_captured else None)
    monkeypatch.setattr(DraftSide, "warm", lambda side, size: sizes.append(size))
    assert isinstance(build_draft(config), DraftSide)
    assert sizes == ([4, 2, 1] if is_captured else [])

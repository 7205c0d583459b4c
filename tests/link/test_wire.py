"""Messages: what goes in comes out, and whatever else arrives is refused."""

import contextlib
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.config import SamplingParams, Structured
from saguaro.link import frame, wire
from saguaro.link.channel import Channel
from saguaro.link.frame import Array, Message, MessageKind, WireError
from saguaro.link.wire import MAX_WORDS, DraftRequest, WireLimits
from saguaro.types import DRAFT, SOURCES, DraftTimes, Features, Joined, Outcome, Speculation
from tests.link.target import draft_config

V, K, ROWS = 7, 3, 4
F, STEP = 5, 12  # numbers of a token's features, and tokens whose features come together
LIMITS = WireLimits(n_vocab=V, n_text=V + 2, lookahead=K, max_rows=ROWS, n_features=F, n_step=STEP)

token = st.integers(0, V - 1)
slot = st.integers(0, ROWS - 1)


def ints(values: list[int]) -> torch.Tensor:
    """As the engine holds them."""
    return torch.tensor(values, dtype=torch.int64)


words = st.text('aé\n"\\🙂', min_size=1, max_size=9)
wishes = st.none() | st.one_of(
    st.just(Structured(json=True)),
    st.builds(Structured, regex=words),
    st.builds(Structured, grammar=words),
    st.builds(Structured, choice=st.lists(words, min_size=1)),
)


@st.composite
def rows(draw: st.DrawFn) -> Joined:
    text = draw(st.lists(token, max_size=20))
    params = SamplingParams(
        temperature=draw(st.floats(0, 1e300)),
        top_k=draw(st.integers(-1, 2**31)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0, 1e300, exclude_min=True)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(token, st.floats(-1e300, 1e300))),
        structured=draw(wishes),
        prepare=draw(st.booleans()),
    )
    return Joined(draw(slot), text, draw(st.integers(0, len(text))), draw(st.integers(0, 2**63 - 1)), params)


@st.composite
def features_of(draw: st.DrawFn, slots: list[int]) -> Features | None:
    """Numbers that bfloat16 holds exactly; none of no row."""
    length = [draw(st.integers(0, STEP // ROWS)) for _ in slots]
    start = ints([draw(st.integers(0, 999)) for _ in slots])
    values = torch.arange(sum(length) * F, dtype=torch.float32).view(-1, F) - 7
    return Features(ints(slots), start, ints(length), values) if slots else None


@st.composite
def turns(draw: st.DrawFn) -> DraftRequest:
    several = st.lists(slot, unique=True)
    decided = draw(several)
    length = [draw(st.integers(0, K)) for _ in decided]
    accepted = [draw(st.integers(0, n)) for n in length]
    bonus = ints([draw(token) for _ in decided])
    path = torch.full((len(decided), K), -1)
    for row, (n, n_nodes) in enumerate(zip(accepted, length, strict=True)):
        nodes = draw(st.permutations(range(n_nodes)))[:n]
        path[row, :n] = ints(sorted(nodes))
    features = draw(st.none() | features_of(draw(several)))
    known = draw(st.sampled_from([None, path]))
    outcome = Outcome(ints(decided), ints(length), ints(accepted), bonus, known, features=features)
    slots = draw(several)
    joined = draw(st.lists(rows(), max_size=ROWS))
    return DraftRequest(
        draw(st.booleans()), draw(several), joined, outcome, slots, [draw(st.integers(0, 99)) for _ in slots]
    )


@st.composite
def speculations(draw: st.DrawFn) -> Speculation:
    n_rows, n_nodes = draw(st.integers(0, ROWS)), draw(st.integers(0, K))
    tokens = ints([draw(token) for _ in range(n_rows * n_nodes)]).view(n_rows, n_nodes)
    length = ints([draw(st.integers(0, n_nodes)) for _ in range(n_rows)])
    source = ints([draw(st.integers(0, len(SOURCES) - 1)) for _ in range(n_rows)])
    dtype = draw(st.sampled_from([None, torch.float32, torch.float64]))
    q = None if dtype is None else torch.rand(n_rows, n_nodes, V, dtype=dtype)
    interval = st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False))
    parent = ints([draw(st.integers(-1, at - 1)) for _ in range(n_rows) for at in range(n_nodes)])
    times = draw(st.none() | st.builds(DraftTimes, interval, interval, st.booleans()))
    return Speculation(tokens, length, source, q, times, draw(st.sampled_from([None, parent.view(n_rows, n_nodes)])))


def body(parts: list[memoryview]) -> Array:
    """What the other end gets."""
    return np.frombuffer(bytearray(b"".join(parts)), np.uint8)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Shape, type and every value."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@given(turns())
def test_a_turn_comes_out_as_it_went_in(turn: DraftRequest) -> None:
    out = wire.decode_request(body(wire.encode_request(turn)), LIMITS)
    assert replace(out, outcome=turn.outcome) == turn
    for name in ("slots", "length", "n_accepted", "bonus", "path"):
        assert same(getattr(out.outcome, name), getattr(turn.outcome, name))
    given, found = turn.outcome.features, out.outcome.features
    if given is None or found is None:
        assert given is found
        return
    for name in ("slots", "start", "length"):
        assert same(getattr(found, name), getattr(given, name))
    assert same(found.values, given.values.bfloat16())


@given(speculations())
def test_a_reply_comes_out_as_it_went_in(spec: Speculation) -> None:
    out = wire.decode_reply(body(wire.encode_reply(spec)), len(spec.length), LIMITS)
    assert out.times == spec.times
    for name in ("tokens", "length", "source", "q"):
        assert same(getattr(out, name), getattr(spec, name)), name


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (Features(ints([0]), ints([0]), ints([STEP + 1]), torch.ones(STEP + 1, F)), "13 tokens, of at most 12"),
        (Features(ints([0]), ints([0]), ints([2]), torch.ones(3, F)), "of which the rows claim 2"),
        (Features(ints([ROWS]), ints([0]), ints([1]), torch.ones(1, F)), "slots from 4 to 4"),
        (Features(ints([0]), ints([-1]), ints([1]), torch.ones(1, F)), "starts from -1"),
        (Features(ints([0]), ints([0]), ints([1]), torch.ones(1, F + 8)), "a body of"),
    ],
)
def test_impossible_features_are_refused(features: Features, words: str) -> None:
    data = body(wire.encode_request(DraftRequest(outcome=replace(Outcome.nothing(), features=features))))
    with pytest.raises(WireError, match=words):
        wire.decode_request(data, LIMITS)


def test_features_that_no_draft_reads_are_refused() -> None:
    features = Features(ints([0]), ints([0]), ints([1]), torch.ones(1, F))
    data = body(wire.encode_request(DraftRequest(outcome=replace(Outcome.nothing(), features=features))))
    with pytest.raises(WireError, match="features of 1 tokens, of at most 0"):
        wire.decode_request(data, replace(LIMITS, n_features=0))


def test_features_are_not_copied_when_they_arrive() -> None:
    features = Features(ints([0]), ints([0]), ints([2]), torch.ones(2, F))
    received = body(wire.encode_request(DraftRequest(outcome=replace(Outcome.nothing(), features=features))))
    found = wire.decode_request(received, LIMITS).outcome.features
    received[:] = 0
    assert found is not None
    assert same(found.values, torch.zeros(2, F, dtype=torch.bfloat16))


def test_half_floats_arrive_as_exactly_the_same_numbers() -> None:
    q = torch.rand(1, K, V).bfloat16()
    spec = replace(Speculation.of([[1, 2]], K, [2]), q=q)
    assert same(wire.decode_reply(body(wire.encode_reply(spec)), 1, LIMITS).q, q.float())


def test_q_is_not_copied() -> None:
    q = torch.zeros(1, K, V)
    parts = wire.encode_reply(replace(Speculation.of([[1, 2]], K, [2]), q=q))
    q += 0.5
    got = wire.decode_reply(received := body(parts), 1, LIMITS).q
    assert same(got, q), "it was copied when it was encoded"
    received[:] = 0
    assert same(got, torch.zeros_like(q)), "it was copied when it was decoded"


def test_a_top_k_beyond_any_vocabulary_can_be_sent() -> None:
    turn = DraftRequest(joined=[Joined(0, [1], params=SamplingParams(top_k=10**30))])
    assert wire.decode_request(body(wire.encode_request(turn)), LIMITS).joined[0].params.top_k >= V


def test_settings_come_out_as_they_went_in() -> None:
    config = draft_config("a draft with an ümlaut")
    assert wire.decode_settings(body(wire.encode_settings(config))) == config


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", "[" * 10**5, json.dumps({**asdict(draft_config()), "surprise": 1})]
    + [json.dumps({**asdict(draft_config()), "n_vocab": value}) for value in (0, -1, 1.5, True, None, "7", 2**40)],
)
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(WireError):
        wire.decode_settings(np.frombuffer(text.encode(), np.uint8))


def test_a_failure_is_text_however_it_was_cut() -> None:
    assert wire.decode_text(body(wire.encode_text("ümlaut \udc80"))) == "ümlaut ?"
    assert len(wire.decode_text(body(wire.encode_text("ü" * MAX_WORDS)))) <= MAX_WORDS


TURN = DraftRequest(
    left=[3],
    joined=[
        Joined(1, [1, 2, 3], 2, 5, SamplingParams(logit_bias={1: 0.5})),
        Joined(0, [], 0, 0, SamplingParams(structured=Structured(regex="a"))),
    ],
    outcome=Outcome(
        ints([2]), ints([3]), ints([1]), ints([6]), features=Features(ints([2]), ints([9]), ints([3]), torch.ones(3, F))
    ),
    slots=[0, 1],
    room=[3, 3],
)
SPEC = replace(Speculation.of([[1, 2], [3]], K, [2, 3]), q=torch.rand(2, K, V))


def messages() -> Iterator[tuple[str, MessageKind, list[memoryview], Callable[[Array], object]]]:
    """One message of each kind, and how its body is read."""
    yield "turn", MessageKind.TURN, wire.encode_request(TURN), lambda b: wire.decode_request(b, LIMITS)
    yield "reply", MessageKind.REPLY, wire.encode_reply(SPEC), lambda b: wire.decode_reply(b, 2, LIMITS)
    yield "settings", MessageKind.SETTINGS, wire.encode_settings(draft_config()), wire.decode_settings
    yield "ready", MessageKind.READY, [], lambda b: b
    yield "failed", MessageKind.FAILED, wire.encode_text("no"), wire.decode_text


def arrive(data: bytes) -> Message | None:
    """What a channel makes of these bytes and the end after them."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        channel = Channel(receiver, limit=10**6)
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        return channel.receive()


@pytest.mark.parametrize(("kind", "parts", "read"), [pytest.param(*rest, id=name) for name, *rest in messages()])
class TestDamage:
    """Every message, damaged in every place."""

    def test_whole(self, kind: MessageKind, parts: list[memoryview], read: Callable[[Array], object]) -> None:
        message = arrive(b"".join(frame.frame(kind, 9, parts)))
        assert message is not None
        assert message[:2] == (kind, 9)
        assert message.body.tobytes() == b"".join(parts)
        read(message.body)

    def test_cut_off_anywhere(
        self, kind: MessageKind, parts: list[memoryview], read: Callable[[Array], object]
    ) -> None:
        data = b"".join(frame.frame(kind, 9, parts))
        for n in range(len(data)):
            with pytest.raises(EOFError):
                arrive(data[:n])

    def test_changed_anywhere(
        self, kind: MessageKind, parts: list[memoryview], read: Callable[[Array], object]
    ) -> None:
        data = b"".join(frame.frame(kind, 9, parts))
        for at in range(len(data)):
            for change in (1, 0x80, 0xFF):
                damaged = data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
                with pytest.raises(WireError):
                    arrive(damaged)

    def test_a_body_cut_or_grown(
        self, kind: MessageKind, parts: list[memoryview], read: Callable[[Array], object]
    ) -> None:
        """By a sender that counts well and says nonsense."""
        if kind in (MessageKind.READY, MessageKind.FAILED):
            return
        whole = b"".join(parts)
        for other in (*(whole[:n] for n in range(len(whole))), whole + b"\0", whole + bytes(8)):
            with pytest.raises(WireError):
                read(np.frombuffer(bytearray(other), np.uint8))


NONSENSE = (-1, -(2**63), 2**63 - 1, 2**40, 2**31, ROWS + V)


@pytest.mark.parametrize("which", ["turn", "reply"])
def test_any_number_replaced_by_nonsense_is_refused_or_possible(which: str) -> None:
    """Any eight bytes of a body become another number: decoding refuses, or gives something within the limits."""
    _, _, parts, read = next(one for one in messages() if one[0] == which)
    whole = b"".join(parts[:1])
    n_refused = 0
    for at in range(0, len(whole), 8):
        for value in NONSENSE:
            data = whole[:at] + value.to_bytes(8, "little", signed=True) + whole[at + 8 :] + b"".join(parts[1:])
            try:
                read(np.frombuffer(bytearray(data), np.uint8))
            except WireError:
                n_refused += 1
    assert n_refused > 0.5 * len(NONSENSE) * len(whole) / 8  # seeds, room, times and some penalties may be anything


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_random_bodies_are_refused_or_possible(data: bytes) -> None:
    padded = np.frombuffer(bytearray(data + bytes(-len(data) % 8)), np.uint8)
    for read in (lambda: wire.decode_request(padded, LIMITS), lambda: wire.decode_reply(padded, 2, LIMITS)):
        with contextlib.suppress(WireError):
            read()


def bad_turn(**changes: object) -> DraftRequest:
    """A turn with something impossible in it."""
    return replace(TURN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "turn",
    [
        bad_turn(left=[ROWS]),
        bad_turn(left=[0] * (ROWS + 1)),
        bad_turn(slots=[-1, 0]),
        bad_turn(room=[-1, 0]),
        bad_turn(room=[1]),
        bad_turn(joined=[Joined(0, [V + 2])]),
        bad_turn(joined=[Joined(0, [-1])]),
        bad_turn(joined=[Joined(0, [1], n_prompt=2)]),
        bad_turn(joined=[Joined(0, [1], seed=-1)]),
        bad_turn(joined=[Joined(ROWS, [1])]),
        bad_turn(joined=[Joined(0, [1], params=SamplingParams(logit_bias={V + 2: 1.0}))]),
        bad_turn(joined=[Joined(0, [])] * (ROWS + 1)),
        bad_turn(outcome=Outcome(ints([0]), ints([1]), ints([2]), ints([0]))),
        bad_turn(outcome=Outcome(ints([0]), ints([K + 1]), ints([0]), ints([0]))),
        bad_turn(outcome=Outcome(ints([0]), ints([1]), ints([1]), ints([V]))),
    ],
)
def test_an_impossible_turn_is_refused(turn: DraftRequest) -> None:
    with pytest.raises(WireError):
        wire.decode_request(body(wire.encode_request(turn)), LIMITS)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "{}", '{"regex": 1}', '{"regex": "a", "grammar": "b"}', '{"xml": "a"}', "\xff"]
)
def test_an_impossible_grammar_is_refused(text: str) -> None:
    turn = DraftRequest(joined=[Joined(0, [1], params=SamplingParams(structured=Structured(regex="a" * 60)))])
    whole = b"".join(wire.encode_request(turn))
    wish = json.dumps({"regex": "a" * 60}).encode()
    assert whole.endswith(wish)
    data = whole[: -len(wish)] + text.encode("latin-1").ljust(len(wish))
    with pytest.raises(WireError, match="no words of a grammar"):
        wire.decode_request(np.frombuffer(bytearray(data), np.uint8), LIMITS)


def test_impossible_sampling_is_refused() -> None:
    params = SamplingParams()
    object.__setattr__(params, "temperature", float("nan"))
    with pytest.raises(WireError, match="temperature is nan"):
        wire.decode_request(body(wire.encode_request(DraftRequest(joined=[Joined(0, [1], params=params)]))), LIMITS)


@pytest.mark.parametrize(
    "spec",
    [
        Speculation.of([[1]], K, [2]),
        Speculation.of([[1]] * 3, K, [2] * 3),
        Speculation.of([[1], [V]], K, [2, 2]),
        Speculation.of([[1], [-1]], K, [2, 2]),
        Speculation.of([[1], [2]], K + 1, [2, 2]),
        Speculation.of([[1], [2]], K, [2, len(SOURCES)]),
        replace(SPEC, length=ints([K + 1, 0])),
        replace(SPEC, length=ints([-1, 0])),
        replace(SPEC, q=torch.rand(2, K, V - 1)),
        replace(SPEC, q=torch.rand(2, K + 1, V)),
    ],
)
def test_an_impossible_reply_is_refused(spec: Speculation) -> None:
    with pytest.raises(WireError):
        wire.decode_reply(body(wire.encode_reply(spec)), 2, LIMITS)


def test_a_body_beyond_the_limit_is_refused_before_it_is_awaited() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(frame.frame(MessageKind.FAILED, 1, wire.encode_text("x" * 100))[0])
        with pytest.raises(WireError, match="100 bytes, where at most 99"):
            Channel(receiver, limit=99).receive()


def test_a_parent_that_comes_later_is_refused() -> None:
    spec = Speculation.of([[1, 2]], 2, [DRAFT], [[-1, 0]])
    assert spec.parent is not None
    spec.parent[0, 0] = 0
    with pytest.raises(WireError, match="does not come before"):
        wire.decode_reply(body(wire.encode_reply(spec)), 1, LIMITS)


@pytest.mark.parametrize("nodes", [[1, 0], [0, 2], [0, -1], [1, 1]])
def test_nodes_that_are_no_path_are_refused(nodes: list[int]) -> None:
    path = torch.full((1, K), -1)
    path[0, :2] = ints(nodes)
    outcome = Outcome(ints([0]), ints([2]), ints([2]), ints([1]), path)
    with pytest.raises(WireError, match="no path"):
        wire.decode_request(body(wire.encode_request(DraftRequest(outcome=outcome))), LIMITS)


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(frame, "VERSION", 3)
        data = b"".join(frame.frame(MessageKind.READY, 1, []))
    with pytest.raises(WireError, match=f"version 3; this end speaks version {frame.VERSION}"):
        arrive(data)


def test_another_layout_is_another_version() -> None:
    """A draft that is started again may be of a package that was replaced meanwhile."""
    spec = Speculation(ints([1, 2, 3]).view(1, 3), ints([3]), ints([DRAFT]), torch.full((1, 2, V), 0.5))
    spec = replace(spec, times=DraftTimes((1.0, 2.0), (3.0, 4.0), True), parent=ints([-1, 0, 0]).view(1, 3))
    outcome = Outcome(ints([2]), ints([3]), ints([1]), ints([4]), ints([2, -1, -1]).view(1, 3))
    row = Joined(
        1, [5, 6], 1, 7, SamplingParams(temperature=0.5, logit_bias={3: 1.0}, structured=Structured(regex="a"))
    )
    turn = DraftRequest(False, [3], [row], outcome, [1, 2], [3, 0])
    found = [zlib.crc32(b"".join(parts)) for parts in (wire.encode_request(turn), wire.encode_reply(spec))]
    assert (frame.VERSION, *found) == (6, 1784215372, 2097775257), (
        "if the layout has changed, raise VERSION; then write these here"
    )


def test_messages_larger_than_the_socket_go_through_piece_by_piece() -> None:
    """Both ends only ever do what they can do at once."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        sender, receiver = Channel(ends[0], limit=0), Channel(ends[1], limit=10**8)
        payload = np.random.default_rng(0).integers(0, 256, 10**7, np.uint8)
        sender.post(MessageKind.REPLY, 3, [payload.data])
        n_steps, message = 0, None
        while message is None:
            is_sent = sender.flush()
            assert receiver.received == 0
            message, n_steps = receiver.receive(), n_steps + 1
            assert receiver.is_midway or message is not None
        assert n_steps > 1, "the message was meant to be larger than the socket"
        assert is_sent
        assert (message.sequence, receiver.received) == (3, 3)
        assert np.array_equal(message.body, payload)


def test_a_channel_that_lost_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the bytes and their count: going on could only be a guess."""

    class Interrupting(socket.socket):
        is_armed = False

        def recv_into(self, *args: object, **kwargs: object) -> int:
            n = super().recv_into(*args, **kwargs)  # type: ignore[arg-type]
            if self.is_armed:
                raise KeyboardInterrupt
            return n

    sender, plain = socket.socketpair()
    with sender, Interrupting(fileno=plain.detach()) as receiver:
        channel = Channel(receiver, limit=0)
        receiver.is_armed = True
        sender.sendall(b"".join(frame.frame(MessageKind.READY, 1, [])))
        with pytest.raises(KeyboardInterrupt):
            channel.receive()
        receiver.is_armed = False
        with pytest.raises(WireError, match="count"):
            channel.receive()

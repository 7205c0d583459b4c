"""The client of other servers: what they may do, over real sockets, and the sentence that follows."""

import socket
import threading
from collections.abc import Iterator

import pytest

from saguaro.client.asking import check_params, sampling_body
from saguaro.client.client import MAX_LINE, Chunk, Client, Usage
from saguaro.client.endpoint import Endpoint
from saguaro.config import SamplingParams
from saguaro.errors import ConfigError, PeerError
from tests.client.scripted import Exchange, scripted

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HELD = threading.Event()  # ends what waits


def answers(e: Exchange) -> None:
    """A whole answer, with a comment, thoughts, and usage after the last choice."""
    assert e.body["stream"] is e.body["stream_options"]["include_usage"] is True
    e.begin()
    e.wfile.write(b": ping\n\n")
    e.event({"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]})
    e.piece("é")
    e.piece("b", "stop")
    e.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    e.event("[DONE]")


def has_no_end(e: Exchange) -> None:
    """Ends without [DONE], but after the last choice, and counts nothing."""
    e.begin()
    e.piece("a", "length")


def breaks_off(e: Exchange) -> None:
    e.begin()
    e.piece("a")


def breaks_off_in_a_chunk(e: Exchange) -> None:
    e.close_connection = True
    e.send_response(200)
    e.send_header("Content-Type", "text/event-stream")
    e.send_header("Transfer-Encoding", "chunked")
    e.end_headers()
    e.wfile.write(b"1000\r\ndata: half of")


def ends_with_an_error(e: Exchange) -> None:
    e.begin()
    e.piece("a")
    e.event({"error": {"message": "out of\nmemory", "type": "x"}})


def waits(e: Exchange) -> None:
    e.begin()
    e.piece("a")
    HELD.wait()


def writes_without_end(e: Exchange) -> None:
    e.begin()
    e.wfile.write(b"data: " + b"x" * (MAX_LINE + 1))


ACTS = {
    "answers": answers,
    "has_no_end": has_no_end,
    "breaks_off": breaks_off,
    "breaks_off_in_a_chunk": breaks_off_in_a_chunk,
    "ends_with_an_error": ends_with_an_error,
    "waits": waits,
    "writes_without_end": writes_without_end,
    "is_closed": lambda e: setattr(e, "close_connection", True),
    "knows_no_model": lambda e: e.reply(404, b'{"error": {"message": "The model `m` does not exist."}}'),
    "wants_a_key": lambda e: e.reply(401, b'{"error": "Unauthorized"}'),
    "refuses": lambda e: e.reply(422, b'{"detail": [{"loc": ["top_k"], "msg": "too small"}]}'),
    "is_a_page": lambda e: e.reply(200, b"<html>hello</html>", "text/html"),
    "fails": lambda e: e.reply(502, b"<h1>" + b"Bad gateway " * 1000),
    "is_odd": lambda e: (e.begin(), e.event({"choices": 7}))[0],
    "is_no_json": lambda e: (e.begin(), e.event("hello"))[0],
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with scripted(ACTS, {"data": [{"id": "first"}, {"id": "second"}]}) as found:
        yield found
        HELD.set()


def chunks(address: str, act: str, timeout: float = 60) -> list[Chunk]:
    """What the client reads of an answer."""
    with Client(Endpoint(url=f"{address}/{act}/v1", timeout=timeout)).chat(BODY) as stream:
        return list(stream)


def test_an_answer_is_read_to_its_end(address: str) -> None:
    thought, first, second, last = chunks(address, "answers")
    assert (thought.reasoning, thought.text, first.text, second.text) == ("hm", "", "é", "b")
    assert (second.finish_reason, last.usage) == ("stop", Usage(prompt=3, completion=4))
    assert [one.text for one in chunks(address, "has_no_end")] == ["a"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("breaks_off", "closed the stream after 1 events, before the answer was complete; see its log"),
        ("breaks_off_in_a_chunk", "see its log"),
        ("ends_with_an_error", "ended the stream with an error: out of memory"),
        ("writes_without_end", f"sent a line of more than {MAX_LINE} bytes"),
        ("is_closed", "closed the connection or does not speak HTTP"),
        ("knows_no_model", "answered 404: The model `m` does not exist.; check the URL and the model's name"),
        ("wants_a_key", "answered 401: Unauthorized; give its API key"),
        ("refuses", "answered 422: [{'loc': ['top_k'], 'msg': 'too small'}]"),
        ("is_a_page", "answers with text/html; a stream of events is needed: is this an OpenAI server?"),
        ("fails", "answered 502: <h1>Bad gateway"),
        ("is_odd", "which is no chunk of an answer; is this an OpenAI server?"),
        ("is_no_json", "sent 'hello', which is no chunk of an answer"),
    ],
)
def test_what_a_server_does_wrong_is_one_sentence(address: str, act: str, message: str) -> None:
    with pytest.raises(PeerError) as found:
        chunks(address, act)
    assert message in str(found.value)
    assert str(found.value).startswith(f"{address}/{act}/v1/chat/completions ")
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


def test_a_server_that_is_silent_is_given_up(address: str) -> None:
    with pytest.raises(PeerError, match=r"sent nothing for 0\.2 seconds; see its log, or wait longer"):
        chunks(address, "waits", timeout=0.2)


def test_a_request_is_ended_from_another_thread(address: str) -> None:
    client = Client(Endpoint(url=f"{address}/waits/v1"))
    with client.chat(BODY) as stream:
        pieces = iter(stream)
        assert next(pieces).text == "a"
        aborting = threading.Thread(target=client.abort)
        aborting.start()
        with pytest.raises(PeerError):
            next(pieces)
        aborting.join()


def test_models(address: str) -> None:
    assert Client(Endpoint(url=f"{address}/x")).models() == []
    assert Client(Endpoint(url=address)).models() == ["first", "second"]
    with scripted({}, {"models": []}) as other, pytest.raises(PeerError, match="is no list of models"):
        Client(Endpoint(url=other)).models()


def test_a_server_that_cannot_be_reached() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PeerError, match="cannot be reached: connection refused; start the server, or correct the URL"):
        Client(Endpoint(url=f"http://127.0.0.1:{port}")).models()
    with pytest.raises(PeerError, match=r"cannot be reached: .*; correct the host's name"):
        Client(Endpoint(url="http://nowhere.invalid")).models()


def test_a_server_without_tls_is_not_spoken_to_over_it(address: str) -> None:
    with pytest.raises(PeerError, match="cannot be reached over TLS"):
        Client(Endpoint(url=address.replace("http", "https"))).models()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "write http://HOST:PORT/v1"),
        ("http://", "write http://HOST:PORT/v1"),
        ("http://a:b/v1", "write http://HOST:PORT/v1"),
        ("http://a/v1?x=1", "write http://HOST:PORT/v1"),
        ("http://a/v 1", "write http://HOST:PORT/v1"),
        ("http://me:key@a/v1", "holds a user name"),
    ],
)
def test_urls_that_are_none(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Endpoint(url=url)


def test_keys_and_time_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="the API key is empty or holds characters"):
        Endpoint(url="http://a", key="a\nb")
    with pytest.raises(ConfigError, match="timeout is 0; it must be more than 0"):
        Endpoint(url="http://a", timeout=0)


def test_bodies_state_every_parameter_if_asked() -> None:
    found = sampling_body(SamplingParams(temperature=0.5, top_k=3, stop=("a",), seed=1), states_all=True)
    assert found["top_k"] == 3
    assert (found["min_p"], found["repetition_penalty"], found["ignore_eos"], found["stop"]) == (0.0, 1.0, False, ["a"])
    assert sampling_body(SamplingParams(), states_all=True)["top_k"] == -1
    with pytest.raises(ConfigError, match=r"repetition_penalty is 1\.1; over HTTP there are max_tokens"):
        check_params(SamplingParams(repetition_penalty=1.1))

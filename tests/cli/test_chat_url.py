"""`saguaro chat --url`: a conversation with another server, in a terminal and from a pipe."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from saguaro.cli.main import parse, run
from saguaro.errors import ConfigError, PeerError
from saguaro.model.tiny import write_tiny
from tests.cli.test_cli import SAGUARO, Terminal
from tests.client.scripted import Exchange, scripted
from tests.serve.http.driver import running, tiny_llm


def chat(url: str, text: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """The command with a pipe as its input."""
    command = [*SAGUARO, "chat", "--url", url, *args]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_our_own_server_answers(tmp_path: Path) -> None:
    with running(tiny_llm(write_tiny(tmp_path / "model", "llama"), draft=None, method="ar")) as server:
        done = chat(server.url, "the end\n/regenerate\n/history\n", "--metrics", "--max-tokens", "6", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert f"tiny at {server.url}/v1" in done.stderr
    assert done.stderr.count("6 tokens, first after ") == 2
    assert "user: the end" in done.stderr
    said = done.stdout.removesuffix("\n")  # of the end of the input
    assert said[: len(said) // 2] == said[len(said) // 2 :] != "", "both answers are the same"


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    left = threading.Event()

    def goes_on(e: Exchange) -> None:
        if len(e.body["messages"]) > 1:
            assert [message["role"] for message in e.body["messages"]] == ["user", "assistant", "user"]
            e.begin()
            e.piece("goodbye", "stop")
            e.event("[DONE]")
            return
        e.begin()
        try:
            while True:
                e.piece("and on ")
        except OSError:
            left.set()

    with scripted({"a": goes_on}) as url, Terminal([*SAGUARO, "chat", "--url", f"{url}/a/v1"]) as terminal:
        terminal.wait_for(lambda text: text.endswith("> "))
        terminal.type("go\n")
        terminal.wait_for(lambda text: text.count("and on ") > 3)
        terminal.type("\x03")
        terminal.wait_for(lambda text: text.endswith("\n> "))
        assert left.wait(60), "the connection is closed, so the server stops"
        terminal.type("enough\n")
        terminal.wait_for(lambda text: "goodbye" in text and text.endswith("> "))
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=60) == 0


def test_a_failure_is_a_sentence_and_the_chat_goes_on() -> None:
    def breaks_off(e: Exchange) -> None:
        e.begin()
        e.piece("half of it")

    with scripted({"a": breaks_off}, {"data": [{"id": "m"}]}) as url:
        done = chat(f"{url}/a/v1", "one\ntwo\n/history\n")
    assert done.returncode == 0
    assert done.stdout == "half of it\nhalf of it\n\n"
    assert done.stderr.replace("\n", " ").count("before the answer was complete") == 2
    assert "user:" not in done.stderr, "a message without an answer is forgotten"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "http://127.0.0.1:1", "--draft", "drop:1"], "engine settings belong to a model in this process"),
        (["--url", "http://127.0.0.1:1", "--record", "x"], "--record belong to a model in this process"),
        (["--url", "http://127.0.0.1:1", "--min-tokens", "3"], "min_tokens is 3; over HTTP there are"),
        (["--url", "ftp://a"], "the URL is 'ftp://a'; write http://HOST:PORT/v1"),
        (["--url", "http://a", "--key-env", "NO_SUCH_KEY"], "there is no such variable; export NO_SUCH_KEY=KEY"),
        (["--key-env", "HOME"], "there is no server; give --url"),
    ],
)
def test_mistakes_are_explained(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        run(parse(["chat", *args]))
    assert message in str(found.value)


def test_no_server_is_an_error() -> None:
    with pytest.raises(PeerError, match="connection refused; start the server, or correct the URL"):
        run(parse(["chat", "--url", "http://127.0.0.1:1/v1"]))


def test_no_engine_is_loaded_for_it() -> None:
    script = (
        "import sys, saguaro.cli.main, saguaro.cli.chat_url; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

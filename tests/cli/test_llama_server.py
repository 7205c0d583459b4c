"""A real server of others: llama-server, where it is installed, on the file of the default model."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro.cli import main
from saguaro.client.client import Client
from saguaro.client.endpoint import Endpoint
from saguaro.errors import PeerError
from saguaro.measure.peer import gguf_of
from tests.cli.test_chat_url import chat
from tests.link.target import until

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(shutil.which("llama-server") is None, reason="llama-server is not installed"),
]


@pytest.fixture(scope="module")
def url(default_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ["-m", str(gguf_of(default_folder)), "--port", str(port), "-t", "1", "-tb", "1", "-np", "2", "-c", "2048"]
    found = f"http://127.0.0.1:{port}/v1"
    with (tmp_path_factory.mktemp("log") / "log").open("wb") as log:
        process = subprocess.Popen(["llama-server", *args], stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or serves(found))
        yield found
    finally:
        process.kill()
        process.wait()


def serves(url: str) -> bool:
    """Whether the model is loaded."""
    try:
        return bool(Client(Endpoint(url=url)).models())
    except PeerError:
        return False


@pytest.mark.parametrize("how", ["--chat", "--no-chat"])
def test_it_is_measured(url: str, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    args = ["bench", "--methods", "none", "--num-prompts", "2", "--max-tokens", "6", "--ignore-eos", "--json", str(out)]
    assert main.run(main.parse([*args, how, "--concurrency", "1", "2", "--peer", f"openai={url}"])) == 0
    one, two = json.loads(out.read_text())["results"]
    assert (one["tokens"], one["tokens_counted_by"], one["failure"]) == (12, "usage", None)
    assert (two["tokens"], two["prompt_tokens"]) == (one["tokens"], one["prompt_tokens"])
    assert two["prompt_tokens"] > 0


def test_it_answers(url: str) -> None:
    done = chat(url, "Count from one to ten.\n", "--temperature", "0", "--max-tokens", "8", "--metrics")
    assert done.returncode == 0, done.stderr
    assert "8 tokens, first after" in done.stderr
    assert done.stdout.strip()

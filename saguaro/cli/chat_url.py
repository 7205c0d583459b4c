"""`saguaro chat --url`: a conversation with a server that has the OpenAI API. No model is loaded here."""

import os
import time
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from saguaro.cli import commands
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.cli.conversation import Answer, Conversation, Talk, run
from saguaro.client.asking import chat_body, check_params, pick_model, sampling_body
from saguaro.client.client import Client, Usage
from saguaro.client.endpoint import Endpoint
from saguaro.config import SamplingParams
from saguaro.errors import ConfigError
from saguaro.measure.peer_url import read_key


def chat_url(command: commands.Chat) -> int:
    """Run the conversation until the user leaves."""
    params = check(command)
    assert command.url is not None
    key = read_key(command.key_env, os.environ) if command.key_env is not None else None
    client = Client(Endpoint(url=command.url, key=key))
    model = pick_model(client.models(), command.which.model)
    notes = Console(stderr=True, highlight=False)
    notes.print(f"[dim]{escape(model)} at {client.endpoint.url}. /help lists commands.[/dim]")
    run(Talk(_Server(client, model, params), Conversation(command.system), notes, command.metrics))
    return 0


def check(command: commands.Chat) -> SamplingParams:
    """Refuse what only applies to a model in this process."""
    settings = {
        "engine settings": command.engine != EngineArgs(),
        "--tokenizer, --revision, --cache-dir and --chat-template": replace(command.which, model=None) != ModelArgs(),
        "--record": command.record is not None,
        "--color always": command.color == "always",
    }
    for name, is_set in settings.items():
        if is_set:
            raise ConfigError(f"url is {command.url!r}, and {name} belong to a model in this process; leave them out")
    params = command.sampling.params()
    check_params(params)
    return params


class _Server:
    """Answers with a server's model."""

    def __init__(self, client: Client, model: str, params: SamplingParams) -> None:
        self._client, self._model, self._params = client, model, params

    def answer(self, conversation: Conversation) -> Answer:
        """Stream an answer to the terminal. Ctrl-C closes the connection, which ends the request."""
        speed, pieces, reason = _Speed(), [], None
        body = chat_body(self._model, conversation.messages, sampling_body(self._params, states_all=False))
        try:
            with self._client.chat(body) as stream:
                for chunk in stream:
                    speed.add(chunk.text or chunk.reasoning, chunk.usage)
                    pieces.append(chunk.text)
                    reason = chunk.finish_reason or reason
                    print(chunk.reasoning + chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            reason = None
        finally:
            print()
        return Answer("".join(pieces), is_cut=reason == "length", speed=str(speed))


class _Speed:
    """The speed of one answer. Tokens are the server's count; without it, events with text."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._n_events = 0
        self._usage: Usage | None = None

    def add(self, text: str, usage: Usage | None) -> None:
        """Count an event that has just arrived."""
        if text:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._n_events += 1
        self._usage = usage or self._usage

    def __str__(self) -> str:
        if not self._n_events:
            return "no tokens"
        n = self._usage.completion if self._usage else self._n_events
        seconds = self._last - self._first
        speed = (n - 1) / seconds if seconds > 0 else 0.0
        what = "tokens" if self._usage else "events with text"
        return f"{n} {what}, first after {(self._first - self._began) * 1e3:.0f} ms, then {speed:.1f} per second"

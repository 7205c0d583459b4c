"""Request bodies as public clients send them, recorded from their sources: accepted as they are."""

from collections.abc import Iterator
from typing import Any

import pytest

from saguaro.serve.http.elsewhere import ELSEWHERE
from tests.serve.http.driver import Running, running
from tests.serve.http.test_messages import serve

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"include_usage": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Returns the time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
    },
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    # vllm bench serve --backend openai: vllm/benchmarks/lib/endpoint_request_func.py
    "vllm bench": (
        TEXT,
        {
            "model": "tiny",
            "prompt": "Hello",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "temperature": 0.0,  # from --temperature, as an extra body
        },
    ),
    # vllm bench serve --backend openai-chat
    "vllm bench chat": (
        CHAT,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    # guidellm run --backend kind=openai_http: the body of its report's request_args
    "guidellm": (
        TEXT,
        {
            "model": "tiny",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "ignore_eos": True,
            "prompt": "Hello",
        },
    ),
    "guidellm responses": (
        RESPONSES,
        {
            "model": "tiny",
            "stream": True,
            "max_output_tokens": 8,
            "ignore_eos": True,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        },
    ),
    # Open WebUI: routers/openai.py and utils/payload.py; a chat with all of its advanced parameters
    "Open WebUI": (
        CHAT,
        {
            "stream": True,
            "model": "tiny",
            "messages": [{"role": "system", "content": "User Context:\n\nnone"}, *HELLO],
            "stream_options": USAGE,
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "max_tokens": 8,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": 7,
            "stop": ["\n\n\n"],
            "logit_bias": {"5": -100},
            "tools": [TOOL],
        },
    ),
    "Open WebUI title": (
        CHAT,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "### Task:\nGenerate a title"}],
            "stream": False,
            "max_completion_tokens": 8,
        },
    ),
    # LibreChat: packages/api/src/endpoints/openai/llm.ts, sent by LangChain's ChatOpenAI
    "LibreChat": (
        CHAT,
        {
            "model": "tiny",
            "temperature": 1,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "max_tokens": 8,
            "n": 1,
            "stream": True,
            "stream_options": USAGE,
            "user": "6523fd2d0d8a3c0b5c1f4a77",
            "tools": [TOOL],
            "tool_choice": "auto",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "content": "Noon.", "tool_call_id": "call_1", "name": "get_time"},
            ],
        },
    ),
    # LiteLLM and Claude Code send to /v1/messages
    "Claude Code": (
        "/v1/messages?beta=true",
        {
            "model": "tiny",
            "max_tokens": 8,
            "stream": True,
            "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            "tools": [{"name": "Bash", "description": "Run", "input_schema": {"type": "object", "properties": {}}}],
            "metadata": {"user_id": "me"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(serve(tmp_path_factory.mktemp("tools"), "hermes")) as found:
        yield found


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_accepted_as_it_is(server: Running, name: str) -> None:
    path, body = BODIES[name]
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    if body.get("stream_options"):
        assert '"completion_tokens":' in answer.text


def test_a_ping_and_the_load(server: Running) -> None:
    for ask in (server.client.get, server.client.post):
        assert (ask("/ping").status_code, ask("/ping").text) == (200, "")
    assert server.client.get("/load").json() == {"server_load": 0}
    with server.client.stream(
        "POST", TEXT, json={"prompt": "a", "stream": True, "max_tokens": 240, "n": 4, "ignore_eos": True}
    ) as answer:
        pieces = answer.iter_raw()
        assert b"data: " in next(pieces)
        assert {"server_load": 1} in (server.client.get("/load").json() for _ in range(20))


@pytest.mark.parametrize("path", [path for path in ELSEWHERE if "{" not in path])
def test_what_is_not_here_says_what_is(server: Running, path: str) -> None:
    for answer in (server.post(path, {"input": "a"}), server.client.get(f"{path}/abc")):
        assert answer.status_code == 404
        assert f"{path}: this server continues text" in answer.json()["error"]["message"]
        assert "/v1/chat/completions" in answer.json()["error"]["message"]

"""The `anthropic` client against a real server with a tiny model that knows tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

from saguaro import LLM
from saguaro.errors import Unavailable
from tests.serve.http.driver import Running, running
from tests.serve.tools.templates import write_model

ASK: list[MessageParam] = [{"role": "user", "content": "Why is the sky blue?"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 12}
GREEDY: dict[str, Any] = {**SHORT, "extra_body": {"temperature": 0, "ignore_eos": True}}


def serve(folder: Path, kind: str) -> LLM:
    settings: dict[str, Any] = {
        "draft": "drop:2",
        "method": "ssd-uniform",
        "link": "inline",
        "lookahead": 3,
        "budget": 4,
    }
    return LLM(write_model(folder, kind), device="cpu", kv_memory="4MiB", **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(serve(tmp_path_factory.mktemp("tools"), "hermes"), api_keys=["key"]) as found:
        found.client.headers["x-api-key"] = "key"
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="key", max_retries=0) as found:
        yield found


def expected(server: Running, **body: Any) -> dict[str, Any]:
    """What chat completions answer."""
    answer = server.post(
        "/v1/chat/completions", {"messages": ASK, **SHORT, "temperature": 0, "ignore_eos": True, **body}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_message_is_what_chat_completions_say(server: Running, client: Anthropic) -> None:
    chat = expected(server)
    found = client.messages.create(messages=ASK, **GREEDY)
    (block,) = found.content
    assert block.type == "text"
    assert block.text == chat["choices"][0]["message"]["content"]
    assert (found.role, found.model, found.stop_reason, found.stop_sequence) == (
        "assistant",
        "tiny",
        "max_tokens",
        None,
    )
    assert found.usage.output_tokens == 12
    read = found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    assert read == chat["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model="tiny", messages=ASK)
    assert counted.input_tokens == read


def test_a_stream_tells_the_same(server: Running, client: Anthropic) -> None:
    text = expected(server)["choices"][0]["message"]["content"]
    with client.messages.stream(messages=ASK, **GREEDY) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12
    names = [event.type for event in client.messages.create(messages=ASK, stream=True, **GREEDY)]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    raw = server.post("/v1/messages", {"messages": ASK, "stream": True, **SHORT}).text
    assert raw.startswith("event: message_start\ndata: {")
    assert "event: ping\ndata: " in raw
    assert "[DONE]" not in raw


def test_a_stop_sequence_is_named(server: Running, client: Anthropic) -> None:
    text = expected(server)["choices"][0]["message"]["content"]
    stop = text[3:5]
    found = client.messages.create(messages=ASK, stop_sequences=[stop], **GREEDY)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert [block.text for block in found.content if block.type == "text"] == [text[: text.find(stop)]]


def test_system_and_blocks_are_read(server: Running, client: Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks: list[MessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]}
    ]
    counts = [
        client.messages.count_tokens(model="tiny", system=system, messages=blocks).input_tokens,
        client.messages.count_tokens(model="tiny", system="Be brief.", messages=ASK).input_tokens,
    ]
    chat = expected(server, messages=[{"role": "system", "content": "Be brief."}, *ASK])
    assert counts == [chat["usage"]["prompt_tokens"]] * 2
    found = client.messages.create(
        messages=blocks, system=system, metadata={"user_id": "me"}, thinking={"type": "disabled"}, **GREEDY
    )
    assert found.content


def test_an_assistants_last_turn_goes_on(server: Running, client: Anthropic) -> None:
    begun: list[MessageParam] = [*ASK, {"role": "assistant", "content": "Because"}]
    found = client.messages.create(messages=begun, **GREEDY)
    prompt = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nBecause"
    text = server.complete(prompt, temperature=0, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    assert [block.text for block in found.content if block.type == "text"] == [text]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_read(client: Anthropic, choice: Any) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 200, "tools": [WEATHER]}
    choice = {**choice, "disable_parallel_tool_use": True}
    found = client.messages.create(messages=ASK, tool_choice=choice, **asked)
    assert found.stop_reason == "tool_use"
    (use,) = [block for block in found.content if block.type == "tool_use"]
    assert use.name == "weather"
    jsonschema.validate(use.input, dict(WEATHER["input_schema"]))
    with client.messages.stream(messages=ASK, tool_choice=choice, **asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (again,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert json.loads("".join(pieces)) == again.input == use.input
    result: MessageParam = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Rain."}]},
            {"type": "text", "text": "And tomorrow?"},
        ],
    }
    told: list[MessageParam] = [*ASK, {"role": "assistant", "content": found.content}, result]
    answer = client.messages.create(messages=told, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY)
    assert answer.content
    counted = client.messages.count_tokens(model="tiny", messages=told, tools=[WEATHER])
    assert counted.input_tokens > client.messages.count_tokens(model="tiny", messages=ASK).input_tokens + 50


def test_a_call_that_is_cut_off_is_left_out(client: Anthropic) -> None:
    asked = {**GREEDY, "max_tokens": 45}
    found = client.messages.create(messages=ASK, tools=[WEATHER], tool_choice={"type": "any"}, **asked)
    assert (found.content, found.stop_reason) == ([], "max_tokens")
    with client.messages.stream(messages=ASK, tools=[WEATHER], tool_choice={"type": "any"}, **asked) as stream:
        assert [event.type for event in stream][-2:] == ["message_delta", "message_stop"]


def test_a_schema_is_kept_to(client: Anthropic) -> None:
    schema: Any = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    found = client.messages.create(messages=ASK, **{**GREEDY, "max_tokens": 200}, output_config={"format": schema})
    (block,) = found.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), dict(WEATHER["input_schema"]))


def test_thinking_comes_in_blocks_of_its_own(tmp_path: Path) -> None:
    with running(serve(tmp_path, "opened")) as server, Anthropic(base_url=server.url, api_key="none") as client:
        found = client.messages.create(messages=ASK, **GREEDY)
        (block,) = found.content
        assert block.type == "thinking"
        with client.messages.stream(messages=ASK, **GREEDY) as stream:
            thought = "".join(event.thinking for event in stream if event.type == "thinking")
        assert thought == block.thinking


def test_errors_have_anthropics_shape(server: Running, client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1") as caught:
        client.messages.create(messages=ASK, extra_body={"temperature": -1}, **SHORT)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature is -1.0; it must be 0 (greedy) or more"},
    }
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: Field required"):
        client.post("/v1/messages", body={"messages": ASK}, cast_to=object)
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    use: Any = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="belongs to 'assistant'"):
        client.messages.create(messages=[{"role": "user", "content": [use]}], **GREEDY)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(messages=ASK, **{**GREEDY, "model": "claude"})
    with (
        Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
    ):
        stranger.messages.create(messages=ASK, **GREEDY)
    answer = server.client.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


def test_an_error_in_a_stream_is_raised(server: Running, client: Anthropic) -> None:
    stream = client.messages.create(messages=ASK, stream=True, **{**GREEDY, "max_tokens": 1500})
    next(iter(stream))
    loop = server.front._loop
    assert loop is not None
    loop.call_soon_threadsafe(server.front.end, Unavailable("enough of this"))
    with pytest.raises(anthropic.APIStatusError, match="enough of this"):
        list(stream)

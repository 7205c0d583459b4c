"""The `openai` client's Responses API against a real server with a tiny model that knows tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from saguaro.errors import Unavailable
from tests.serve.http.driver import Running, running
from tests.serve.http.test_messages import serve

INPUT = "Why is the sky blue?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA, "strict": True}
GREEDY: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
ON: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(serve(tmp_path_factory.mktemp("tools"), "hermes")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def expected(server: Running, messages: list[Any]) -> str:
    """What chat completions answer."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_response_is_what_chat_completions_say(server: Running, client: OpenAI) -> None:
    text = expected(server, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": INPUT}])
    found = client.responses.create(input=INPUT, instructions="Be brief.", metadata={"a": "b"}, **GREEDY, **ON)
    assert found.output_text == text
    assert (found.status, found.object, found.model, found.metadata) == ("incomplete", "response", "tiny", {"a": "b"})
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert found.usage.output_tokens == 12
    assert found.usage.total_tokens == found.usage.input_tokens + 12
    turns: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]},
    ]
    assert client.responses.create(input=turns, store=False, **GREEDY, **ON).output_text == text


def test_a_stream_tells_of_every_step(server: Running, client: OpenAI) -> None:
    text = expected(server, [{"role": "user", "content": INPUT}])
    events = list(client.responses.create(input=INPUT, stream=True, **GREEDY, **ON))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    added = next(event for event in events if event.type == "response.output_item.added")
    assert added.item.id == last.response.output[0].id
    with client.responses.stream(input=INPUT, **GREEDY, **ON) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text


def test_a_function_is_called_and_its_result_read(client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 200, "tools": [WEATHER], "parallel_tool_calls": False}
    found = client.responses.create(input=INPUT, tool_choice="required", **asked)
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert (call.name, call.status, found.status) == ("weather", "completed", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    named: Any = {"type": "function", "name": "weather"}
    events = list(client.responses.create(input=INPUT, tool_choice=named, stream=True, **asked))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas == done.arguments == call.arguments
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output][-1] == "function_call"
    turns: Any = [
        {"role": "user", "content": INPUT},
        *(item.to_dict() for item in found.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
    ]
    answer = client.responses.create(input=turns, tools=[WEATHER], tool_choice="none", **GREEDY, **ON)
    assert answer.output_text


def test_a_call_that_is_cut_off_is_incomplete(client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 30, "tools": [WEATHER], "tool_choice": "required"}
    events = list(client.responses.create(input=INPUT, stream=True, **asked))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "response.function_call_arguments.done" not in [event.type for event in events]


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(input=INPUT, text=text, **{**GREEDY, "max_output_tokens": 100})
    jsonschema.validate(json.loads(found.output_text), SCHEMA)
    assert found.text is not None
    assert found.text.format is not None
    assert found.text.format.type == "json_schema"


def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    with running(serve(tmp_path, "opened")) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.responses.create(input=INPUT, **GREEDY, **ON)
        (item,) = found.output
        assert item.type == "reasoning"
        assert item.content is not None
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens == 12
        events = list(client.responses.create(input=INPUT, stream=True, **GREEDY, **ON))
        thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert thought == item.content[0].text
        turns: Any = [{"role": "user", "content": INPUT}, item.to_dict(), {"role": "user", "content": "Go on."}]
        assert client.responses.create(input=turns, **GREEDY).output


def test_what_cannot_be_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="responses are not stored here; send the whole conversation"):
        client.responses.create(input=INPUT, previous_response_id="resp_1", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="background is True"):
        client.responses.create(input=INPUT, background=True, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.responses.create(input=INPUT, **{**GREEDY, "temperature": -1})
    with pytest.raises(openai.BadRequestError, match=r"tools.0.type: Input should be 'function'"):
        client.responses.create(input=INPUT, tools=[{"type": "web_search"}], **GREEDY)
    reference: Any = [{"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(openai.BadRequestError, match="item_reference"):
        client.responses.create(input=reference, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")
    assert client.responses.create(input=INPUT, store=True, **GREEDY).to_dict()["store"] is False


def test_a_stream_that_fails_says_so(server: Running, client: OpenAI) -> None:
    stream = client.responses.create(input=INPUT, stream=True, **{**GREEDY, "max_output_tokens": 1500}, **ON)
    next(iter(stream))
    loop = server.front._loop
    assert loop is not None
    loop.call_soon_threadsafe(server.front.end, Unavailable("enough of this"))
    *_, last = stream
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "enough of this")

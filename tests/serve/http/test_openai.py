"""Public clients, `openai` first, against a real server with the default model and a draft in a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from anthropic import Anthropic
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import SecretStr

from saguaro import LLM
from saguaro.errors import Unavailable
from saguaro.model.default import DRAFT
from tests.serve.http.driver import Running, running

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Why is the sky blue?"}]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smol(default_folder: Path) -> Iterator[Running]:
    settings: dict[str, Any] = {"draft": str(DRAFT), "prepare": "always", "link": "process"}
    llm = LLM(default_folder, device="cpu", max_model_len=1024, draft_timeout=60.0, **settings)
    with running(llm, api_keys=["key"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(smol: Running) -> OpenAI:
    return OpenAI(base_url=f"{smol.url}/v1", api_key="key", max_retries=0)


def test_the_model_is_listed(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id == "tiny"


def test_a_chat_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_completion_tokens=16)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.role == "assistant"
    text = whole.choices[0].message.content
    assert text is not None
    assert "light" in text
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_completion_whole_and_streamed(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=8)
    assert "Paris" in whole.choices[0].text
    stream = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_the_same_seed_gives_the_same_text_with_and_without_speculation(client: OpenAI) -> None:
    bodies: list[dict[str, Any]] = [{}, {}, {"speculation": False}, {"prepare": False}]
    texts = [
        client.completions.create(
            model="tiny", prompt=PROMPT, temperature=1, seed=11, max_tokens=12, extra_body=body
        ).choices[0].text
        for body in bodies
    ]  # fmt: skip
    assert len(set(texts)) == 1
    other = client.completions.create(model="tiny", prompt=PROMPT, temperature=1, seed=12, max_tokens=12)
    assert other.choices[0].text != texts[0]


def test_several_outputs_are_several(client: OpenAI) -> None:
    found = client.chat.completions.create(model="tiny", messages=ASK, n=3, temperature=1, seed=1, max_tokens=6)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) == 3


def test_logprobs_of_both_kinds(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert bytes(token.bytes or ()).decode() == token.token
        assert token.logprob <= 0
    text = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=2)
    found = text.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or []) == text.choices[0].text
    assert [len(tops) for tops in found.top_logprobs or []] == [2] * 5
    assert (found.text_offset or [])[:1] == [0]


def test_a_stop_string(client: OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="1, 2, 3, 4,", temperature=0, max_tokens=16, stop=[" 7"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (" 5, 6,", "stop")


def test_rounds_are_told(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, max_tokens=24, stream=True, extra_body={"return_speculation": True}
    )
    rounds = [one for chunk in stream for one in getattr(chunk.choices[0], "speculation", [])]
    assert sum(len(one["tokens"]) for one in rounds) == 24
    assert any(one["hit"] for one in rounds)


def test_errors_are_the_clients_own(smol: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.chat.completions.create(model="gpt", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        client.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{smol.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_an_error_in_a_stream_is_raised(smol: Running, client: OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=400, stream=True)
    next(iter(stream))
    loop = smol.front._loop
    assert loop is not None
    loop.call_soon_threadsafe(smol.front.end, Unavailable("enough of this"))
    with pytest.raises(openai.APIError, match="enough of this"):
        list(stream)


def test_json_by_a_schema_with_and_without_speculation(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    texts = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Tell me about a city."}], temperature=1, seed=seed,
            max_tokens=60, extra_body=more,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        ).choices[0].message.content
        for seed in range(2) for more in ({}, {"speculation": False})
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    for text in texts:
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": WEATHER}}
]


def test_a_model_that_knows_no_tools_calls_them(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    first = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls
    call = first.message.tool_calls[0]
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER)
    assert arguments["city"].startswith("Paris")
    plain = {"extra_body": {"speculation": False}, **asked}
    again = client.chat.completions.create(messages=messages, tool_choice="required", **plain).choices[0].message
    functions = [one.function for one in first.message.tool_calls if one.type == "function"]
    assert [one.function for one in again.tool_calls or () if one.type == "function"] == functions
    later: list[Any] = [*messages, first.message]
    later += [{"role": "tool", "tool_call_id": one.id, "content": "31 degrees"} for one in first.message.tool_calls]
    auto = client.chat.completions.create(messages=later, **asked).choices[0].message
    assert auto.content or auto.tool_calls
    spoken = client.chat.completions.create(messages=later, tool_choice="none", **asked).choices[0].message
    assert spoken.tool_calls is None
    assert spoken.content


def test_langchain_calls_tools_on_the_default_model(smol: Running) -> None:
    @langchain_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = ChatOpenAI(
        model="tiny", base_url=f"{smol.url}/v1", api_key=SecretStr("key"), temperature=0, max_retries=0
    ).bind_tools([add], tool_choice="add")
    (call,) = chat.invoke("What is 17 plus 25?").tool_calls
    assert call["args"] == {"a": 17, "b": 25}
    parts = [
        chunk.tool_call_chunks for chunk in chat.stream("What is 17 plus 25?") if isinstance(chunk, AIMessageChunk)
    ]
    told = [part for each in parts for part in each]
    assert told[0]["name"] == "add"
    assert json.loads("".join(part["args"] or "" for part in told)) == call["args"]


QUESTION = "How is the weather in Paris?"


def test_the_responses_api_calls_tools_on_the_default_model(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    asked: dict[str, Any] = {"model": "tiny", "tools": [tool], "temperature": 0, "parallel_tool_calls": False}
    found = client.responses.create(input=QUESTION, tool_choice="required", max_output_tokens=100, **asked)
    (call,) = [item for item in found.output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    turns: Any = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in found.output)]
    turns += [{"type": "function_call_output", "call_id": call.call_id, "output": "31 degrees"}]
    events = list(client.responses.create(input=turns, tool_choice="none", max_output_tokens=12, stream=True, **asked))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text != ""


def test_anthropics_client_uses_tools_on_the_default_model(smol: Running) -> None:
    tool: Any = {"name": "get_weather", "description": "Weather now", "input_schema": WEATHER}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    greedy: Any = {"temperature": 0}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "tools": [tool], "extra_body": greedy}
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    with Anthropic(base_url=smol.url, api_key="key", max_retries=0) as client:
        with client.messages.stream(messages=turns, tool_choice=one, **asked) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            found = stream.get_final_message()
        assert found.stop_reason == "tool_use"
        (use,) = [block for block in found.content if block.type == "tool_use"]
        assert json.loads("".join(pieces)) == use.input
        jsonschema.validate(use.input, WEATHER)
        turns += [{"role": "assistant", "content": found.content}]
        turns += [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "31 degrees"}]}
        ]
        later = {**asked, "max_tokens": 12}
        answer = client.messages.create(messages=turns, tool_choice={"type": "none"}, **later)
        assert [block.type for block in answer.content] == ["text"]

"""Tools and reasoning against real servers whose tiny models have templates in the public shapes. The models are
random, so calls are demanded: by tool_choice required, or by name."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import jsonschema
import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, SecretStr

from saguaro.serve.tools.parsers import Parsers
from tests.serve.http.driver import Running, running, tiny_llm
from tests.serve.tools.templates import write_model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city", "days", "tags"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the end"}]  # as Running.chat asks
KINDS = ("hermes", "llama3", "mistral", "mistral_args", "plain", "thinking")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(
                running(tiny_llm(write_model(tmp_path_factory.mktemp(kind), kind), kv_memory="4MiB"))
            )
            for kind in KINDS
        }


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, servers: dict[str, Running]) -> Running:
    return servers[request.param]


@pytest.fixture
def hermes(servers: dict[str, Running]) -> Running:
    return servers["hermes"]


@pytest.fixture
def client(hermes: Running) -> OpenAI:
    return OpenAI(base_url=f"{hermes.url}/v1", api_key="-", max_retries=0)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls, which must be as the API has them."""
    for call in message["tool_calls"]:
        assert set(call) == {"id", "type", "function"}
        assert call["type"] == "function"
        assert call["id"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def quiet(server: Running) -> dict[str, Any]:
    """What keeps a model that may think from thinking."""
    return {"chat_template_kwargs": {"enable_thinking": False}} if server.service.dialect.thinking else {}


@pytest.mark.parametrize("seed", range(2))
def test_a_named_call_is_made(server: Running, seed: int) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "seed": seed, "max_tokens": 300, **quiet(server)}
    choice = server.chat(**asked)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    ((name, arguments),) = calls_of(choice["message"])
    assert name == "get_weather"
    jsonschema.validate(arguments, WEATHER)
    for method in ("speculation", "prepare"):
        again = server.chat(**{**asked, method: False})["choices"][0]
        assert calls_of(again["message"]) == [(name, arguments)]


def test_a_call_streams_as_it_is_written(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "seed": 1, "max_tokens": 300, **quiet(server)}
    ((_, whole),) = calls_of(server.chat(**asked)["choices"][0]["message"])
    events = server.events("/v1/chat/completions", {"messages": ASK, **asked})
    deltas = [event["choices"][0]["delta"] for event in events]
    told = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    ((first,), *rest) = told
    assert first["index"] == 0
    assert first["type"] == "function"
    assert first["id"]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert len(rest) > 3
    assert all(set(part) == {"index", "function"} for (part,) in rest)
    assert json.loads("".join(part["function"]["arguments"] for (part,) in rest)) == whole
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"
    assert "seed" in events[-1]["choices"][0]


def test_required_calls_are_of_declared_tools(server: Running) -> None:
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 1,
        "max_tokens": 250,
        "n": 4,
        **quiet(server),
    }
    for choice in server.chat(**asked)["choices"]:
        complete = choice["message"]["tool_calls"][: -1 if choice["finish_reason"] == "length" else None]
        for name, arguments in calls_of({"tool_calls": complete}):
            jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"maxProperties": 0})
    for choice in server.chat(**asked, parallel_tool_calls=False)["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        ((name, _),) = calls_of(choice["message"])
        assert name in ("get_weather", "now")


def test_auto_is_text_unless_a_call_is_made(server: Running) -> None:
    asked = {"seed": 5, "max_tokens": 40, **quiet(server)}
    for choice in ("auto", None):
        message = server.chat(tools=TOOLS, tool_choice=choice, **asked)["choices"][0]["message"]
        assert message.get("tool_calls") or message["content"]
    silent = server.chat(tools=TOOLS, tool_choice="none", **asked)
    assert "tool_calls" not in silent["choices"][0]["message"]
    assert silent["usage"]["prompt_tokens"] == server.chat(**asked)["usage"]["prompt_tokens"]


def test_a_conversation_goes_on_after_a_call(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300, **quiet(server)}
    answer = server.chat(tool_choice=NAMED, seed=1, **asked)["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12"}
    for turn in (answer, {**answer, "tool_calls": [{**call, "id": "call_of_another_server"}]}):
        id = turn["tool_calls"][0]["id"]
        messages = [*ASK, turn, {**result, "tool_call_id": id}]
        later = server.post("/v1/chat/completions", {"messages": messages, **asked, "max_tokens": 4})
        assert later.status_code == 200, later.text
        assert later.json()["usage"]["prompt_tokens"] > 100


def test_other_parameters_work_beside_tools(hermes: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "seed": 1, "max_tokens": 300, "n": 2}
    whole = hermes.chat(**asked, logprobs=True, top_logprobs=1, return_speculation=True)
    for choice in whole["choices"]:
        n_tokens = len(choice["logprobs"]["content"])
        assert sum(len(one["tokens"]) for one in choice["speculation"]) == n_tokens
        assert calls_of(choice["message"])[0][0] == "get_weather"
    asked |= {"logprobs": True, "return_speculation": True, "stream_options": {"include_usage": True}}
    *events, last = hermes.events("/v1/chat/completions", {"messages": ASK, **asked})
    for index, choice in enumerate(whole["choices"]):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        n_tokens = sum(len(each["logprobs"]["content"]) for each in mine if each["logprobs"])
        assert n_tokens == len(choice["logprobs"]["content"])
        assert sum(len(one["tokens"]) for each in mine for one in each.get("speculation", ())) == n_tokens
        parts = [part for each in mine for part in each["delta"].get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        assert arguments == choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert last["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {"prompt_tokens_details": 0}


def test_a_stop_string_cuts_a_call_off(hermes: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "seed": 1, "max_tokens": 300}
    for limit, reason in ({"stop": '"days"'}, "stop"), ({"max_tokens": 45}, "length"):
        choice = hermes.chat(**{**asked, **limit})["choices"][0]
        assert choice["finish_reason"] == reason
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith('{"city":')
        assert not call["function"]["arguments"].endswith("}")
    assert hermes.chat(**asked, stop="</tool_call>")["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is 'a b'", "tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice is 'x'",
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tools is empty", "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools and response_format", "response_format"),
        ({"tools": TOOLS * 65}, "at most 128", "tools"),
        ({"tools": TOOLS, "messages": [{"role": "tool", "content": "x"}]}, "tool_call_id", "messages"),
        ({"functions": [{"name": "f"}]}, "functions is", "functions"),
        ({"function_call": "auto"}, "function_call is 'auto'", "function_call"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs names 'messages'", "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "does not have it", "reasoning_effort"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "no grammar can be made of the tools' parameters",
            "tools",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(hermes: Running, body: dict[str, Any], message: str, param: str) -> None:
    answer = hermes.post("/v1/chat/completions", {"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_tokens_of_a_prompt_with_tools_can_be_counted(hermes: Running) -> None:
    counted = hermes.post("/tokenize", {"messages": ASK, "tools": TOOLS}).json()["count"]
    asked = hermes.post("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "max_tokens": 1}).json()
    assert counted == asked["usage"]["prompt_tokens"]


# Reasoning.


WORD = {"structured_outputs": {"choice": ["yes", "no"]}}


def thoughtful(server: Running, **body: Any) -> dict[str, Any]:
    """A request that makes a random model reason, and end that soon."""
    ids = server.service.dialect.marks.ids
    bias = {str(ids["<think>"]): 100.0, str(ids["</think>"]): 2.0}
    return {"logit_bias": bias, "max_tokens": 300, **body}


def reasoned(server: Running, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request of which some reasoning and more came, and its response."""
    for seed in range(40):
        asked = thoughtful(server, seed=seed, **body)
        answer = server.chat(**asked)
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length" and len(choice["message"].get("reasoning_content", "")) > 2:
            return asked, answer
    raise AssertionError("no seed gave reasoning")


def test_reasoning_is_apart_from_the_answer(servers: dict[str, Running]) -> None:
    server = servers["thinking"]
    asked, whole = reasoned(server, **WORD)
    message = whole["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert message["reasoning_content"] == message["reasoning"]
    details = whole["usage"]["completion_tokens_details"]
    assert 2 < details["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    body = {"messages": ASK, **asked, "stream_options": {"include_usage": True}}
    *events, last = server.events("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert last["usage"]["completion_tokens_details"] == details
    silent = server.chat(**asked, include_reasoning=False)["choices"][0]["message"]
    assert silent["content"] == message["content"]
    assert not {"reasoning", "reasoning_content"} & set(silent)
    events = server.events("/v1/chat/completions", {**body, "include_reasoning": False, "stream_options": None})
    assert not any("reasoning" in event["choices"][0]["delta"] for event in events)


def test_reasoning_can_be_switched_off(servers: dict[str, Running]) -> None:
    server = servers["thinking"]
    for switch in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = server.chat(**thoughtful(server, **WORD, **switch))
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_call_follows_the_reasoning(servers: dict[str, Running]) -> None:
    server = servers["thinking"]
    _, answer = reasoned(server, tools=TOOLS, tool_choice=NAMED)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert [name for name, _ in calls_of(message)] == ["get_weather"]


def test_parsers_can_be_named(servers: dict[str, Running], tmp_path_factory: pytest.TempPathFactory) -> None:
    parsers = Parsers(tool_call_parser="json", reasoning_parser="none")
    llm = tiny_llm(write_model(tmp_path_factory.mktemp("named"), "thinking"), kv_memory="4MiB")
    with running(llm, parsers=parsers) as server:
        message = server.chat(tools=TOOLS, tool_choice=NAMED, seed=1, max_tokens=300)["choices"][0]["message"]
        assert [name for name, _ in calls_of(message)] == ["get_weather"]
        assert server.service.dialect.thinking is None


# The openai client, as its documentation calls functions.


def test_the_openai_clients_function_calling(client: OpenAI) -> None:
    messages = list(ASK)
    first = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="required", seed=2, max_tokens=400
    )
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message)  # type: ignore[arg-type]
    for call in message.tool_calls:
        assert call.type == "function"
        json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, seed=2, max_tokens=8)
    assert second.choices[0].message.role == "assistant"


def test_the_openai_clients_stream_accumulates_calls(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "seed": 2, "max_tokens": 400}
    whole = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
    final: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**asked, tool_choice="required", stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            final.setdefault(call.index, call)
            if final[call.index] is not call:
                final[call.index].function.arguments += call.function.arguments
    assert whole.tool_calls
    expected = [call.function for call in whole.tool_calls if call.type == "function"]
    assert [call.function.model_dump() for call in final.values()] == [each.model_dump() for each in expected]


class GetWeather(BaseModel):
    """The weather in a city."""

    hot: bool
    windy: bool


def test_the_openai_clients_parsed_calls(client: OpenAI) -> None:
    strict = openai.pydantic_function_tool(GetWeather)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [strict], "seed": 4, "max_tokens": 300}
    parsed = client.chat.completions.parse(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


# LangChain.


@langchain_tool
def weather(hot: bool, windy: bool) -> str:
    """The weather in a city."""
    return f"{hot} {windy}"


def test_langchain_binds_tools(hermes: Running) -> None:
    key = SecretStr("-")
    chat = ChatOpenAI(model="tiny", base_url=f"{hermes.url}/v1", api_key=key, seed=3, max_retries=0, max_tokens=300)  # type: ignore[call-arg]
    bound = chat.bind_tools([weather], tool_choice="weather")
    answer = bound.invoke("How is Paris?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert set(call["args"]) == {"hot", "windy"}
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    whole: Any = None
    for chunk in bound.stream("How is Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk)
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("weather", call["args"])]
    later = chat.bind_tools([weather]).invoke([HumanMessage("How is Paris?"), answer, result])
    assert isinstance(later, AIMessage)

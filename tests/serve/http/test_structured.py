"""What `response_format` and `structured_outputs` mean."""

import json
import re
from typing import Any

import pytest

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import CompletionRequest
from saguaro.serve.http.structured import _openai, _vllm, structured
from tests.serve.http.driver import Running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MEANT: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"json": SCHEMA}),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, {"json": '{"type": "integer"}'}),
    ({"structured_outputs": {"json_object": True}}, {"json": True}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
]


@pytest.mark.parametrize(("given", "meant"), MEANT, ids=range(len(MEANT)))
def test_both_ways_mean_one_thing(given: dict[str, Any], meant: Any) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", **given})
    assert (_openai(body.response_format) or _vllm(body.structured_outputs)) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "has no json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex and choice; give one"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown parameter 'regexp'; did you mean 'regex'?"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs: give one of them",
        ),
    ],
)
def test_what_means_nothing_is_refused(server: Running, given: dict[str, Any], message: str) -> None:
    with pytest.raises(APIError, match=message.replace("?", r"\?")):
        structured(CompletionRequest.model_validate({"prompt": "a", **given}))
    assert server.post("/v1/completions", {"prompt": "a", **given}).status_code == 400


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"structured_outputs": {"regex": "a[bc]{3}d"}}, r"a[bc]{3}d"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, r"yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"+ "z"'}}, r"xy+z"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, r'1|"two"'),
    ],
)
def test_the_output_keeps_to_it(server: Running, given: dict[str, Any], pattern: str) -> None:
    """Of a model that knows nothing, with and without speculation, whole and streamed."""
    body = {"prompt": "the", "temperature": 1, "seed": 4, "max_tokens": 40, **given}
    answers = [server.post("/v1/completions", body | more).json() for more in ({}, {"speculation": False})]
    (text,) = {answer["choices"][0]["text"] for answer in answers}
    assert re.fullmatch(pattern, text)
    assert answers[0]["choices"][0]["finish_reason"] == "stop"


def test_any_object(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "the"}], "temperature": 1, "seed": 2, "max_tokens": 200}
    choice = server.post("/v1/chat/completions", body | {"response_format": {"type": "json_object"}}).json()["choices"][
        0
    ]
    text = choice["message"]["content"]
    assert text.startswith("{")
    assert isinstance(json.loads(text), dict) or choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"structured_outputs": {"regex": "a("}}, "regex"),
        ({"structured_outputs": {"grammar": "start: %%%"}}, "grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "strin"),
    ],
)
def test_a_form_that_cannot_be_is_refused(server: Running, given: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "the", **given})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]

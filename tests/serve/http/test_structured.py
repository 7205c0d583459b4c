"""What `response_format` and `structured_outputs` mean."""

from dataclasses import fields
from typing import Any

import pytest

from saguaro import SamplingParams
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


@pytest.mark.skipif("structured" in {field.name for field in fields(SamplingParams)}, reason="the engine can")
@pytest.mark.parametrize("given", [given for given, meant in MEANT if meant is not None])
def test_what_the_engine_cannot_keep_to_is_refused(server: Running, given: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": "the", **given})
    assert answer.status_code == 400
    assert "only text is supported" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(given))

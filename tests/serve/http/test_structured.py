"""What `response_format` and `structured_outputs` mean."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM
from saguaro.model import compiler, grammar
from saguaro.serve import vetted
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import CompletionRequest
from saguaro.serve.http.structured import _openai, _vllm, structured
from saguaro.serve.vetted import VettedGrammars
from tests.link.target import AGES, is_running
from tests.serve.http.cores import core_seconds, core_seconds_of_ended
from tests.serve.http.driver import LONG, Running, running
from tests.serve.http.test_command import serving

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


# What one client asks for, and what another notices

_PATTERN = {"type": "string", "pattern": "(((([a-z]{1,20}){1,20}){1,20}){1,20})"}
MANY = {"type": "object", "properties": {f"p{i}": _PATTERN for i in range(189)} | {"bad": {"type": "strin"}}}
# Anchored patterns are costly to compile, and the wrong part is the last one that is tried.
_ANCHORED = {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"}
LONG_WAY = {"type": "object", "properties": {f"p{i}": _ANCHORED for i in range(190)} | {"bad": {"type": "strin"}}}
TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"json": LONG_WAY}, "structured.json cannot be served"),
    ({"json": MANY}, "at properties.bad: Invalid type: strin"),
    ({"regex": "(((a{100}){100}){100}){100}"}, "its regular expressions are too large"),
    ({"regex": "((((([a-z]?){20}){20}){20}){20}){20}"}, ""),
    ({"grammar": "start: " + " ".join(["X"] * 400) + "\nX: /[a-z]*[a-z]*[a-z]*/"}, "too many rules apply at once"),
]


def limited(server: Running, llm: LLM, **limits: float) -> VettedGrammars:
    """The server's grammars from now on: bounded by processor time alone, however busy this machine is."""
    server.service.grammars.worker.close()
    budget = replace(vetted.GRAMMAR, seconds=AGES, **limits)  # type: ignore[arg-type]
    server.service.grammars = VettedGrammars(llm.engine.grammars, budget)
    return server.service.grammars


@pytest.mark.parametrize("at", range(len(TOO_MUCH)))
def test_a_grammar_that_takes_too_much_is_refused_in_time(llm: LLM, at: int) -> None:
    """Four at once, in a process of its own, beside ordinary streams; what is said about them is true. Time is that of
    the processor."""
    wish, message = TOO_MUCH[at]
    body = {"prompt": "the", "max_tokens": 8, "structured_outputs": wish, "seed": 1}
    with running(llm) as server, ThreadPoolExecutor(4) as clients:
        (alone,) = _texts(server.events("/v1/completions", {"prompt": "the end", **LONG}))
        grammars = limited(server, llm)
        before = core_seconds_of_ended()
        asked = [clients.submit(server.post, "/v1/completions", body) for _ in range(4)]
        streams = 0
        while streams == 0 or not all(one.done() for one in asked):
            assert _texts(server.events("/v1/completions", {"prompt": "the end", **LONG})) == [alone]
            streams += 1
        assert grammars.worker.pid is not None
        assert core_seconds_of_ended() - before + core_seconds(grammars.worker.pid) < 30
        answers = [one.result() for one in asked]
        if message:
            assert {answer.status_code for answer in answers} == {400}
            assert all(message in answer.json()["error"]["message"] for answer in answers)
        assert all("no text matches" not in answer.text for answer in answers)
        assert re.fullmatch("ab", _text(server, regex="ab"))


def test_a_grammar_that_takes_too_long_ends_the_process_that_compiles_it(llm: LLM) -> None:
    """It is replaced, and nothing of it is left here."""
    with running(llm) as server:
        limited(server, llm, core_seconds=0.03)
        assert _text(server, regex="ab") == "ab"
        first = server.service.grammars.worker.pid
        long = "start: " + " ".join(f"r{i}" for i in range(3000)) + "\n"
        long += "\n".join(f'r{i}: "word{i}" | /x{i}[a-z]+/' for i in range(3000))
        for _ in range(2):
            answer = server.post("/v1/completions", {"prompt": "the", "structured_outputs": {"grammar": long}})
            assert answer.status_code == 400
            assert "to compile it takes more than 0.03 seconds of processor time" in answer.text
        second = server.service.grammars.worker.pid
        assert second not in (None, first)
        assert _text(server, regex="a[b]") == "ab"
        assert server.service.grammars.worker.pid == second, "a refusal is remembered"
    assert server.service.grammars.worker.pid is None
    assert not is_running(second)


def test_an_ambiguous_grammar_ends_its_own_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows get no speculation and take turns: the others go on at their pace, and their texts are the same."""
    monkeypatch.setitem(compiler.LIMITS["grammar"], "max_items_in_row", 120)
    monkeypatch.setattr(grammar, "SLOW_SECONDS", 0.0)
    wish = {"grammar": 'start: start start start start | "a" |'}
    body = {"prompt": "the", "max_tokens": 200, "structured_outputs": wish, "logit_bias": {"97": 50}, "seed": 1}
    with running(llm) as server, ThreadPoolExecutor(4) as clients:
        (alone,) = _texts(server.events("/v1/completions", {"prompt": "the end", **LONG}))
        asked = [clients.submit(server.post, "/v1/completions", body) for _ in range(4)]
        streams = 0
        while streams == 0 or not all(one.done() for one in asked):
            assert _texts(server.events("/v1/completions", {"prompt": "the end", **LONG})) == [alone]
            streams += 1
        for answer in (one.result() for one in asked):
            assert answer.status_code == 400
            assert "too complex or too ambiguous for this text" in answer.json()["error"]["message"]


def _text(server: Running, **wish: Any) -> str:
    text: str = server.complete("the", max_tokens=20, structured_outputs=wish)["choices"][0]["text"]
    return text


def _texts(events: list[Any]) -> list[str]:
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return ["".join(event["choices"][0]["text"] for event in events)]


def test_grammars_that_failed_leave_no_memory(folder: Path, tmp_path: Path) -> None:
    """All schemas differ, and in each some costly parts are compiled before the wrong one is found."""
    with serving(tmp_path / "log", str(folder), "--kv-memory", "2MiB") as (process, client):

        def refuse(name: str) -> None:
            parts = {f"{name}{i}": _ANCHORED for i in range(6)} | {"bad": {"type": "strin"}}
            body = {"prompt": "the", "structured_outputs": {"json": {"type": "object", "properties": parts}}}
            assert client.post("/v1/completions", json=body).status_code == 400

        assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200
        before = resident(process.pid)
        for name in "abcd":
            refuse(name)
        assert resident(process.pid) - before < 100


def resident(pid: int) -> int:
    """MiB of memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024

"""Bad requests: each has its status, and a message that names what is wrong, in the shape that the OpenAI API has."""

from typing import Any

import pytest

from saguaro import LLM
from saguaro.serve.http.limits import ServerLimits
from tests.serve.http.driver import Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "the"}]


def chat(**body: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HELLO, **body}


def text(**body: Any) -> tuple[str, Any]:
    return TEXT, {"prompt": "the", **body}


BAD: list[tuple[tuple[str, Any], int, str, str | None]] = [  # what is sent, status, part of the message, param
    ((CHAT, {}), 400, "messages: Field required", "messages"),
    ((CHAT, []), 400, "the body: Input should be a valid dictionary", None),
    ((CHAT, {"messages": []}), 400, "at least 1", "messages"),
    ((CHAT, {"messages": "the"}), 400, "valid list", "messages"),
    ((CHAT, {"messages": [{"content": "the"}]}), 400, "role: Field required", "messages.0.role"),
    ((CHAT, {"messages": [{"role": "banana", "content": "the"}]}), 400, "role is 'banana'; it must be one of", "role"),
    ((CHAT, {"messages": [{"role": "user"}]}), 400, "has no text", "messages"),
    ((CHAT, {"messages": [{"role": "user", "content": 3}]}), 400, "valid string", "messages.0.content"),
    (
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        400,
        "messages.0.content.0.type: Input should be 'text'",
        None,
    ),
    (chat(model="gpt-4"), 404, "'gpt-4' is not served here; this is 'tiny'", "model"),
    (chat(temperature=-1), 400, "temperature is -1.0; it must be 0 (greedy) or more", "temperature"),
    (chat(temperature="hot"), 400, "temperature: Input should be a valid number", "temperature"),
    (chat(temperature=None, top_p=0), 400, "top_p is 0.0; it must be more than 0", "top_p"),
    (chat(top_p=1.5), 400, "top_p is 1.5", "top_p"),
    (chat(top_k=-2), 400, "top_k is -2", "top_k"),
    (chat(top_k=2.5), 400, "top_k: Input should be a valid integer", "top_k"),
    (chat(min_p=2), 400, "min_p is 2", "min_p"),
    (chat(max_tokens=0), 400, "max_tokens is 0; it must be at least 1", "max_tokens"),
    (chat(max_tokens="6"), 400, "max_tokens: Input should be a valid integer", "max_tokens"),
    (chat(max_tokens=True), 400, "max_tokens: Input should be a valid integer", "max_tokens"),
    (chat(max_tokens=1, max_completion_tokens=2), 400, "differ; give one of them", None),
    (chat(max_tokens=100000), 400, "set max_tokens to at most", None),
    (chat(n=0), 400, "n is 0; it must be between 1 and 64", "n"),
    (chat(n=17), 400, "n is 17; at most 16", "n"),
    (chat(seed=-(2**63)), 400, "seed is -9223372036854775808", "seed"),
    (chat(seed=2**63), 400, "seed is 9223372036854775808", "seed"),
    (chat(presence_penalty=3), 400, "presence_penalty is 3", "presence_penalty"),
    (chat(frequency_penalty=-3), 400, "frequency_penalty is -3", "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty is 0", "repetition_penalty"),
    (chat(logit_bias={"a": 1}), 400, "logit_bias is", "logit_bias"),
    (chat(logit_bias={"99999": 1}), 400, "logit_bias names token 99999; ids go from 0 to 287", "logit_bias"),
    (chat(logit_bias=[1]), 400, "logit_bias: Input should be a valid dictionary", "logit_bias"),
    (chat(stop=[1]), 400, "stop.0: Input should be a valid string", "stop.0"),
    (chat(stop=[""]), 400, "non-empty strings", "stop"),
    (chat(stop=["a"] * 65), 400, "stop has 65 strings; at most 64", "stop"),
    (chat(stop="a" * 1025), 400, "stop has a string of 1025 characters", "stop"),
    (chat(logit_bias={str(token): 0 for token in range(1025)}), 400, "logit_bias has 1025 tokens", "logit_bias"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids names token -1", "stop_token_ids"),
    (chat(min_tokens=9, max_tokens=8), 400, "min_tokens is 9; it must be at most max_tokens, 8", "min_tokens"),
    (chat(top_logprobs=2), 400, "top_logprobs needs logprobs: true", "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "logprobs is 21", "logprobs"),
    (chat(logprobs=3), 400, "logprobs: Input should be a valid boolean", "logprobs"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options needs stream: true", "stream_options"),
    (chat(stream="yes"), 400, "stream: Input should be a valid boolean", "stream"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0] is {'type': 'function'}; it must be", "tools"),
    (chat(tool_choice="auto"), 400, "tool_choice is 'auto', and tools is empty", "tool_choice"),
    (
        chat(response_format={"type": "yaml"}),
        400,
        "response_format.type: Input should be 'text'",
        "response_format.type",
    ),
    (chat(temprature=1), 400, "unknown parameter 'temprature'; did you mean 'temperature'?", "temprature"),
    (chat(chat_template="{{ 1 }}"), 400, "chat_template is '{{ 1 }}'; Saguaro does not support it", "chat_template"),
    (chat(speculation="no"), 400, "speculation: Input should be a valid boolean", "speculation"),
    ((TEXT, {}), 400, "prompt: Field required", "prompt"),
    ((TEXT, {"prompt": []}), 400, "prompt is empty", "prompt"),
    ((TEXT, {"prompt": ""}), 400, "the prompt has no tokens", None),
    ((TEXT, {"prompt": ["the", ""]}), 400, "the prompt has no tokens", None),
    ((TEXT, {"prompt": [[]]}), 400, "the prompt has no tokens", None),
    ((TEXT, {"prompt": ["the", 3]}), 400, "prompt", None),
    ((TEXT, {"prompt": [288]}), 400, "prompt names token 288; ids go from 0 to 287", "prompt"),
    ((TEXT, {"prompt": [-1]}), 400, "prompt names token -1", "prompt"),
    ((TEXT, {"prompt": [5] * 256}), 400, "the prompt has 256 tokens, at most 255 fit", None),
    ((TEXT, {"prompt": "x" * 100_000}), 400, "characters, at most", None),
    ((TEXT, {"prompt": ["the"] * 65}), 400, "65 prompts; a request may have at most 64", "prompt"),
    ((TEXT, {"prompt": ["the"] * 20, "n": 16}), 400, "320 outputs in one request", None),
    (text(use_beam_search=True), 400, "use_beam_search is True; Saguaro does not support it", "use_beam_search"),
    (text(max_tokens=0), 400, "max_tokens is 0; it must be at least 1", "max_tokens"),
    (text(max_tokens=0, echo=False), 400, "max_tokens is 0; it must be at least 1", "max_tokens"),
    (text(prompt_logprobs=21), 400, "prompt_logprobs is 21; it must be between 0 and 20", "prompt_logprobs"),
    (text(prompt_logprobs=1, stream=True), 400, "prompt_logprobs is not told in streams", "prompt_logprobs"),
    (text(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens is 0; it must be at least 1", None),
    (text(allowed_token_ids=[288]), 400, "allowed_token_ids names token 288", "allowed_token_ids"),
    (text(allowed_token_ids=[270]), 400, "the model says 0 to 263", "allowed_token_ids"),
    (text(allowed_token_ids=[1] * 1025), 400, "allowed_token_ids has 1025 tokens", "allowed_token_ids"),
    (text(allowed_token_ids=[1], guided_choice=["a"]), 400, "give one of them", None),
    (
        chat(tools=[{"type": "function", "function": {"name": "now"}}], guided_regex="a"),
        400,
        "tools and response_format both say what the output is",
        "response_format",
    ),
    (text(guided_regex="a", guided_choice=["a"]), 400, "guided_regex and guided_choice: give one", "guided_choice"),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "exclude each other",
        "continue_final_message",
    ),
    (text(best_of=2), 400, "best_of is 2", "best_of"),
    (text(suffix="end"), 400, "suffix is 'end'", "suffix"),
    (text(logprobs=True), 400, "logprobs: Input should be a valid integer", "logprobs"),
    (text(logprobs=21), 400, "logprobs is 21", "logprobs"),
    (("/tokenize", {}), 400, "give either prompt or messages", "prompt"),
    (("/tokenize", {"prompt": "a", "messages": HELLO}), 400, "give either prompt or messages", "prompt"),
    (("/tokenize", {"prompt": "a", "model": "b"}), 404, "'b' is not served here", "model"),
    (("/detokenize", {"tokens": [288]}), 400, "tokens names token 288", "tokens"),
    (("/detokenize", {"tokens": "a"}), 400, "tokens: Input should be a valid list", "tokens"),
    (("/v1/nothing", {"input": "a"}), 404, "POST /v1/nothing: Not Found", None),
    (("/v1/embeddings", {"input": "a"}), 404, "/v1/embeddings: this server continues text", None),
    (("/health", {}), 405, "POST /health: Method Not Allowed", None),
    (("/v1/models", {}), 405, "Method Not Allowed", None),
]


def check(answer: Any, status: int, message: str, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert message in body["error"]["message"]
    assert param is None or body["error"]["param"] == param
    assert "detail" not in body


@pytest.mark.parametrize(("sent", "status", "message", "param"), BAD, ids=[f"{at}" for at in range(len(BAD))])
def test_a_bad_request_is_told_what_is_wrong(
    server: Running, sent: tuple[str, Any], status: int, message: str, param: str | None
) -> None:
    check(server.post(*sent), status, message, param)


RAW: list[tuple[bytes, str, int, str]] = [
    (b"", "application/json", 400, "the body"),
    (b"{", "application/json", 400, "not JSON"),
    (b"\xff\xfe", "application/json", 400, ""),
    (b"[" * 100_000, "application/json", 400, ""),
    (b'{"prompt": "the"}', "text/plain", 415, "send Content-Type: application/json"),
    (b"prompt=the", "application/x-www-form-urlencoded", 415, "Content-Type"),
    (b'{"prompt": "the", "temperature": NaN}', "application/json", 400, "temperature is nan"),
    (b'{"prompt": "the", "temperature": Infinity}', "application/json", 400, "temperature is inf"),
    (rb'{"prompt": "\ud83d"}', "application/json", 400, "not JSON: unexpected end of hex escape"),
    (b'{"prompt": "the", "top_k": 1e400}', "application/json", 400, "top_k"),
    (b'{"prompt": "the", "seed": ' + b"9" * 5000 + b"}", "application/json", 400, ""),
]


@pytest.mark.parametrize(("body", "kind", "status", "message"), RAW, ids=range(len(RAW)))
def test_what_is_no_request_at_all_is_told_so(
    server: Running, body: bytes, kind: str, status: int, message: str
) -> None:
    check(server.client.post(TEXT, content=body, headers={"Content-Type": kind}), status, message, None)


def test_a_get_where_a_post_is_due(server: Running) -> None:
    answer = server.client.get(CHAT)
    check(answer, 405, "GET /v1/chat/completions", None)
    assert answer.headers["allow"] == "POST"


def test_a_body_that_is_too_large_is_not_read(llm: LLM) -> None:
    with running(llm, ServerLimits(max_body="2KiB")) as server:
        check(server.post(*text(prompt="x" * 3000)), 413, "at most 2.0 KiB are read; send less", None)
        pieces = (b"x" * 1000 for _ in range(4))  # sent in chunks, whose size is not told beforehand
        check(server.client.post(TEXT, content=pieces), 413, "at most 2.0 KiB", None)
        assert server.complete("the", max_tokens=1)


def test_the_schema_tells_of_these_errors_and_of_no_others(server: Running) -> None:
    schema = server.client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method in methods.values():
            assert "422" not in method["responses"], path
    fields = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["top_k"]["description"] == "Keep the k likeliest tokens; 0 keeps all."
    assert {"temperature", "speculation", "prepare", "max_completion_tokens", "return_speculation"} <= set(fields)

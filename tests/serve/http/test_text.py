"""Chat and completions say what the engine says, whole or piece by piece."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from tests.serve.http.driver import LONG, Running, tiny_llm

ASKED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain(folder: Any) -> LLM:
    """What the text must be: the same model without any speculation."""
    return tiny_llm(folder, draft=None, method="ar")


def test_a_completion_is_what_the_engine_says(server: Running, plain: LLM) -> None:
    expected = plain.generate("the end", SamplingParams(**ASKED))[0]
    found = server.complete("the end", **ASKED)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["seed"]) == (expected.text, "length", 5)
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert found["usage"]["completion_tokens"] == len(expected.token_ids) == 24
    assert (found["object"], found["model"], found["id"][:5]) == ("text_completion", "tiny", "cmpl-")


@pytest.mark.parametrize("off", [{}, {"speculation": False}, {"prepare": False}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_pieces_put_together_are_the_whole(server: Running, path: str, off: dict[str, Any]) -> None:
    body = {**ASKED, "n": 2, "logprobs": 2 if path == "/v1/completions" else True, **off}
    body |= {"prompt": "an inn"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "an inn"}]}
    whole = server.post(path, body).json()
    events = server.events(path, {**body, "stream_options": {"include_usage": True}})
    *chunks, tail = events
    assert tail["choices"] == []
    assert tail["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 48
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in events}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        ends = [one["finish_reason"] for one in mine if one["finish_reason"] is not None]
        assert ends == [choice["finish_reason"]]
        assert mine[-1]["seed"] == choice["seed"]
        if path == "/v1/completions":
            assert "".join(one["text"] for one in mine) == choice["text"]
            told = [one["logprobs"] for one in mine]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [each for one in told for each in one[name]] == choice["logprobs"][name]
        else:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
            told = [one["logprobs"] for one in mine if one["logprobs"]]
            assert [each for one in told for each in one["content"]] == choice["logprobs"]["content"]
    first, second = whole["choices"]
    assert first["seed"] != second["seed"]


def test_a_reported_seed_gives_the_same_again(server: Running) -> None:
    found = server.complete("the", n=3, max_tokens=12, ignore_eos=True)["choices"]
    for choice in found:
        again = server.complete("the", seed=choice["seed"], max_tokens=12, ignore_eos=True)["choices"][0]
        assert again["text"] == choice["text"]


def test_prompts_may_be_texts_or_tokens_one_or_many(server: Running) -> None:
    tokens = server.post("/tokenize", {"prompt": "the end"}).json()["tokens"]
    alone = server.complete("the end", **ASKED)["choices"][0]["text"]
    other = server.complete("an", **ASKED)["choices"][0]["text"]
    assert server.complete(tokens, **ASKED)["choices"][0]["text"] == alone
    assert [c["text"] for c in server.complete(["the end", "an"], **ASKED)["choices"]] == [alone, other]
    many = server.complete([tokens, tokens], **ASKED, n=2)["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    assert many[0]["text"] == many[2]["text"] == alone
    assert many[1]["text"] == many[3]["text"] != alone


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(server: Running) -> None:
    text = server.complete("the end", **LONG)["choices"][0]["text"]
    stop = next(text[at] for at in range(5, len(text)) if text[at].isascii() and text[at].isprintable())
    (choice,) = server.complete("the end", **LONG, stop=stop)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]


def test_bias_and_stop_tokens_reach_the_engine(server: Running) -> None:
    (choice,) = server.complete("the", max_tokens=5, logit_bias={"120": 100}, ignore_eos=True)["choices"]
    assert choice["text"] == "xxxxx"
    (choice,) = server.complete("the", max_tokens=5, logit_bias={"120": 100}, stop_token_ids=[120])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 120)


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 10**30},
    {"temperature": 5e-324},
    {"temperature": 1e308},
    {"top_p": 1e-320},
    {"min_p": 1},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e300, "temperature": 1e-300},
    {"logit_bias": {"5": 1e308, "6": -1e308}, "logprobs": 20},
    {"logit_bias": {str(token): -1e39 for token in range(288)}, "logprobs": 20},
    {"seed": 2**63 - 1, "n": 3},
    {"min_tokens": 16, "stop_token_ids": list(range(288))},
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=range(len(EXTREMES)))
def test_what_is_extreme_for_one_is_nothing_to_the_others(server: Running, plain: LLM, extreme: dict[str, Any]) -> None:
    expected = plain.generate("the end", SamplingParams(**ASKED))[0].text
    with ThreadPoolExecutor(2) as pool:
        usual = pool.submit(server.complete, "the end", **ASKED)
        odd = pool.submit(server.complete, "the end", **{"ignore_eos": True, **extreme})
        assert usual.result()["choices"][0]["text"] == expected
        assert all(choice["finish_reason"] in ("length", "stop") for choice in odd.result()["choices"])


def test_a_completion_has_16_tokens_and_a_chat_fills_the_context(server: Running) -> None:
    assert server.complete("the", ignore_eos=True)["usage"]["completion_tokens"] == 16
    usage = server.chat("the", ignore_eos=True)["usage"]
    assert usage["total_tokens"] == server.service.max_model_len


def test_max_completion_tokens_is_another_name(server: Running) -> None:
    assert server.chat("the", ignore_eos=True, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.chat("the", ignore_eos=True, max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_message_may_come_in_parts_and_a_developer_is_the_system(server: Running) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "end"}]
    bodies = [
        [{"role": "system", "content": "an"}, {"role": "user", "content": "the end"}],
        [{"role": "developer", "content": "an"}, {"role": "user", "content": parts}],
    ]
    first, second = (server.post("/tokenize", {"messages": messages}).json() for messages in bodies)
    assert first == second
    assert (first["count"], first["max_model_len"]) == (len(first["tokens"]), 256)


def test_special_tokens_in_a_message_are_text_unless_asked_for(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "the <|end|>"}]}
    assert 256 not in server.post("/tokenize", body).json()["tokens"]
    assert 256 in server.post("/tokenize", body | {"parse_special_tokens": True}).json()["tokens"]
    counts = [
        server.post("/v1/chat/completions", body | more | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for more in ({}, {"parse_special_tokens": True})
    ]
    assert counts[0] == counts[1] + len("<|end|>") - 1


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": "the énd", "return_token_strs": True, "model": "tiny"}).json()
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]), len(found["tokens"]))
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "the énd"}
    assert server.post("/detokenize", {"tokens": [256]}).json() == {"prompt": "<|end|>"}


def test_what_wants_nothing_may_be_said(server: Running) -> None:
    neutral = {"tools": [], "tool_choice": "none", "echo": False, "best_of": 1, "suffix": None, "user": "me"}
    neutral |= {"response_format": {"type": "text"}, "skip_special_tokens": True, "priority": 0, "length_penalty": 1.0}
    assert server.complete("the", **neutral, **ASKED) | {"id": 0, "created": 0} == server.complete("the", **ASKED) | {
        "id": 0,
        "created": 0,
    }


def test_the_model_is_known_by_its_names(server: Running) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    told = {"method": "ssd-uniform", "lookahead": 3, "verification": "shared", "prepares": True, "budget": 4}
    told |= {"preparation": "always", "why_not_prepared": None, "why_not_asked": None}
    assert card["speculation"] == told
    assert server.client.get("/v1/models/tiny").json() == card
    assert server.client.get("/v1/models/a/b").status_code == 404
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/health").json() == {"status": "ok"}

"""Which output is which, why each ended, and what is counted of them; whole and piece by piece."""

from typing import Any

import pytest

from saguaro import LLM
from tests.serve.http.driver import Running, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
X: dict[str, Any] = {"logit_bias": {"120": 100}, "ignore_eos": True}  # every token is an x
BROKEN: dict[str, Any] = {
    "logit_bias": {"226": 100},
    "ignore_eos": True,
}  # every token begins a character that is never complete


def ended(server: Running, stream: bool, path: str = TEXT, **body: Any) -> tuple[str, str, Any, int]:
    """Text, finish reason, stop reason and number of tokens of the only choice."""
    asked = {"prompt": "the"} if path == TEXT else {"messages": [{"role": "user", "content": "the"}]}
    if not stream:
        found = server.post(path, {**asked, **body}).json()
        (choice,) = found["choices"]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        return text, choice["finish_reason"], choice["stop_reason"], found["usage"]["completion_tokens"]
    *chunks, tail = server.events(path, {**asked, **body, "stream_options": {"include_usage": True}})
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(one["text"] if path == TEXT else one["delta"].get("content", "") for one in choices)
    assert not any(one["finish_reason"] for one in choices[:-1])
    return text, choices[-1]["finish_reason"], choices[-1]["stop_reason"], tail["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_an_output_is_told(server: Running, stream: bool, path: str) -> None:
    asked = {**X, "max_tokens": 6}
    assert ended(server, stream, path, **asked) == ("xxxxxx", "length", None, 6)
    assert ended(server, stream, path, **asked, stop="xxx") == ("", "stop", "xxx", 3)
    assert ended(server, stream, path, **asked, stop_token_ids=[120]) == ("", "stop", 120, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_last_token_is_why_it_stopped(server: Running, stream: bool) -> None:
    """Not that there were enough tokens: of both reasons the caller's own comes first."""
    assert ended(server, stream, **X, max_tokens=3, stop="xxx") == ("", "stop", "xxx", 3)
    assert ended(server, stream, **X, max_tokens=2, stop="xxx") == ("xx", "length", None, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_is_found_only_at_the_end_is_why_it_stopped(server: Running, stream: bool) -> None:
    """A character of which bytes are missing is shown when no more can come, and not before."""
    assert ended(server, stream, **BROKEN, max_tokens=1) == ("\ufffd", "length", None, 1)
    assert ended(server, stream, **BROKEN, max_tokens=1, stop="\ufffd") == ("", "stop", "\ufffd", 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("min_tokens", [1, 2, 3, 5])
def test_a_stop_string_counts_from_the_min_tokens_th_token_on(server: Running, stream: bool, min_tokens: int) -> None:
    expected = ("x" * (min_tokens - 1), "stop", "x", min_tokens)
    assert ended(server, stream, **X, max_tokens=9, stop="x", min_tokens=min_tokens) == expected


def test_streamed_choices_are_those_of_the_whole(server: Running) -> None:
    """Of three prompts with two outputs each, choice 2p + i is output i of prompt p, and no two are alike."""
    asked = {"prompt": ["the end", "an inn", "er"], "n": 2, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    whole = [choice["text"] for choice in server.post(TEXT, asked).json()["choices"]]
    texts = dict.fromkeys(range(6), "")
    for chunk in server.events(TEXT, asked):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == whole
    assert len(set(whole)) == 6
    for at, prompt in enumerate(["the end", "an inn", "er"]):
        alone = server.complete(prompt, n=2, seed=7, max_tokens=12, ignore_eos=True)["choices"]
        assert [choice["text"] for choice in alone] == whole[2 * at : 2 * at + 2]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_seed_every_output_has_its_own(server: Running, stream: bool) -> None:
    asked = {"prompt": ["the", "the", "the"], "n": 2, "max_tokens": 12, "ignore_eos": True}
    if stream:
        choices = [one for chunk in server.events(TEXT, asked) for one in chunk["choices"] if "seed" in one]
    else:
        choices = server.post(TEXT, asked).json()["choices"]
    assert len({choice["seed"] for choice in choices}) == 6
    for choice in choices:
        if not stream:
            again = server.complete("the", seed=choice["seed"], max_tokens=12, ignore_eos=True)["choices"][0]
            assert again["text"] == choice["text"]


def test_cached_tokens_are_those_of_the_prompts_however_many_outputs(llm: LLM) -> None:
    def cached(prompt: Any, n: int) -> tuple[int, int]:
        asked = {"prompt": prompt, "n": n, "max_tokens": 1, "stream_options": {"include_usage": True}}
        streamed = server.events(TEXT, asked)[-1]["usage"]
        usage = server.complete(prompt, n=n, max_tokens=1)["usage"]
        assert usage == streamed
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    with running(llm) as server:
        prompt, other = [5] * 100, [7] * 50
        assert server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        server.complete(other, max_tokens=1)
        n_prompt, n_cached = cached(prompt, 1)
        assert 0 < n_cached < n_prompt == 100
        assert cached(prompt, 3) == (100, n_cached)
        n_other = cached(other, 1)[1]
        assert 0 < n_other < n_cached
        assert cached([prompt, other], 2) == (150, n_cached + n_other)


def test_the_reason_is_the_same_with_and_without_speculation(server: Running) -> None:
    """Several tokens come at once when speculated ones are accepted: the stop string ends among them or with them."""
    for n_max in range(1, 9):
        offs: list[dict[str, Any]] = [{}, {"speculation": False}]
        for off in offs:
            found = ended(server, False, **X, **off, max_tokens=n_max, stop="xxxxx")
            expected = ("x" * n_max, "length", None, n_max) if n_max < 5 else ("", "stop", "xxxxx", 5)
            assert found == expected, (n_max, off)

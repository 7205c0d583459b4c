"""Parameters of vLLM and of the OpenAI API that say what is told, and how prompts are read."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.errors import ConfigError, ModelNotFound
from saguaro.model.tiny import EOS, EOS_ID, tiny_tokenizer, write_tiny
from saguaro.model.token_bytes import spell
from tests.serve.http.driver import Running, running, tiny_llm

PROMPT = "the end of the inn"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """The same model, asked directly."""
    with tiny_llm(folder) as found:
        yield found


def words(server: Running, tokens: list[int]) -> list[str]:
    return [spell(server.service.tokenizer.bytes.of(token)) for token in tokens]


# echo and prompt_logprobs


def test_an_echo_begins_with_the_prompt(server: Running) -> None:
    plain = server.complete(PROMPT, **GREEDY)["choices"][0]["text"]
    assert server.complete(PROMPT, echo=True, **GREEDY)["choices"][0]["text"] == PROMPT + plain
    tokens = server.service.tokenizer.encode(PROMPT)
    several = server.complete([tokens, tokens[:3]], echo=True, n=2, **GREEDY)["choices"]
    begins = [PROMPT, PROMPT, "the end of"[: len("".join(words(server, tokens[:3])))]]
    for choice, begin in zip(several, begins, strict=False):
        assert choice["text"].startswith(begin)
    assert several[0]["text"] == PROMPT + plain


def test_an_echo_with_logprobs_scores_the_prompt(server: Running, llm: LLM) -> None:
    tokens = server.service.tokenizer.encode(PROMPT)
    params = SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(tokens, params)
    scored = expected.prompt_logprobs
    assert scored is not None
    assert expected.outputs[0].logprobs is not None
    wanted = [one.logprob for one in [*scored[1:], *expected.outputs[0].logprobs] if one is not None]
    for streamed in (False, True):
        body = {"prompt": PROMPT, "echo": True, "logprobs": 2, **GREEDY}
        if streamed:
            parts = [event["choices"][0]["logprobs"] for event in server.events(TEXT, body)]
            found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        else:
            found = server.complete(**body)["choices"][0]["logprobs"]
        assert found["tokens"] == words(server, [*tokens, *expected.token_ids])
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        assert found["text_offset"][: len(tokens) + 1] == [
            len("".join(words(server, tokens[:at]))) for at in range(len(tokens) + 1)
        ]
        assert len(found["top_logprobs"]) == len(found["text_offset"]) == len(tokens) + 6


def test_a_prompt_alone_is_scored(server: Running) -> None:
    answer = server.complete(PROMPT, echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    n = len(server.service.tokenizer.encode(PROMPT))
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == n
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"][1:])
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (n, 0)
    (event,) = server.events(TEXT, {"prompt": PROMPT, "echo": True, "max_tokens": 0})
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == (PROMPT, "length")


def test_prompt_logprobs_are_worded_as_vllm_does(server: Running) -> None:
    tokens = server.service.tokenizer.encode(PROMPT)
    found = server.complete(PROMPT, prompt_logprobs=2, **GREEDY)["choices"][0]["prompt_logprobs"]
    assert len(found) == len(tokens)
    assert found[0] is None
    for token, entry in zip(tokens[1:], found[1:], strict=True):
        own = entry[str(token)]
        assert own["decoded_token"] == server.service.tokenizer.decode([token], special=True)
        assert sorted(each["rank"] for each in entry.values()) == sorted({1, 2, own["rank"]})
        by_rank = sorted(entry.values(), key=lambda each: each["rank"])
        assert [each["logprob"] for each in by_rank] == sorted((each["logprob"] for each in by_rank), reverse=True)
    answer = server.chat("the", prompt_logprobs=0, **GREEDY)
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


# what the text holds


def test_special_tokens_are_shown_if_wanted(server: Running) -> None:
    forced = {"allowed_token_ids": [EOS_ID], "ignore_eos": True, "max_tokens": 2}
    assert server.complete(PROMPT, **forced)["choices"][0]["text"] == ""
    shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert server.complete(PROMPT, **forced, **shown)["choices"][0]["text"] == 2 * EOS


def test_a_stop_string_is_kept_if_wanted(server: Running) -> None:
    whole = server.complete(PROMPT, allowed_token_ids=[ord("a"), ord("b")], temperature=1, seed=3, max_tokens=60)
    text = whole["choices"][0]["text"]
    stop = text[20:23]
    at = text.find(stop)
    body = {"temperature": 1, "seed": 3, "max_tokens": 60, "allowed_token_ids": [ord("a"), ord("b")], "stop": stop}
    assert server.complete(PROMPT, **body)["choices"][0]["text"] == text[:at]
    (kept,) = server.complete(PROMPT, include_stop_str_in_output=True, **body)["choices"]
    assert (kept["text"], kept["stop_reason"]) == (text[: at + 3], stop)
    events = server.events(TEXT, {"prompt": PROMPT, "include_stop_str_in_output": True, **body})
    assert "".join(event["choices"][0]["text"] for event in events) == text[: at + 3]
    ended = {"allowed_token_ids": [ord("b")], "stop_token_ids": [ord("b")], "include_stop_str_in_output": True}
    assert server.complete(PROMPT, **ended)["choices"][0]["text"] == "b"


def test_nothing_but_allowed_tokens_comes(server: Running) -> None:
    digits = {"allowed_token_ids": [ord(c) for c in "0123"], "max_tokens": 40}
    texts = [
        server.complete(PROMPT, temperature=1, seed=seed, speculation=speculation, **digits)["choices"][0]["text"]
        for seed in range(2)
        for speculation in (True, False)
    ]
    assert all(len(text) == 40 and set(text) <= set("0123") for text in texts)
    assert texts[0] == texts[1] != texts[2] == texts[3]
    ended = server.complete(PROMPT, allowed_token_ids=[EOS_ID], min_tokens=3)["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")


def test_token_ids_are_told_if_wanted(server: Running) -> None:
    tokens = server.service.tokenizer.encode(PROMPT)
    (choice,) = server.complete(PROMPT, return_token_ids=True, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == tokens
    assert server.service.tokenizer.decode(choice["token_ids"]) == choice["text"]
    events = server.events(TEXT, {"prompt": PROMPT, "return_token_ids": True, **GREEDY})
    assert events[0]["choices"][0]["prompt_token_ids"] == tokens
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
    answer = server.chat("the", return_token_ids=True, **GREEDY)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 6


# how prompts are read


def test_a_long_prompt_keeps_its_end(server: Running) -> None:
    tokens = [at % 200 for at in range(300)]
    cut = server.complete(tokens, truncate_prompt_tokens=5, echo=True, **GREEDY)
    assert cut["usage"]["prompt_tokens"] == 5
    assert cut["choices"][0]["text"] == server.complete(tokens[-5:], echo=True, **GREEDY)["choices"][0]["text"]
    fitting = server.complete(tokens, truncate_prompt_tokens=-1, **GREEDY)
    assert fitting["usage"]["prompt_tokens"] == 256 - 6
    assert server.complete("the", truncate_prompt_tokens=100, **GREEDY)["usage"]["prompt_tokens"] == 1
    assert server.chat("the" * 300, truncate_prompt_tokens=9, **GREEDY)["usage"]["prompt_tokens"] == 9


def conversation(server: Running, messages: list[dict[str, str]], **body: Any) -> list[int]:
    answer = server.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["prompt_token_ids"]
    return tokens


def test_a_conversation_ends_as_wanted(server: Running) -> None:
    encode = server.service.tokenizer.encode
    asked = [{"role": "user", "content": "the"}]
    assert conversation(server, asked) == encode("user: the\nassistant: ")
    assert conversation(server, asked, add_generation_prompt=False) == encode("user: the\n")
    begun = [*asked, {"role": "assistant", "content": "an inn"}]
    assert conversation(server, begun, continue_final_message=True) == encode("user: the\nassistant: an inn")
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert conversation(server, begun, **going_on) == encode("user: the\nassistant: an inn")


def test_special_tokens_around_a_text(folder: Path, tmp_path: Path) -> None:
    """A tokenizer that begins every text with a special token, as Llama's do."""
    from tokenizers import processors

    words = tiny_tokenizer()
    begin = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, EOS_ID)])
    words.backend_tokenizer.post_processor = begin
    words.save_pretrained(tmp_path)
    with running(LLM(folder, tokenizer=tmp_path, device="cpu", kv_memory="2MiB")) as server:
        plain = server.complete("the", return_token_ids=True, **GREEDY)["choices"][0]["prompt_token_ids"]
        assert plain[0] == EOS_ID
        bare = server.complete("the", return_token_ids=True, add_special_tokens=False, **GREEDY)
        assert bare["choices"][0]["prompt_token_ids"] == plain[1:]
        chat = server.chat(f"the {EOS}", return_token_ids=True, **GREEDY)["prompt_token_ids"]
        assert EOS_ID not in chat
        around = server.chat(f"the {EOS}", return_token_ids=True, add_special_tokens=True, **GREEDY)
        assert around["prompt_token_ids"] == [EOS_ID, *chat]


def test_a_seed_below_zero_gives_the_same_text_again(server: Running) -> None:
    first, again = (server.complete(PROMPT, seed=-7, max_tokens=12)["choices"][0] for _ in range(2))
    assert first == again
    assert 0 <= first["seed"] < 2**53
    assert server.complete(PROMPT, seed=first["seed"], max_tokens=12)["choices"][0] == first
    drawn = {server.complete(PROMPT, seed=-1, max_tokens=12)["choices"][0]["seed"] for _ in range(2)}
    assert len(drawn) == 2


# guided_*, usage, defaults


def test_guided_decoding_by_its_former_names(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body = {"seed": 5, "max_tokens": 60}
    for guided, checked in (
        ({"guided_choice": ["in", "an"]}, lambda text: text in ("in", "an")),
        ({"guided_regex": "(the )+end"}, lambda text: text.startswith("the ") and text.endswith("end")),
        ({"guided_grammar": 'start: "a" "b"'}, lambda text: text == "ab"),
        ({"guided_json": schema}, lambda text: json.loads(text)["n"] in (1, 22)),
        ({"guided_json": json.dumps(schema), "guided_decoding_backend": None}, lambda text: "n" in json.loads(text)),
    ):
        text = server.complete(PROMPT, **guided, **body)["choices"][0]["text"]
        assert checked(text), text


def test_every_chunk_counts_its_tokens_if_wanted(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [PROMPT, "the"], "stream_options": options, "n": 2, **GREEDY}
    *chunks, last = server.events(TEXT, body)
    for at in range(4):
        own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == at]
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(set(counts))
        assert counts[-1] == 6
        assert {usage["total_tokens"] - usage["completion_tokens"] for usage in own} == {own[0]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 24


def test_a_stream_begins_with_its_first_token(server: Running) -> None:
    """Clients take the time of the first chunk for the time of the first token."""
    body = {"messages": [{"role": "user", "content": "the"}], **GREEDY}
    with server.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        first = next(answer.iter_raw())
    role, text = [json.loads(line.removeprefix(b"data: ")) for line in first.split(b"\n\n")[:2]]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "content" in text["choices"][0]["delta"]


def recommend(folder: Path, **values: Any) -> Path:
    write_tiny(folder, "llama", max_position_embeddings=512)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_the_models_own_defaults(tmp_path: Path) -> None:
    path = recommend(tmp_path, temperature=0.0, top_p=0.9, top_k=None, do_sample=True, max_new_tokens=3)
    with LLM(path, device="cpu", kv_memory="2MiB") as llm:
        assert llm.recommended == {"temperature": 0.0, "top_p": 0.9}
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_p=0.9)
        greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].text
        assert llm.generate(PROMPT)[0].text.startswith(greedy)
        with running(llm, defaults=llm.recommended) as plain:
            assert plain.complete(PROMPT, max_tokens=20)["choices"][0]["text"] == greedy
            warm = {
                plain.complete(PROMPT, max_tokens=20, temperature=1, seed=s)["choices"][0]["text"] for s in range(3)
            }
            assert len(warm) == 3
    with LLM(path, device="cpu", kv_memory="2MiB", generation_config="vllm") as llm:
        assert llm.recommended == {}
        assert llm.get_default_sampling_params() == SamplingParams()


def test_defaults_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    path = recommend(tmp_path, temperature=-1)
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature is -1; .* generation_config vllm"):
        LLM(path, device="cpu")
    with pytest.raises(ModelNotFound, match=r"holds no generation_config.json"):
        LLM(folder, device="cpu", generation_config=str(tmp_path / "nowhere"))


def test_another_chat_template(folder: Path, tmp_path: Path) -> None:
    inline = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(inline)
    for given in (inline, str(file)):
        with running(LLM(folder, device="cpu", kv_memory="2MiB", chat_template=given)) as server:
            answer = server.chat("the", return_token_ids=True, **GREEDY)
            assert answer["prompt_token_ids"] == server.service.tokenizer.encode("<the>")
    with pytest.raises(ConfigError, match=r"chat_template is 'nowhere.jinja', which is no jinja2 text and no file"):
        LLM(folder, device="cpu", chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match="not a jinja2 template"):
        LLM(folder, device="cpu", chat_template="{% for %}")

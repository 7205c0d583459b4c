"""What goes wrong for one request does not go wrong for the others, and nothing is left behind."""

import gc
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer

from saguaro import LLM, SamplingParams
from saguaro.config import build
from saguaro.engine.results import Delta
from saguaro.errors import ConfigError, RequestError
from saguaro.model.tiny import write_tiny
from saguaro.model.tokenizer import load_tokenizer
from saguaro.types import Outcome, Speculation

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def tiny(tmp_path: Path) -> LLM:
    """A tiny model of its own for each test."""
    return LLM(write_tiny(tmp_path, "llama"), device="cpu", kv_memory="2MiB")


def assert_empty(llm: LLM) -> None:
    """Nothing is left of any request."""
    engine = llm.engine
    llm.sweep()
    assert not engine.has_work
    assert engine.pool.n_free == engine.pool.n_pages
    engine.pool.check(engine.scheduler.tables())
    assert (engine._jobs, engine._by_request, llm._inboxes, llm.gone) == ({}, {}, {}, deque())


def test_streams_that_are_dropped_leave_nothing(tiny: LLM) -> None:
    never_read = [tiny.stream("the", LONG) for _ in range(3)]
    half_read = tiny.stream("an", LONG)
    next(half_read)
    del never_read, half_read
    gc.collect()
    assert_empty(tiny)


def test_a_stream_collected_in_the_middle_of_a_round_does_not_disturb_it(tiny: LLM) -> None:
    expected = tiny.generate("the end", LONG)[0].token_ids
    dropped = [tiny.stream("an", LONG)]
    next(dropped[0])
    link = tiny.engine.round.draft
    speculate = link.speculate

    def collect(outcome: Outcome, slots: Any, room: Any) -> Speculation:
        if dropped:
            dropped.clear()
            gc.collect()
        return speculate(outcome, slots, room)

    link.speculate = collect  # type: ignore[method-assign]
    assert tiny.generate("the end", LONG)[0].token_ids == expected
    assert_empty(tiny)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_breaks_ends_its_requests_and_not_the_engine(
    tiny: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny.generate("the end", LONG)[0].token_ids
    other = tiny.stream("an", LONG)
    first = next(other)

    def broken(*_: object) -> None:
        raise error("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.round.verifier, "launch", broken)
        with pytest.raises(error):
            tiny.generate("the end", LONG)
    rest = list(other)
    if error is RuntimeError:
        assert [delta.finish_reason for delta in rest] == ["error"]
    else:  # an interrupted round is played again, and nothing is lost
        tokens = [token for delta in (first, *rest) for token in delta.token_ids]
        assert tokens == tiny.generate("an", LONG)[0].token_ids
    assert tiny.generate("the end", LONG)[0].token_ids == expected
    assert_empty(tiny)


def test_text_that_breaks_ends_its_own_request_only(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [tiny.stream(prompt, LONG) for prompt in ("the", "an", "in")]
    make = tiny.engine._delta
    asked: list[str] = []

    def broken(commit: Any) -> Delta:
        asked.append(commit.request.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return make(commit)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "_delta", broken)
        with pytest.raises(KeyboardInterrupt):
            next(streams[0])
    found = [list(stream) for stream in streams]
    assert [deltas[-1].finish_reason for deltas in found] == ["length", "error", "length"]
    for prompt, deltas in (("the", found[0]), ("in", found[2])):
        assert [token for delta in deltas for token in delta.token_ids] == tiny.generate(prompt, LONG)[0].token_ids
    assert_empty(tiny)


def test_a_closed_llm_says_so(tiny: LLM) -> None:
    with tiny:
        tiny.generate("the", LONG)
    with pytest.raises(RequestError, match="closed"):
        tiny.generate("the", LONG)


def test_prompts_may_be_any_integers(tiny: LLM) -> None:
    expected = tiny.generate([[5, 6, 7]], LONG)[0].token_ids
    assert tiny.generate([np.array([5, 6, 7])], LONG)[0].token_ids == expected  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="text or a list of token ids"):
        tiny.generate([[5, "six"]], LONG)  # type: ignore[arg-type]


def test_parameters_are_taken_as_json_writes_them() -> None:
    params = SamplingParams(stop=None, stop_token_ids=[3], logit_bias={"504": 1})  # type: ignore[arg-type, dict-item]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (3,), {504: 1.0})
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3,)))
    for wrong in ({"stop": [1]}, {"stop": 5}, {"stop_token_ids": ["x"]}, {"logit_bias": [1]}, {"logit_bias": {"a": 1}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build(SamplingParams, **wrong)


def test_one_token_takes_no_longer_than_its_first(tiny: LLM) -> None:
    timings = tiny.generate("the", SamplingParams(max_tokens=1))[0].outputs[0].timings
    assert timings.ttft_ms <= timings.total_ms


def test_min_tokens_holds_stop_strings_off(tiny: LLM) -> None:
    plain = tiny.generate("the", LONG)[0]
    stop = next(letter for letter in plain.text if letter.isascii() and letter.isprintable())
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,), min_tokens=30)
    result = tiny.generate("the", params)[0]
    assert len(result.token_ids) >= 30
    assert result.token_ids == plain.token_ids[: len(result.token_ids)]


def test_a_template_that_refuses_and_text_that_is_none_are_request_errors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    llm = LLM(folder, device="cpu")
    with pytest.raises(RequestError, match="roles must alternate"):
        llm.chat([{"role": "user", "content": "the"}])
    with pytest.raises(RequestError, match="not a character"):
        llm.generate("half a pair: \ud83d")


@pytest.mark.parametrize(
    "named", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", None]
)
def test_the_tokenizer_is_what_its_file_says(default_folder: Path, tmp_path: Path, named: str | None) -> None:
    """transformers rebuilds parts of a tokenizer by the class that the config names; the file is right."""
    config = json.loads((default_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": named}))
    (tmp_path / "tokenizer.json").symlink_to(default_folder / "tokenizer.json")
    raw = RawTokenizer.from_file(str(default_folder / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 49152)
    for text in ("a  12", "def f(x):\n    return 1234", "  héllo 你好"):
        assert tokenizer.encode(text) == raw.encode(text).ids

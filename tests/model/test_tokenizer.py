"""Text that arrives token by token: nothing is shown that a later token could take back."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from saguaro import LLM, SamplingParams
from saguaro.model.tiny import EOS_ID, tiny_tokenizer, write_tiny
from saguaro.model.tokenizer import TextStream, Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer(), "tiny")
[THE, IN, SPACE_AND_HALF] = [*TOKENIZER.encode("the"), *TOKENIZER.encode("in"), TOKENIZER.encode(" é")[0]]

always = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
letters = st.text(st.sampled_from("abé€😀 "), max_size=12)
stops = st.lists(st.text(st.sampled_from("abé€"), min_size=1, max_size=3), max_size=3)


def pieces(tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """What each push and then finish returned, and what stopped it; nothing is pushed after a stop."""
    stream, found = TextStream(TOKENIZER, stop), []
    for token in tokens:
        found.append(stream.push(token))
        assert stream.text == "".join(found)
        if stream.stopped_by is not None:
            break
    found.append(stream.finish())
    assert stream.text == "".join(found)
    return found, stream.stopped_by


def first_stop(tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None]:
    """The same by definition: the text before the first stop string in the shortest beginning that holds one."""
    for n in range(len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:n])
        hits = [(text.find(s), s) for s in stop if s in text]
        if hits:
            return text[: min(hits)[0]], min(hits)[1]
    return TOKENIZER.decode(tokens), None


@always
@given(letters)
def test_a_text_survives_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_tiny_tokenizer_has_the_tokens_these_tests_need() -> None:
    assert TOKENIZER.encode("a€") == list("a€".encode())
    assert TOKENIZER.decode([THE, IN]) == "thein"
    assert TOKENIZER.encode(" é") == [SPACE_AND_HALF, 0xA9]


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(list("aé€😀".encode()))[0] == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_a_token_that_ends_inside_a_character_waits_for_the_rest() -> None:
    assert pieces([SPACE_AND_HALF, 0xA9, ord("!")])[0] == ["", " é", "!", ""]


def test_bytes_that_never_become_a_character_are_shown_when_that_is_certain() -> None:
    assert pieces([0xE2, 0x82, ord("a")])[0] == ["", "", "\ufffda", ""]
    assert pieces([ord("a"), 0xE2, 0x82])[0] == ["a", "", "", "\ufffd"]


def test_the_space_before_a_word_is_kept() -> None:
    """In the way of Llama 2: the space belongs to the word, and the first word of a text loses it."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁in": 0, "▁the": 1, "re": 2}, unk_token="re"))
    inner.decoder = tokenizers.decoders.Metaspace()
    stream = TextStream(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner), "words"))
    assert [stream.push(token) for token in [0, 1, 2, 0, 1]] == ["in", " the", "re", " in", " the"]


def test_special_tokens_are_not_shown() -> None:
    assert pieces([ord("a"), EOS_ID, ord("b")])[0] == ["a", "", "b", ""]


@always
@given(letters)
def test_the_pieces_are_the_text_and_never_half_a_character(text: str) -> None:
    found, _ = pieces(list(text.encode()))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


@always
@given(st.lists(st.integers(0, 263), max_size=16))
def test_the_pieces_of_any_tokens_are_their_text(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)[0]) == TOKENIZER.decode(tokens)


def test_a_stop_string_over_several_tokens_is_never_begun() -> None:
    assert pieces(list(b"say END now"), ["END"]) == (["s", "a", "y", " ", "", "", "", ""], "END")


def test_a_stop_string_may_begin_inside_one_token_and_end_inside_another() -> None:
    assert pieces([THE, IN], ["hei"]) == (["t", "", ""], "hei")


def test_what_only_looked_like_a_stop_string_is_shown_later() -> None:
    assert pieces(list(b"ENENEx"), ["END"])[0] == ["", "", "EN", "", "EN", "Ex", ""]


def test_a_stop_string_may_end_with_half_a_token() -> None:
    assert pieces([THE, ord("x")], ["th"]) == (["", ""], "th")


def test_a_stop_string_of_many_bytes() -> None:
    assert pieces([ord("a"), SPACE_AND_HALF, 0xA9, ord("b")], [" é"]) == (["a", "", "", ""], " é")


@pytest.mark.parametrize("stop", [["e", "th"], ["th", "e"], ["zzz", "e", "th"]])
def test_of_two_stop_strings_in_one_token_the_earlier_wins(stop: list[str]) -> None:
    assert pieces([ord("a"), THE], stop) == (["a", "", ""], "th")


def test_of_two_stop_strings_the_one_complete_first_wins() -> None:
    assert pieces(list(b"abcd"), ["bcd", "c"]) == (["a", "", "b", ""], "c")


def test_finish_gives_what_was_held_back() -> None:
    assert pieces(list(b"the EN"), ["END"]) == (["t", "h", "e", " ", "", "", "EN"], None)


def test_finish_finds_a_stop_string_before_half_a_character() -> None:
    assert pieces([ord("a"), SPACE_AND_HALF], [" "]) == (["a", "", ""], " ")


@settings(always, max_examples=300)
@given(st.lists(st.one_of(letters.map(lambda text: list(text.encode())), st.just([SPACE_AND_HALF, 0xA9]))), stops)
def test_stop_strings_never_leak(parts: list[list[int]], stop: list[str]) -> None:
    tokens = [token for part in parts for token in part]
    found, stopped_by = pieces(tokens, stop)
    assert ("".join(found), stopped_by) == first_stop(tokens, stop)


def test_a_request_ends_before_its_stop_string(tmp_path: Path) -> None:
    """The output is made of the letters a, b and c alone; the stop string is one that it would hold."""
    llm = LLM(write_tiny(tmp_path, "llama"), device="cpu", kv_memory="1MiB")
    bias = dict.fromkeys(b"abc", 100.0)
    free = llm.generate("x", SamplingParams(seed=1, max_tokens=40, logit_bias=bias))[0].outputs[0]
    stop = free.text[20:24]
    at = free.text.index(stop)
    params = SamplingParams(seed=1, max_tokens=40, logit_bias=bias, stop=(stop, "never"))
    cut = llm.generate("x", params)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[:at], "stop", stop)
    assert cut.token_ids == free.token_ids[: at + 4]
    deltas = list(llm.stream("x", params))
    assert "".join(delta.text for delta in deltas) == cut.text
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    llm.engine.pool.check(llm.engine.scheduler.tables())

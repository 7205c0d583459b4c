"""Log-probabilities of tokens that are parts of characters: true bytes, and no two alternatives alike."""

import codecs
from typing import Any

import pytest

from tests.serve.http.driver import Running

EURO = [0xE2, 0x82, 0xAC]  # three tokens of the tiny model
LIKELY = {str(token): 60 - token / 100 for token in range(0x80, 0xA0)}  # none of these is a character by itself


def chat(server: Running, **body: Any) -> list[dict[str, Any]]:
    found = server.chat("the", temperature=0, ignore_eos=True, logprobs=True, **body)
    content: list[dict[str, Any]] = found["choices"][0]["logprobs"]["content"]
    return content


def test_bytes_of_a_split_character_are_its_own(server: Running) -> None:
    for token in EURO:
        (entry,) = chat(server, max_tokens=1, logit_bias={str(token): 100})
        assert (entry["bytes"], entry["token"]) == ([token], f"bytes:\\x{token:02x}")
    text = server.chat("the", temperature=0, seed=1, ignore_eos=True, max_tokens=100, logprobs=True)["choices"][0]
    raw = bytes(byte for entry in text["logprobs"]["content"] for byte in entry["bytes"])
    assert raw.decode(errors="replace") == text["message"]["content"]
    assert "\ufffd" in text["message"]["content"]


def test_alternatives_do_not_collide(server: Running) -> None:
    (entry,) = chat(server, max_tokens=1, top_logprobs=20, logit_bias=LIKELY)
    tops = entry["top_logprobs"]
    assert len({top["token"] for top in tops}) == len({tuple(top["bytes"]) for top in tops}) == 20
    (choice,) = server.complete("the", temperature=0, max_tokens=1, logprobs=20, logit_bias=LIKELY)["choices"]
    (found,) = choice["logprobs"]["top_logprobs"]
    assert len(found) == 20
    assert sum(key.startswith("bytes:\\x") for key in found) >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_the_characters_of_the_text(server: Running, stream: bool) -> None:
    asked: dict[str, Any] = {
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 120,
        "logprobs": 1,
        "prompt": "the end",
    }
    # What UTF-8 does not allow is left out, so that the text is as long as its characters are.
    asked["logit_bias"] = {str(token): -100 for token in range(0x80, 0x100) if token not in (0xC3, 0xA9)}
    asked["logit_bias"] |= {"195": 4, "169": 4}
    if stream:
        told = [chunk["choices"][0] for chunk in server.events("/v1/completions", asked)]
    else:
        told = server.post("/v1/completions", asked).json()["choices"]
    offsets = [offset for one in told for offset in one["logprobs"]["text_offset"]]
    tokens = [token for one in told for token in one["logprobs"]["tokens"]]
    raw = [
        codecs.escape_decode(token.removeprefix("bytes:"))[0] if token.startswith("bytes:") else token.encode()
        for token in tokens
    ]
    assert len(offsets) == 120
    assert any(token.startswith("bytes:") for token in tokens)
    for at, offset in enumerate(offsets):
        before = b"".join(raw[:at])
        assert offset == sum(byte & 0xC0 != 0x80 for byte in before)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)

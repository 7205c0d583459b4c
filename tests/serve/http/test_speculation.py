"""return_speculation tells, round by round, what was speculated and what became of it."""

from typing import Any

import pytest

from tests.serve.http.driver import LONG, Running

ROUND = {"round", "drafted", "accepted", "source", "hit", "tokens", "verify", "draft"}


def told(server: Running, path: str, **body: Any) -> tuple[str, list[list[dict[str, Any]]]]:
    """The text of a stream, and what its chunks tell of rounds."""
    asked = {"prompt": "the end"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "an"}]}
    chunks = server.events(path, {**asked, **LONG, "return_speculation": True, **body})
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    return text, [choice["speculation"] for choice in choices if "speculation" in choice]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_tells_its_round(server: Running, path: str) -> None:
    text, chunks = told(server, path)
    assert all(len(rounds) == 1 for rounds in chunks)
    rounds = [one for (one,) in chunks]
    assert sum(len(one["tokens"]) for one in rounds) == LONG["max_tokens"]
    assert "".join(token["text"] for one in rounds for token in one["tokens"]).startswith(text.rstrip("\ufffd")[:100])
    assert [one["round"] for one in rounds] == sorted({one["round"] for one in rounds})
    assert {one["source"] for one in rounds} >= {"cache", "draft", "empty"}
    for one in rounds:
        assert set(one) == ROUND
        k, drafted, tokens = one["accepted"], one["drafted"], one["tokens"]
        assert [token["origin"] for token in tokens] == [one["source"]] * k + ["target"] * (len(tokens) - k)
        assert [(token["id"], token["text"]) for token in tokens[:k]] == [(t["id"], t["text"]) for t in drafted[:k]]
        assert one["hit"] == ((one["source"] == "cache") if drafted else None)
        if 0 < len(drafted) > k and len(tokens) > k:
            assert tokens[k]["id"] != drafted[k]["id"], "what was not accepted is not the target's"
        start, end = one["verify"]
        assert 0 < start < end
        if one["draft"] is not None:
            began, replied = one["draft"]["respond"]
            assert began <= replied <= start
            if one["hit"]:
                assert one["draft"]["prepare"][1] <= began
    assert rounds == sorted(rounds, key=lambda one: one["verify"])


def test_a_whole_answer_tells_all_its_rounds(server: Running) -> None:
    found = server.complete("the end", **LONG, n=2, return_speculation=True, seed=1)
    for choice in found["choices"]:
        tokens = [token for one in choice["speculation"] for token in one["tokens"]]
        assert len(tokens) == LONG["max_tokens"]
    assert "speculation" not in server.complete("the end", **LONG)["choices"][0]


def test_one_server_shows_ar_sd_and_ssd(server: Running) -> None:
    """The same text three times, from the target alone, drafted just in time, and prepared."""
    ar, alone = told(server, "/v1/completions", speculation=False)
    sd, drafted = told(server, "/v1/completions", prepare=False)
    ssd, prepared = told(server, "/v1/completions")
    assert ar == sd == ssd
    sources = [{one["source"] for (one,) in rounds} for rounds in (alone, drafted, prepared)]
    assert sources == [{"empty"}, {"empty", "draft"}, {"empty", "draft", "cache"}]
    assert len(alone) == LONG["max_tokens"] > len(drafted)
    assert all(one["draft"] is None or one["draft"]["prepare"] is None for (one,) in drafted)

"""Sampling the target: which texts come, that a resumed run gives the same ones, and what is refused."""

from pathlib import Path

import pytest

from saguaro import LLM
from saguaro.distill.corpus import Corpus
from saguaro.distill.sample import STAGE, Plan, sample
from saguaro.errors import ConfigError, CorpusError, TokenizerMismatch
from saguaro.model.tiny import EOS_ID, write_tiny

PROMPTS = ["the cat", "in winter", "Why?", "one two three", "an apple"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A target with a context of 256 tokens."""
    return LLM(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"), device="cpu", max_batch_rows=3)


class Stop(Exception):
    """The user's Ctrl-C."""


class StopAt:
    """Progress that is interrupted when so many texts are done."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See Progress."""
        if done == self._n:
            raise Stop


def test_texts_are_what_the_engine_says(tiny: LLM, tmp_path: Path) -> None:
    corpus, seen = Corpus(tmp_path), list[tuple[str, int, int]]()
    settings = {"n_texts": 12, "max_tokens": 9, "temperatures": (0.0, 0.7, 1.0), "seed": 5}
    done = sample(tiny, PROMPTS, corpus, **settings, n_shard=4, progress=lambda *args: seen.append(args))  # type: ignore[arg-type]
    assert seen == [(STAGE, n, 12) for n in range(13)]
    assert (done.n_texts, done.n_tokens, done.n_skipped) == (12, corpus.n_tokens, 0)
    assert done.tok_s > 0
    assert len(list(tmp_path.iterdir())) == 3
    encoded = [tiny.engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    plan = Plan(encoded, 9, (0.0, 0.7, 1.0), 5)
    for i, text in enumerate(corpus):
        assert text.prompt == encoded[i % 5]
        assert text.continuation == tiny.generate([text.prompt], plan.params(i))[0].token_ids


def test_each_text_of_a_prompt_has_its_own_temperature_and_seed() -> None:
    plan = Plan([[1], [2], [3], [4]], max_tokens=2, temperatures=(0.0, 0.5, 1.0, 1.5), seed=0)
    for first in range(4):
        own = range(first, 48, 4)
        assert {plan.temperature(i) for i in own[:4]} == {0.0, 0.5, 1.0, 1.5}
        assert [plan.temperature(i) for i in own].count(0.0) == 1  # greedy again would be the same again
    assert len({plan.params(i).seed for i in range(1000)}) == 1000
    assert Plan([[1]], max_tokens=2, temperatures=(0.0,), seed=0).temperature(3) == 0


@pytest.mark.parametrize("temperatures", [(0.0,), (0.6, 1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop", [1, 4, 6, 10])
def test_a_resumed_run_gives_the_same_corpus(
    tiny: LLM, tmp_path: Path, temperatures: tuple[float, ...], stop: int
) -> None:
    def run(corpus: Corpus, stop: int) -> None:
        sample(
            tiny,
            PROMPTS,
            corpus,
            n_texts=10,
            max_tokens=12,
            temperatures=temperatures,
            seed=2,
            n_shard=4,
            progress=StopAt(stop),
        )

    whole = Corpus(tmp_path / "whole")
    run(whole, -1)
    assert len(whole) == 10
    with pytest.raises(Stop):
        run(Corpus(tmp_path / "parts"), stop)
    assert not tiny.engine.has_work
    parts = Corpus(tmp_path / "parts")
    assert len(parts) == (stop - 1) // 4 * 4  # whole shards
    run(parts, -1)
    assert list(parts) == list(whole) == list(Corpus(tmp_path / "parts"))
    for ours, theirs in zip(sorted(parts.folder.iterdir()), sorted(whole.folder.iterdir()), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_more_texts_later(tiny: LLM, tmp_path: Path) -> None:
    few, many = Corpus(tmp_path / "few"), Corpus(tmp_path / "many")
    settings = {"max_tokens": 6, "temperatures": (1.0,), "n_shard": 4}
    sample(tiny, PROMPTS, few, n_texts=3, **settings)  # type: ignore[arg-type]
    sample(tiny, PROMPTS, few, n_texts=9, **settings)  # type: ignore[arg-type]
    sample(tiny, PROMPTS, many, n_texts=9, **settings)  # type: ignore[arg-type]
    assert list(few) == list(many)
    done = sample(tiny, PROMPTS, few, n_texts=2, **settings)  # type: ignore[arg-type]
    assert (done.n_texts, done.tok_s, len(few)) == (0, 0.0, 9)


def test_the_end_of_text_is_kept(tiny: LLM, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    sample(tiny, PROMPTS, corpus, n_texts=40, max_tokens=60, temperatures=(3.0,), chat=False)
    ended = [text for text in corpus if text.tokens[-1] == EOS_ID]
    assert ended
    assert all(EOS_ID not in text.continuation[:-1] for text in corpus)
    assert all(len(text.continuation) == 60 for text in corpus if text not in ended)
    assert corpus[0].prompt == tiny.engine.tokenizer.encode(PROMPTS[0])  # no chat template around it


def test_prompts_that_do_not_fit_are_skipped(tiny: LLM, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    mixed = ["x" * 300, PROMPTS[0], "", PROMPTS[1], "y" * 250]
    done = sample(tiny, mixed, corpus, n_texts=4, max_tokens=8, temperatures=(1.0,), chat=False)
    assert done.n_skipped == 3
    fit = [tiny.engine.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    assert [text.prompt for text in corpus] == fit * 2
    with pytest.raises(ConfigError, match=r"none of 5 prompts can be continued by max_tokens, 254: .*250 tokens"):
        sample(tiny, mixed, Corpus(tmp_path / "b"), n_texts=4, max_tokens=254, temperatures=(1.0,), chat=False)


def test_what_is_refused(tiny: LLM, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    good = {"n_texts": 2, "max_tokens": 4, "temperatures": (1.0,)}
    for bad, message in (
        ({"n_texts": 0}, "n_texts is 0"),
        ({"n_shard": 0}, "n_shard is 0"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"temperatures": (0.5, -1.0)}, "temperature is -1.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            sample(tiny, PROMPTS, corpus, **{**good, **bad})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"none of 0 prompts can be continued .* there are none"):
        sample(tiny, [], corpus, **good)  # type: ignore[arg-type]
    assert len(corpus) == 0


def test_a_corpus_of_other_prompts_is_not_added_to(tiny: LLM, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    sample(tiny, PROMPTS, corpus, n_texts=2, max_tokens=4, temperatures=(1.0,))
    for prompts, chat in ((["the dog", *PROMPTS[1:]], True), (PROMPTS, False)):
        with pytest.raises(CorpusError, match=r"text 0 in .* is of another prompt than the one given; give the"):
            sample(tiny, prompts, corpus, n_texts=4, max_tokens=4, temperatures=(1.0,), chat=chat)
    assert len(corpus) == 2


def test_a_target_without_a_chat_template(tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.engine.tokenizer.inner, "chat_template", None)
    with pytest.raises(TokenizerMismatch, match="has no chat template"):
        sample(tiny, PROMPTS, Corpus(tmp_path), n_texts=1, max_tokens=4, temperatures=(1.0,))

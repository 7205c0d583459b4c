"""The n-gram method on the default model: fewer rounds, the same tokens."""

import pytest

from saguaro import LLM, SamplingParams
from tests.engine.driver import run, sibling

REPEAT = "Copy this sentence exactly: The quick brown fox jumps over the lazy dog near the old stone bridge."
PROMPTS = [REPEAT, "Count from one to twenty in words:", "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1,"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ngram_gives_the_tokens_of_ar(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=40, repetition_penalty=1.1)
    plain = run(sibling(llm.engine), PROMPTS, params)
    drafted = run(sibling(llm.engine, method="ngram", lookahead=5), PROMPTS, params)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]


def test_ngram_saves_rounds_where_text_repeats(llm: LLM) -> None:
    prompt = llm.engine.tokenizer.encode_chat([{"role": "user", "content": REPEAT}])
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = run(sibling(llm.engine), [prompt], params)[0].outputs[0]
    drafted = run(sibling(llm.engine, method="ngram"), [prompt], params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert plain.n_rounds == len(plain.token_ids)
    assert drafted.n_rounds < 0.8 * plain.n_rounds

"""The tokens are a function of prompt, parameters and seed: on the default model, whatever else the engine does."""

import pytest

from saguaro import LLM, SamplingParams
from tests.engine.driver import run, sibling

PROMPT = "The history of the lighthouse begins with fires lit on hilltops to guide ships. " * 3
OTHERS = [f"Here is a list of {n} things to do on a rainy day:" for n in range(15)]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "temperature 1"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    """Greedy and random decoding with one seed."""
    return SamplingParams(temperature=request.param, seed=11, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(llm: LLM, params: SamplingParams) -> list[int]:
    """What the prompt gives by itself, nothing cached."""
    return run(sibling(llm.engine, prefix_caching=False), [PROMPT], params)[0].token_ids


def test_in_a_batch_of_sixteen(llm: LLM, params: SamplingParams, alone: list[int]) -> None:
    others = [SamplingParams(temperature=0.8, seed=n, max_tokens=12 + n) for n in range(len(OTHERS))]
    results = run(sibling(llm.engine), [*OTHERS[:7], PROMPT, *OTHERS[7:]], [*others[:7], params, *others[7:]])
    assert results[7].token_ids == alone


def test_with_the_prompt_in_chunks(llm: LLM, params: SamplingParams, alone: list[int]) -> None:
    engine = sibling(llm.engine, max_batch_tokens=7, max_batch_rows=4)
    assert run(engine, [PROMPT], params)[0].token_ids == alone


def test_with_the_prefix_cached(llm: LLM, params: SamplingParams, alone: list[int]) -> None:
    engine = sibling(llm.engine)
    run(engine, [PROMPT], params)
    again = run(engine, [PROMPT], params)[0]
    assert again.outputs[0].timings.n_cached >= 32
    assert again.token_ids == alone


def test_after_preemption(llm: LLM, params: SamplingParams, alone: list[int]) -> None:
    # Six pages hold 96 tokens: either text fits, both at their longest do not, so the younger one has to yield.
    engine = sibling(llm.engine, kv_memory="4320KiB", prefix_caching=False)
    assert engine.kv.n_tokens == 96
    elder = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    results = run(engine, [OTHERS[0], PROMPT], [elder, params])
    assert engine.scheduler.n_preemptions > 0
    assert results[1].token_ids == alone


def test_a_seed_that_was_drawn_gives_the_output_again(llm: LLM) -> None:
    first = llm.generate("Once upon a time", SamplingParams(max_tokens=16))[0]
    again = llm.generate("Once upon a time", SamplingParams(max_tokens=16, seed=first.outputs[0].seed))[0]
    assert again.token_ids == first.token_ids


def test_n_outputs_have_their_own_seeds_and_each_can_be_had_alone(llm: LLM) -> None:
    outputs = llm.generate("Once upon a time", SamplingParams(max_tokens=12, n=3, seed=5))[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    for output in outputs:
        single = llm.generate("Once upon a time", SamplingParams(max_tokens=12, seed=output.seed))[0]
        assert single.token_ids == output.token_ids

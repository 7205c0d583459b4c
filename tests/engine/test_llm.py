"""The Python API on the default model."""

import threading

import pytest

import saguaro
from saguaro import LLM, SamplingParams
from saguaro.engine.results import Delta
from saguaro.errors import ConfigError, RequestError
from tests.engine.driver import run, sibling

GREEDY = SamplingParams(temperature=0, max_tokens=20)
QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def test_public_names_can_be_imported() -> None:
    for name in saguaro.__all__:
        assert getattr(saguaro, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = saguaro.LLMM


def test_chat_answers(llm: LLM) -> None:
    result = llm.chat(QUESTION, GREEDY)[0]
    assert "4" in result.text
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].stop_reason == llm.engine.tokenizer.eos_id


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["One, two, three,", [504, 2988], "Roses are red,"]
    lengths = [12, 3, 7]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    results = llm.generate(prompts, params)
    assert [len(result.token_ids) for result in results] == lengths
    assert [result.prompt for result in results] == ["One, two, three,", None, "Roses are red,"]
    assert all(result.outputs[0].finish_reason == "length" for result in results)


def test_results_carry_timings(llm: LLM) -> None:
    timings = llm.generate("Hello", GREEDY)[0].outputs[0].timings
    assert 0 < timings.ttft_ms <= timings.total_ms
    assert timings.decode_tok_s > 0


def test_a_stream_adds_up_to_the_result(llm: LLM) -> None:
    deltas = list(llm.stream(QUESTION, GREEDY))
    whole = llm.chat(QUESTION, GREEDY)[0]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason


def test_a_stop_string_ends_the_text_and_never_shows(llm: LLM) -> None:
    whole = llm.chat(QUESTION, GREEDY)[0].text
    stop = whole[5:9] + "|no|"  # begins in the text, never completes: held back, then shown
    assert llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, stop=(stop,)))[0].text == whole
    for start, end in ((4, 7), (8, 15), (0, 3)):
        params = SamplingParams(temperature=0, max_tokens=20, stop=(whole[start:end],))
        deltas = list(llm.stream(QUESTION, params))
        text = "".join(delta.text for delta in deltas)
        assert text == whole[: whole.index(whole[start:end])]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", whole[start:end])


def test_stop_token_ids_end_the_output(llm: LLM) -> None:
    tokens = llm.chat(QUESTION, GREEDY)[0].token_ids
    result = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(tokens[3],)))[0]
    assert result.token_ids == tokens[:4]
    assert result.outputs[0].stop_reason == tokens[3]
    assert result.text == llm.engine.tokenizer.decode(tokens[:3])


def test_min_tokens_and_ignore_eos(llm: LLM) -> None:
    eos = llm.engine.tokenizer.eos_id
    natural = llm.chat(QUESTION, GREEDY)[0].token_ids
    assert natural[-1] == eos
    longer = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, min_tokens=len(natural) + 3))[0].token_ids
    assert longer[: len(natural) - 1] == natural[:-1]
    assert eos not in longer[: len(natural) + 3]
    through = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].token_ids
    assert len(through) == 20
    assert through[: len(natural)] == natural


def test_logit_bias_decides(llm: LLM) -> None:
    result = llm.generate("Hello", SamplingParams(temperature=1, max_tokens=4, logit_bias={504: 100.0}))[0]
    assert result.token_ids == [504] * 4


def test_penalties_change_greedy_output(llm: LLM) -> None:
    loop = "no no no no no no no no no no"
    plain = llm.generate(loop, GREEDY)[0].token_ids
    for params in (
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2.0),
        SamplingParams(temperature=0, max_tokens=20, presence_penalty=2.0),
    ):
        fewer = llm.generate(loop, params)[0].token_ids
        assert len(set(fewer)) > len(set(plain))


def test_logprobs_name_the_greedy_token_first(llm: LLM) -> None:
    output = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=5, logprobs=3))[0].outputs[0]
    assert output.logprobs is not None
    assert [entry.token for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert len(entry.top) == 3
        assert entry.logprob < 0


def test_a_closed_stream_gives_back_its_pages(llm: LLM) -> None:
    free = llm.engine.pool.n_free
    stream = llm.stream("Tell me a long story", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.pool.n_free < free
    stream.close()
    assert llm.engine.pool.n_free == free
    assert not llm.engine.scheduler.has_work


def test_two_streams_can_be_read_in_turn(llm: LLM) -> None:
    prompts = ["One, two, three,", "Roses are red,"]
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", ""]
    for deltas in zip(*streams, strict=False):
        for index, delta in enumerate(deltas):
            texts[index] += delta.text
    for index, stream in enumerate(streams):
        texts[index] += "".join(delta.text for delta in stream)
    assert texts == alone


def test_threads_share_an_llm(llm: LLM) -> None:
    prompts = [f"{n} plus {n} is" for n in range(4)]
    expected = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = llm.generate(prompts[index], GREEDY)[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(prompts))] == expected


def test_an_abort_ends_each_output_once(llm: LLM) -> None:
    engine = sibling(llm.engine, max_batch_rows=2)
    name = engine.add("Tell me a story", SamplingParams(max_tokens=50, n=3, ignore_eos=True))  # two run, one waits
    deltas: list[Delta] = engine.step() + engine.step()
    engine.abort(name)
    deltas += engine.step()
    assert not engine.has_work
    assert sorted(d.index for d in deltas if d.finish_reason == "abort") == [0, 1, 2]
    engine.pool.check(engine.scheduler.tables())
    assert engine.pool.n_free == engine.pool.n_pages
    assert [output.finish_reason for output in engine.result(name).outputs] == ["abort"] * 3


def test_a_full_context_ends_with_length(llm: LLM) -> None:
    engine = sibling(llm.engine, max_model_len=40)
    result = run(engine, ["The sea"], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(result.prompt_token_ids) + len(result.token_ids) == 40
    assert result.outputs[0].finish_reason == "length"


def test_wrong_use_is_explained(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"2 sampling parameters for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match=r"messages is empty"):
        llm.chat([])
    with pytest.raises(ConfigError, match=r"'role' and 'content'"):
        llm.chat([{"text": "hello"}])
    with pytest.raises(ConfigError, match=r"prompt 1: prompt names token -5"):
        llm.generate([[504], [-5]])
    assert not llm.engine.scheduler.has_work

"""A target divided among processes: by every method the tokens of one process; and what happens when a rank is lost."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.config import EngineConfig
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, RankError
from saguaro.kernels import native
from saguaro.method import METHODS
from saguaro.model.tiny import write_tiny
from saguaro.parallel.ranks import Ranks, rank_devices
from saguaro.runner.runner import Runner
from tests.engine.driver import run
from tests.engine.test_methods import EACH, PROMPTS, assert_same, sample
from tests.link.target import is_running, until
from tests.parallel.threads import CPU

SHARED = [name for name, method in METHODS.items() if method.drafts and method.verification == "shared"]
SIZES: dict[str, Any] = {"link": "inline", "lookahead": 3, "budget": 4, "prepare": "always", "kv_memory": "2MiB"}
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
BACKENDS = ["shared", "gloo"] if native.is_there() else ["gloo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4, tied=True)


@pytest.fixture(scope="module")
def one(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, device="cpu", kv_memory="2MiB", tensor_parallel_size=2)
    yield llm
    pids, other = ranks_of(llm).pids, llm.sibling(method="ar")
    llm.close()
    assert all(is_running(pid) for pid in pids), "another engine still uses them"
    other.generate("the", sample(2))
    other.close()
    assert not any(is_running(pid) for pid in pids)


@pytest.fixture(scope="module")
def expected(one: LLM) -> list[Any]:
    """What one process says to every kind of request, one at a time."""
    return [run(one.engine, [prompt], params)[0] for prompt, params in each()]


def each() -> list[tuple[str | list[int], SamplingParams]]:
    return [(PROMPTS[at % len(PROMPTS)], params) for at, params in enumerate(EACH)]


def ranks_of(llm: LLM) -> Ranks:
    assert llm.engine.ranks is not None
    return llm.engine.ranks


# The same tokens


@pytest.mark.parametrize("method", ["ar", *SHARED])
def test_every_method_gives_the_tokens_of_one_process(two: LLM, expected: list[Any], method: str) -> None:
    """All kinds of requests in one batch, by trees of several nodes where the method speculates trees."""
    drafted = {"draft": "drop:2", **SIZES} if METHODS[method].drafts else {}
    trees = {"nodes": 8, "width": 4} if METHODS[method].trees else {}
    with two.sibling(method=method, **drafted, **trees) as llm:
        prompts, params = zip(*each(), strict=True)
        assert_same(run(llm.engine, prompts, params), expected)


def test_a_draft_in_a_process_of_its_own(two: LLM, expected: list[Any]) -> None:
    settings = {**SIZES, "link": "process", "draft_timeout": 60.0}
    with two.sibling(method="ssd", draft="drop:2", **settings) as llm:
        prompts, params = zip(*each(), strict=True)
        assert_same(run(llm.engine, prompts, params), expected)


def test_preemption_and_the_prefix_cache(one: LLM, two: LLM) -> None:
    """Pages are those of rank 0; every rank's keys lie on them."""
    prompts = ["the end of the line and " * 3 + word for word in ("one", "other", "an in", "the")]
    many = [sample(40, seed=seed) for seed in range(4)]
    small = {"kv_memory": "70KiB", "max_model_len": 128, "page_size": 4}
    alone = run(one.sibling(kv_memory="140KiB", max_model_len=128, page_size=4).engine, prompts, many)
    with two.sibling(method="ssd", draft="drop:2", **{**SIZES, **small}) as llm:
        assert_same(run(llm.engine, prompts, many), alone)
        assert llm.engine.scheduler.n_preemptions > 0
        again = run(llm.engine, prompts[:1], many[:1])
        assert_same(again, alone[:1])
        assert llm.engine.pool.n_free == llm.engine.pool.n_pages


def test_log_probabilities_of_a_prompt(one: LLM, two: LLM) -> None:
    asked = SamplingParams(max_tokens=2, prompt_logprobs=3, temperature=0)
    (whole,), (found,) = run(one.engine, ["the end of it"], asked), run(two.engine, ["the end of it"], asked)
    assert found.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize(("family", "size"), [("qwen3", 4), ("llama", 4)])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_four_ranks_and_fewer_key_heads(
    four: Ranks, tmp_path: Path, one: LLM, family: str, size: int, dtype: str
) -> None:
    odd: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 51}
    path = write_tiny(tmp_path, family, **odd, hidden_size=60)
    config = EngineConfig(device="cpu", kv_memory="2MiB", dtype=dtype)
    whole = LLM(path, device="cpu", kv_memory="2MiB", dtype=dtype)
    divided = Engine(four.load("tiny", path, dtype), one.engine.tokenizer, config, ranks=four)
    prompts, params = zip(*each(), strict=True)
    assert_same(run(divided, prompts, params), run(whole.engine, prompts, params))
    assert divided.kv.bytes_per_token == whole.engine.kv.bytes_per_token, "every rank holds the one key head"


@pytest.fixture(scope="module", params=BACKENDS)
def four(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(4, CPU, request.param)
    yield ranks
    ranks.close()
    assert not any(is_running(pid) for pid in ranks.pids)


def test_two_engines_on_the_same_ranks_take_turns(one: LLM, two: LLM) -> None:
    """Two threads, an engine each: orders do not mix."""
    wanted = [result.outputs[0].token_ids for result in one.generate(PROMPTS, sample(30))]
    found: dict[int, list[list[int]]] = {}

    def generate(number: int, llm: LLM) -> None:
        found[number] = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, sample(30))]

    with two.sibling(method="sd", draft="drop:2", **SIZES) as other:
        threads = [threading.Thread(target=generate, args=each) for each in enumerate((two, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: wanted, 1: wanted}


# Failures


def test_a_rank_that_is_killed_ends_the_engine(folder: Path) -> None:
    """Running requests end with an error, every later one is refused, and the message names the rank."""
    with LLM(folder, device="cpu", kv_memory="2MiB", tensor_parallel_size=3) as llm:
        ranks = ranks_of(llm)
        engine = llm.engine
        ids = [engine.add("the end", LONG) for _ in range(2)]
        engine.step()
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 2 of the target, process {ranks.pids[1]}, was killed by SIGKILL"):
            run(engine, ["in an other"], LONG)
        ended = engine.take()
        assert {delta.request_id for delta in ended} >= set(ids)
        assert {delta.finish_reason for delta in ended} == {"error"}
        assert engine.pool.n_free == engine.pool.n_pages
        with pytest.raises(RankError, match="rank 2"):
            llm.generate("the end", LONG)
        until(lambda: not any(is_running(pid) for pid in ranks.pids))


def test_ctrl_c_waits_for_the_end_of_a_step(two: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted stream leaves the ranks in step: the next request is answered."""
    step = Runner.run

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)  # when the other rank has begun
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.generate("the end", LONG)
    found = two.generate("in an other", sample())[0]
    assert found.outputs[0].token_ids == one.generate("in an other", sample())[0].outputs[0].token_ids


def test_ranks_end_when_they_are_forgotten() -> None:
    ranks = Ranks(2, CPU)
    pids = ranks.pids
    del ranks
    gc.collect()
    until(lambda: not any(is_running(pid) for pid in pids))


FOREVER = """
import torch
from saguaro.parallel.ranks import Ranks
ranks = Ranks(2, torch.device("cpu"))
print(*ranks.pids, flush=True)
input()
"""


def test_ranks_end_when_rank_0_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FOREVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.kill()
        until(lambda: not is_running(rank))


DIES = (sys.executable, "-c", "print('no room'); raise SystemExit(7)")


def test_a_rank_that_does_not_start_says_why() -> None:
    with pytest.raises(RankError, match=r"rank 1 of the target, process \d+, ended with exit status 7.*\n.*no room"):
        Ranks(2, CPU, worker=DIES)


def test_a_model_that_a_rank_cannot_read_is_named(folder: Path, tmp_path: Path) -> None:
    ranks = Ranks(2, CPU)
    here = write_tiny(tmp_path / "here", "llama")
    assert ranks.load("tiny", here, "float32").model.split.size == 2
    with pytest.raises(ConfigError, match="each rank computes some of them: use at most 1"):
        ranks.load(
            "tiny", write_tiny(tmp_path / "narrow", "llama", num_attention_heads=1, num_key_value_heads=1), "int8"
        )
    with pytest.raises(RankError, match="use at most 1"):
        ranks.load("tiny", here, "float32")
    assert not any(is_running(pid) for pid in ranks.pids)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device.index for device in rank_devices(2, torch.device("cuda", 2))] == [2, 3]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, from cuda:2 on; .* has 4 .*use at most 2"):
        rank_devices(3, torch.device("cuda", 2))


def test_a_sibling_cannot_have_other_ranks(two: LLM) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1; a sibling shares its weights"):
        two.sibling(tensor_parallel_size=1)

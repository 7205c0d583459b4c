"""Logits that are not finite end the request that has them, with an error that says so, and no other.

One token's embedding is NaN: a text with that token has no finite logits from there on, and no other text is touched.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saguaro import LLM, SamplingParams
from saguaro.engine import assembly
from saguaro.engine.results import Result
from saguaro.kernels import native
from saguaro.kernels.bundle import plain_kernels
from saguaro.model.tiny import write_tiny
from saguaro.target.scheduler import NOT_FINITE
from tests.cli.here import Here
from tests.serve.http.driver import Running, running, tiny_llm

NAN, INF = math.nan, math.inf
BAD = ord("q")  # the token whose embedding is NaN
PROMPTS = ["the end", "aqua", "an inn", "a q", "in the"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "warm": {**GREEDY, "temperature": 1.0, "seed": 3},
    "shaped": {**GREEDY, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalised": {**GREEDY, "repetition_penalty": 1.2},
    "logprobs": {**GREEDY, "logprobs": 2},
}


def edit(folder: Path, name: str, at: Any, value: float) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][at] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = write_tiny(tmp_path_factory.mktemp("nan"), "llama", num_hidden_layers=4)
    return edit(whole, "model.embed_tokens.weight", BAD, NAN)


def facts(results: list[Result]) -> list[tuple[list[int], str, object]]:
    outputs = [result.outputs[0] for result in results]
    return [(output.token_ids, output.finish_reason, output.stop_reason) for output in outputs]


def check(found: list[tuple[list[int], str, object]]) -> None:
    """A text ends with an error where its last token is the bad one, and nowhere else."""
    for prompt, (tokens, reason, why) in zip(PROMPTS, found, strict=True):
        is_bad = BAD in [*prompt.encode(), *tokens[: GREEDY["max_tokens"] - 1]]  # the last is not read any more
        assert (reason, why) == (("error", NOT_FINITE) if is_bad else ("length", None))
        assert BAD not in tokens[:-1]
    assert {reason for _, reason, _ in found} == {"error", "length"}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16"])
def test_the_request_ends_and_others_go_on(folder: Path, dtype: str, params: str) -> None:
    llm = LLM(folder, device="cpu", kv_memory="2MiB", dtype=dtype)
    found = facts(llm.generate(PROMPTS, SamplingParams(**PARAMS[params])))
    check(found)
    llm.engine.pool.check(llm.engine.scheduler.tables())
    assert llm.engine.pool.n_free == llm.engine.pool.n_pages
    assert facts(llm.generate(PROMPTS, SamplingParams(**PARAMS[params]))) == found  # by pages that held NaN


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("verification", ["shared", "rejection"])
def test_every_method_ends_it_at_the_same_token(folder: Path, params: str, verification: str) -> None:
    alone = LLM(folder, device="cpu", kv_memory="2MiB", dtype="float32", verification=verification)
    expected = facts(alone.generate(PROMPTS, SamplingParams(**PARAMS[params])))
    check(expected)
    for method in ("ngram", "sd", "ssd"):
        drafted = alone.sibling(method=method, draft="drop:1", verification=verification)
        found = facts(drafted.generate(PROMPTS, SamplingParams(**PARAMS[params])))
        check(found)
        if verification == "shared" or PARAMS[params]["temperature"] == 0:
            assert found == expected


@pytest.mark.parametrize("method", ["ar", "ssd"])
def test_steps_as_a_gpu_captures_them(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_there", lambda: False)  # weights stay the tensors that the twins read
    tiny = LLM(folder, device="cpu", dtype="float32", kv_memory="2MiB")
    some = {name: SamplingParams(**PARAMS[name]) for name in ("greedy", "shaped")}
    expected = {name: facts(tiny.generate(PROMPTS, params)) for name, params in some.items()}
    monkeypatch.setattr(assembly, "kernels_for", lambda device: plain_kernels())
    monkeypatch.setattr(assembly.Assembly, "_warm", lambda *parts: None)  # nothing to capture
    captured = tiny.sibling(method=method, draft="drop:1", prepare="always")
    assert captured.engine.round.verifier.runs_ahead
    for name, params in some.items():
        found = facts(captured.generate(PROMPTS, params))
        check(found)
        assert found == expected[name]


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("model.layers.0.mlp.up_proj.weight", (3, 3), NAN),
        ("model.layers.1.self_attn.v_proj.weight", (3, 3), INF),
        ("lm_head.weight", 100, NAN),
        ("lm_head.weight", 100, INF),
        ("model.norm.weight", slice(None), -INF),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_weights_that_are_no_numbers(tmp_path: Path, name: str, at: Any, value: float, dtype: str) -> None:
    folder = edit(write_tiny(tmp_path, "llama"), name, at, value)
    llm = LLM(folder, device="cpu", kv_memory="2MiB", dtype=dtype)
    for params in PARAMS.values():
        found = facts(llm.generate(PROMPTS, SamplingParams(**params)))
        assert {(reason, why) for _, reason, why in found} == {("error", NOT_FINITE)}


@pytest.mark.parametrize("verification", ["shared", "rejection"])
@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_draft_whose_logits_are_not_finite_changes_nothing(
    tmp_path: Path, verification: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_kernels:
        monkeypatch.setattr(native, "is_there", lambda: False)
        monkeypatch.setattr(assembly, "kernels_for", lambda device: plain_kernels())
        monkeypatch.setattr(assembly.Assembly, "_warm", lambda *parts: None)
    target = write_tiny(tmp_path / "target", "llama")
    draft = edit(write_tiny(tmp_path / "draft", "llama"), "model.norm.weight", 0, NAN)
    settings: dict[str, Any] = {"device": "cpu", "kv_memory": "2MiB", "dtype": "float32", "verification": verification}
    llm = LLM(target, **settings)
    drafted = llm.sibling(method="ssd", draft=str(draft), prepare="always", link="inline", **settings)
    for params in (SamplingParams(**GREEDY), SamplingParams(**PARAMS["warm"])):
        found = facts(drafted.generate(PROMPTS, params))
        assert {reason for _, reason, _ in found} == {"length"}
        if verification == "shared" or params.temperature == 0:
            assert found == facts(llm.generate(PROMPTS, params))


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_is_not_scored_by_what_is_no_number(folder: Path, max_tokens: int) -> None:
    """Prompts whose bad token is not the last: after that nothing is scored."""
    llm = LLM(folder, device="cpu", kv_memory="2MiB", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1)
    good, bad = llm.generate(["the end", "aqua"], params)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", NOT_FINITE)
    assert good.outputs[0].finish_reason == "length"
    assert good.prompt_logprobs is not None
    assert all(one is None or math.isfinite(one.logprob) for one in good.prompt_logprobs)
    assert llm.engine.pool.n_free == llm.engine.pool.n_pages


# The command


def test_generate_says_so_and_fails(folder: Path, tmp_path: Path, here: Here) -> None:
    done = here("generate", "--model", str(folder), "--prompt", "aqua", "--max-tokens", "4")
    assert (done.returncode, done.stdout, done.stderr) == (1, "\n", f"saguaro: {NOT_FINITE}\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the end\naqua\n")
    args = ("generate", "--model", str(folder), "--prompts", str(prompts), "--max-tokens", "4", "--temperature", "0")
    done = here(*args, "--json", "--logprobs", "3")
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines())
    assert (first["finish_reason"], "error" in first, len(first["logprobs"])) == ("length", False, 4)
    assert (second["finish_reason"], second["error"], second["logprobs"]) == ("error", NOT_FINITE, [])
    assert done.returncode == 1


def test_json_has_no_infinity(tmp_path: Path, here: Here) -> None:
    """A reduced head cannot say most tokens: their logprob is minus infinity."""
    folder = write_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    ids = torch.tensor([5, 100, 101])
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"][ids]}, folder / "model.safetensors")
    save_file({"ids": ids}, folder / "token_map.safetensors")
    args = ("generate", "--model", str(folder), "--prompt", "x", "--max-tokens", "2", "--json", "--logprobs", "5")
    done = here(*args)
    (line,) = (json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines())
    assert sorted(line["logprobs"][0]["top"].values())[:2] == [-9999.0, -9999.0]


def test_the_chat_says_so_and_forgets_the_message(folder: Path, here: Here) -> None:
    done = here("chat", "--model", str(folder), "--max-tokens", "4", stdin="aqua\n/history\n")
    assert "logits are not finite" in " ".join(done.stderr.split())
    assert "aqua" not in done.stderr


def test_compare_does_not_call_it_identical(folder: Path, here: Here) -> None:
    done = here("compare", "--model", str(folder), "--prompt", "aqua", "--max-tokens", "4")
    assert done.returncode == 2
    assert "logits are not finite" in done.stderr
    assert "identical" not in done.stdout


# The server


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as found:
        yield found


def test_the_server_answers_with_an_error_and_serves_on(server: Running) -> None:
    body = {"prompt": "aqua", "max_tokens": 4, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, NOT_FINITE)
    (event,) = server.events("/v1/completions", body)
    assert event["error"]["message"] == NOT_FINITE
    assert server.complete("the end", max_tokens=4)["choices"][0]["finish_reason"] in ("length", "stop")

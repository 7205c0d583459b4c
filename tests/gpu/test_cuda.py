"""The engine on a CUDA device: the same code, the same tokens. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams, rng
from saguaro.model.tiny import FAMILIES, tiny_model, write_tiny
from tests.model.write_fp8 import LAYOUTS, write_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = ["the end", "in an inn there was another man", "x" * 100, "a"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float32_gives_the_tokens_of_the_cpu(family: str, temperature: float, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True, top_p=0.95)
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MiB", "max_batch_tokens": 48, "max_batch_rows": 4}
    on_cpu = LLM(folder, device="cpu", **settings).generate(PROMPTS, params)
    on_gpu = LLM(folder, device="cuda", **settings).generate(PROMPTS, params)
    assert [r.token_ids for r in on_gpu] == [r.token_ids for r in on_cpu]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_transformers(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    reference = tiny_model(family)
    text = list(range(40, 80))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    llm = LLM(folder, device="cuda", dtype="bfloat16", kv_memory="4MiB")
    found = llm.generate([text], params)[0].outputs[0].logprobs
    assert found is not None
    n_known = llm.engine.tokenizer.n_vocab
    with torch.inference_mode():
        wanted = reference(torch.tensor([text])).logits[0, -1, :n_known].float().log_softmax(-1)
    for token, logprob in found[0].top[:2]:
        assert abs(float(wanted[token]) - logprob) < 0.5


def test_noise_has_the_same_bits_and_nearly_the_same_values() -> None:
    seeds, positions = torch.tensor([3, 2**62 + 1]), torch.tensor([0, 70000])
    on_cpu = rng.gumbel_all(seeds, positions, 1001)
    on_gpu = rng.gumbel_all(seeds.cuda(), positions.cuda(), 1001).cpu()
    assert torch.allclose(on_cpu, on_gpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["blocks", "rows"])
def test_matrices_in_e4m3(layout: str, tmp_path: Path) -> None:
    """A checkpoint in FP8 keeps its numbers: near the same model in bfloat16, in half of its memory."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert e4m3")
    write_fp8(tmp_path, "qwen3", LAYOUTS[layout], vocab_size=264)
    settings: dict[str, Any] = {"device": "cuda", "kv_memory": "4MiB"}
    plain, small = (LLM(tmp_path, **settings, quantization=name) for name in ("none", "fp8"))
    assert small.engine.loaded.weight_bytes < plain.engine.loaded.weight_bytes
    text, params = list(range(40, 80)), SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    both = [llm.generate([text], params)[0].outputs[0].logprobs for llm in (plain, small)]
    assert both[0] is not None
    assert both[1] is not None
    near = dict(both[1][0].top)
    assert all(abs(near[token] - logprob) < 0.5 for token, logprob in both[0][0].top[:2])


def test_every_method_gives_the_same_tokens_in_e4m3(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert e4m3")
    folder, params = write_tiny(tmp_path, "llama"), SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    told = []
    for more in ({"method": "ar"}, {"method": "sd", "draft": "drop:1"}, {"method": "ssd", "draft": "drop:1"}):
        with LLM(folder, device="cuda", kv_memory="4MiB", quantization="fp8", **more) as llm:  # type: ignore[arg-type]
            told.append([result.token_ids for result in llm.generate(PROMPTS, params)])
    assert told[0] == told[1] == told[2]

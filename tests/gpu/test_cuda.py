"""The engine on a CUDA device: the same code, the same tokens. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams, rng
from saguaro.model.tiny import FAMILIES, tiny_model, write_tiny

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

"""Two engines with different models in one process."""

from pathlib import Path

from saguaro import LLM, SamplingParams
from saguaro.model.tiny import write_tiny


def test_two_models_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
    llama = LLM(write_tiny(tmp_path / "llama", "llama"), device="cpu")
    qwen = LLM(write_tiny(tmp_path / "qwen3", "qwen3", seed=1), device="cpu", page_size=4)
    alone = [model.generate("the end", params)[0].token_ids for model in (llama, qwen)]
    assert alone[0] != alone[1]
    streams = [llama.stream("the end", params), qwen.stream("the end", params)]
    together: list[list[int]] = [[], []]
    for first, second in zip(*streams, strict=True):
        together[0] += first.token_ids
        together[1] += second.token_ids
    assert together == alone

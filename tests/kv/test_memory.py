"""How KV memory is cut: what fits is accepted, and a draft beside the target has its share."""

from pathlib import Path

import pytest
import torch

from saguaro import LLM, EngineConfig
from saguaro.errors import CapacityError
from saguaro.kv.memory import KVPlan, plan_kv
from saguaro.model.tiny import write_tiny
from tests.target.test_round import SPEC

PER_TOKEN = SPEC.kv_bytes_per_token(torch.float32)


def plan(beside: int = 0, **settings: object) -> KVPlan:
    config = EngineConfig(page_size=16, **settings)  # type: ignore[arg-type]
    return plan_kv(config, SPEC, torch.device("cpu"), torch.float32, beside)


@pytest.mark.parametrize("max_model_len", [64, 33, None])
def test_a_budget_that_fits_exactly_is_enough_and_a_byte_less_is_not(max_model_len: int | None) -> None:
    n_pages = -(-(max_model_len or 2 * 16) // 16)
    n_bytes = n_pages * 16 * PER_TOKEN
    kv = plan(kv_memory=str(n_bytes), max_model_len=max_model_len)
    assert (kv.n_pages, kv.n_bytes) == (n_pages, n_bytes)
    with pytest.raises(CapacityError, match=rf"holds {(n_pages - 1) * 16} tokens"):
        plan(kv_memory=str(n_bytes - 1), max_model_len=max_model_len)


@pytest.mark.parametrize("share", [1, 3])  # bytes of the draft's, for each of the target's
def test_a_draft_on_the_same_device_takes_its_share_of_what_is_left(share: int) -> None:
    alone, both = plan(), plan(share * PER_TOKEN)
    assert both.n_tokens == alone.n_tokens // (1 + share)
    assert both.n_bytes + both.n_tokens * share * PER_TOKEN <= alone.n_bytes


def test_a_stated_budget_is_the_targets_own() -> None:
    assert plan(PER_TOKEN, kv_memory="64KiB") == plan(kv_memory="64KiB")


def test_an_engine_with_a_draft_plans_for_both(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", num_hidden_layers=4)
    with LLM(folder, device="cpu") as alone, LLM(folder, device="cpu", draft="drop:1", link="inline") as both:
        n_alone, n_both = (llm.engine.pool.n_pages for llm in (alone, both))
    assert n_both == n_alone * 4 // (4 + 3), "a draft of three layers beside a target of four"

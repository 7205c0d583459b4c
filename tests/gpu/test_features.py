"""Drafts that read features of their target on a CUDA device, with captured steps of the target and of the draft.

Every method gives the tokens of `ar`, and what captured functions draft is what the same draft says on a CPU. Skipped
without a device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.grow import TreeDrafter
from saguaro.link.apart import Apart
from saguaro.link.inline import Inline
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_dflash import write_tiny_dflash
from saguaro.model.tiny_eagle import write_tiny_eagle
from saguaro.types import Features, Outcome, RoundEvent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = ["the end", "in an inn there was another man", "x" * 100, "a", "one two three four five"]
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "kv_memory": "8MiB",
    "max_batch_rows": 4,
    "max_batch_tokens": 64,
    "max_model_len": 256,
}
DRAFTING: dict[str, Any] = {"lookahead": 3, "budget": 4, "prepare": "always", "draft_timeout": 120.0}
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0, "logprobs": 2},
    "restricted": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
}
# Chains and trees, just in time, prepared after planned outcomes, and towards the likeliest nodes.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {}),
    ("sd", {"nodes": 9}),
    ("ssd-uniform", {}),
    ("ssd", {}),
    ("ssd", {"nodes": 9}),
    ("swiftspec", {}),
]
DRAFTS = ["safeailab", "qwen3", "z-lab", "llama"]  # two layouts of EAGLE-3, and two of DFlash


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def drafts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = {}
    for layout in DRAFTS:
        write = write_tiny_dflash if layout in ("z-lab", "llama") else write_tiny_eagle
        found[layout] = str(write(tmp_path_factory.mktemp(layout), layout, folder))
    return found


def params(style: str) -> list[SamplingParams]:
    """Two prompts are of this style, the others plain."""
    own, plain = STYLES[style], {"temperature": 1.0}
    return [
        SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **(own if i % 2 else plain)) for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[list[int]]]:
    with LLM(folder, method="ar", **SETTINGS) as plain:
        return {style: tokens(plain, style) for style in STYLES}


def tokens(llm: LLM, style: str) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, params(style))]


@pytest.mark.parametrize(("method", "given"), METHODS)
@pytest.mark.parametrize("layout", DRAFTS)
def test_in_the_targets_process_the_tokens_are_those_of_ar(
    layout: str,
    method: str,
    given: dict[str, Any],
    folder: Path,
    drafts: dict[str, str],
    expected: dict[str, list[list[int]]],
) -> None:
    settings = {**SETTINGS, **DRAFTING, **given}
    with LLM(folder, method=method, draft=drafts[layout], link="inline", **settings) as llm:
        assert llm.engine.round.verifier.runs_ahead
        assert isinstance(llm.engine.round.draft, Inline)
        drafter = llm.engine.round.draft.side.drafter
        assert isinstance(drafter, BlockDrafter if layout in ("z-lab", "llama") else TreeDrafter)
        events: list[RoundEvent] = []
        llm.engine.round.observers.append(events.append)
        for style in STYLES:  # prompts of the first are in the prefix caches afterwards
            assert tokens(llm, style) == expected[style], style
        assert "draft" in {row.source for event in events for row in event.rows}


@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
@pytest.mark.parametrize("layout", ["safeailab", "z-lab"])
def test_over_the_link_the_tokens_are_those_of_ar(
    layout: str, method: str, folder: Path, drafts: dict[str, str], expected: dict[str, list[list[int]]]
) -> None:
    with LLM(folder, method=method, draft=drafts[layout], link="process", **SETTINGS, **DRAFTING) as llm:
        link = llm.engine.round.draft
        assert isinstance(link, Apart)
        events: list[RoundEvent] = []
        llm.engine.round.observers.append(events.append)
        for style in ("greedy", "warm"):
            assert tokens(llm, style) == expected[style]
        assert (link.n_starts, link.n_deaths) == (1, 0)
        assert "draft" in {row.source for event in events for row in event.rows}


@pytest.mark.parametrize("layout", ["safeailab", "z-lab"])
def test_a_draft_on_the_cpu_reads_a_target_on_the_gpu(
    layout: str, folder: Path, drafts: dict[str, str], expected: dict[str, list[list[int]]]
) -> None:
    settings = {**SETTINGS, **DRAFTING, "draft_device": "cpu", "link": "inline"}
    with LLM(folder, method="sd", draft=drafts[layout], **settings) as llm:
        assert tokens(llm, "greedy") == expected["greedy"]


@pytest.mark.parametrize("method", ["saguaro", "swiftspec"])
@pytest.mark.parametrize("layout", ["safeailab", "z-lab"])
def test_greedy_outputs_are_equal_under_rejection(
    layout: str, method: str, folder: Path, drafts: dict[str, str]
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, method="ar", **SETTINGS) as plain:
        wanted = [result.token_ids for result in plain.generate(PROMPTS, greedy)]
    settings = {**SETTINGS, **DRAFTING, "verification": "rejection", "link": "inline"}
    with LLM(folder, method=method, draft=drafts[layout], **settings) as llm:
        assert [result.token_ids for result in llm.generate(PROMPTS, greedy)] == wanted


@pytest.mark.parametrize("nodes", [3, 9])
def test_features_of_captured_steps_are_those_of_the_cpu(nodes: int, folder: Path, drafts: dict[str, str]) -> None:
    """Of every row and position, told once; they stay on the device, and later steps do not overwrite them."""
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    texts: dict[str, list[list[int]]] = {}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for device in ("cpu", "cuda"):
        settings = {**SETTINGS, **DRAFTING, "device": device, "method": "sd", "link": "inline", "nodes": nodes}
        with LLM(folder, draft=drafts["safeailab"], **settings) as llm:
            told: list[Features] = []
            link = llm.engine.round.draft
            assert isinstance(link, Inline)
            speculate = link.speculate

            def watched(outcome: Outcome, *given: Any, told: Any = told, speculate: Any = speculate) -> Any:
                told += [] if outcome.features is None else [outcome.features]
                return speculate(outcome, *given)

            link.speculate = watched  # type: ignore[assignment,method-assign]
            texts[device] = [result.token_ids for result in llm.generate(PROMPTS[:3], greedy)]
        assert all(features.values.device.type == device for features in told)
        found[device] = {
            (slot, start + at): value.cpu()
            for features in told
            for slot, start, values in features.rows()
            for at, value in enumerate(values)
        }
    assert texts["cpu"] == texts["cuda"]
    both = found["cpu"].keys() & found["cuda"].keys()  # a device may accept more of the last speculation
    assert len(both) > 3 * 24
    assert all(torch.allclose(found["cpu"][key], found["cuda"][key], rtol=1e-3, atol=1e-3) for key in both)


@pytest.mark.parametrize(("layout", "given"), [("safeailab", {"nodes": 9}), ("z-lab", {}), ("z-lab", {"nodes": 9})])
def test_what_is_drafted_is_what_the_same_draft_says_on_the_cpu(
    layout: str, given: dict[str, Any], folder: Path, drafts: dict[str, str]
) -> None:
    """Just in time, of chains and trees. Near ties may be decided otherwise, so most first tokens are the same."""
    said: dict[str, list[tuple[int, ...]]] = {}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for device in ("cpu", "cuda"):
        settings = {**SETTINGS, **DRAFTING, "device": device, "method": "sd", "link": "inline", **given}
        with LLM(folder, draft=drafts[layout], **settings) as llm:
            events: list[RoundEvent] = []
            llm.engine.round.observers.append(events.append)
            llm.generate(PROMPTS[:1], greedy)
        said[device] = [row.drafted for event in events for row in event.rows if row.drafted]
    same = sum(one[:1] == other[:1] for one, other in zip(said["cpu"], said["cuda"], strict=False))
    assert same >= 0.8 * min(len(each) for each in said.values()) > 3

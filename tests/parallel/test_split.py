"""A model divided among ranks computes what the whole one does, whatever its family, sizes and format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from saguaro.attention.step import Segment
from saguaro.config import SamplingParams
from saguaro.errors import ConfigError
from saguaro.kernels.bundle import plain_kernels
from saguaro.kernels.formats import computed_in, packed_kind, ready
from saguaro.model.linear import Packed
from saguaro.model.load import Loaded, load
from saguaro.model.split import ALONE, Exchange, Split, check_split, head_shares, shares
from saguaro.model.tiny import tiny_model, write_tiny
from saguaro.model.transformer import Transformer
from saguaro.model.weights import cuts, save_tensors
from saguaro.parallel.orders import decode_rows, encode_rows
from saguaro.runner.captured import Followed
from saguaro.runner.runner import Ran, Runner
from saguaro.target.request import Request
from saguaro.target.shape import RunnerShape, build_runner
from saguaro.target.step_rules import StepRules
from tests.model.write_fp8 import LAYOUTS, write_fp8
from tests.model.write_gguf import write_gguf
from tests.parallel.threads import CPU, exchanges, splits, together
from tests.parity.driver import TOLERANCE, difference, random_tokens
from tests.parity.test_logits import CASES

SHAPE = RunnerShape(n_pages=16, page_size=4, max_length=64, max_rows=4, depth=4, nodes=4, n_known=100)
TREE = Segment([7, 8, 9, 10, 11, 12], 29, [9, 8, 7, 6, 5, 4, 3, 2, 1], 6, parents=[-1, -1, 0, 1, 2])


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Exchange]:
    return exchanges("shared", request.param, tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = CASES[request.param]
    return write_tiny(tmp_path_factory.mktemp(request.param), family, **overrides)


def loaded(path: Path, split: Split = ALONE, dtype: str = "float32", kind: type[Packed] | None = None) -> Loaded:
    found = load("tiny", path, CPU, computed_in(dtype), kind, split=split)
    if kind is not None:
        ready(found.model, dtype)
    return found


@torch.inference_mode()
def logits(model: Transformer) -> Tensor:  # [L, V]
    """Of two prompts in one step, and then of a tree behind the first."""
    runner: Runner = build_runner(model, SHAPE, None)
    first, second = (random_tokens(n, model.spec.n_vocab, seed=n) for n in (29, 5))
    rows = [Segment(first, 0, TREE.pages[:8], 29), Segment(second, 0, [10, 11], 5)]
    prompts, tree = runner.run(rows, False), runner.run([TREE], False)
    assert isinstance(prompts, Ran)
    assert isinstance(tree, Ran)
    return torch.cat((prompts.logits, tree.logits))


def every_rank(group: list[Exchange], path: Path, dtype: str, kind: type[Packed] | None) -> list[Tensor]:
    ranks = splits(group)
    return together(len(group), lambda rank: logits(loaded(path, ranks[rank], dtype, kind).model))


def test_plain_weights_differ_by_rounding_only(folder: Path, group: list[Exchange]) -> None:
    """Partial sums are added across ranks, so that the order of additions is another one."""
    whole, found = logits(loaded(folder).model), every_rank(group, folder, "float32", None)
    assert difference(found[0], whole) < TOLERANCE
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_packed_weights_give_the_same_bits(folder: Path, group: list[Exchange], dtype: str) -> None:
    kind = packed_kind(dtype, CPU)
    whole = logits(loaded(folder, dtype=dtype, kind=kind).model)
    assert all(torch.equal(each, whole) for each in every_rank(group, folder, dtype, kind))


def test_bfloat16_differs_by_its_rounding(group: list[Exchange], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3")
    whole, found = logits(loaded(folder, dtype="bfloat16").model), every_rank(group, folder, "bfloat16", None)
    assert (found[0] - whole).abs().mean() < 0.05 * whole.std()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    "rules",
    [{"temperature": 0.0}, {}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {5: 3.0, 287: 1.0}}],
    ids=["greedy", "warm", "adjusted"],
)
def test_captured_steps_decide_alike_on_every_rank(
    group: list[Exchange], tmp_path: Path, rules: dict[str, Any]
) -> None:
    """As on a GPU: every rank chooses the tokens, and moves the keys of accepted nodes of its own heads. What the rows
    tell of their rules travels to it."""
    folder, shape = write_tiny(tmp_path, "llama"), replace(SHAPE, depth=3, nodes=5, n_known=288)
    params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, **rules)
    text, pages = random_tokens(9, 288), list(range(12, 0, -1))
    request = Request("", text, params, seed=7)

    @torch.inference_mode()
    def work(split: Split) -> tuple[list[list[int]], Tensor]:
        """A tree that grows by what was found: the target's tokens lie behind the second child."""
        runner = build_runner(loaded(folder, split).model, shape, plain_kernels())
        runner.run([Segment(text[:8], 0, pages, 0)], False)
        assert runner.room is not None
        step_rules = StepRules(runner.room, 288)

        def verify(tokens: list[int], parents: list[int]) -> list[int]:
            tree = Segment([text[8], *tokens], 8, pages, 1 + len(tokens), parents, slot=0)
            told = encode_rows(step_rules.told([tree], [request]), True)
            ran = runner.run(*decode_rows(np.array(told)))
            step_rules.launched()
            assert isinstance(ran, Followed)
            found: list[int] = ran.wait()[0].tolist()
            return found

        first = verify([0, 1], [-1, -1])[1]
        other = (first + 1) % 288
        second = verify([other, first], [-1, -1])[1]
        found = [verify([other, first, other, second], [-1, -1, 0, 1]), [first, second]]
        ran = runner.run([Segment([found[0][1], 5, 6], 11, pages, 3, slot=0)], False)
        assert isinstance(ran, Ran)
        return found, ran.logits

    (whole, whole_logits), ranks = work(ALONE), splits(group)
    assert (whole[0][0], whole[0][2:4]) == (2, [1, 3])
    for found, after in together(len(group), lambda rank: work(ranks[rank])):
        assert found == whole
        assert difference(after, whole_logits) < TOLERANCE


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file(group: list[Exchange], tmp_path: Path, family: str, kind: Any) -> None:
    """Rotary halves of a head are interleaved in the file of a Llama; blocks of Q8_0 lie in two ranks' parts."""
    path = write_gguf(tmp_path / "model.gguf", tiny_model(family, intermediate_size=96, tied=True), kind)
    whole, found = logits(loaded(path).model), every_rank(group, path, "float32", None)
    assert difference(found[0], whole) < TOLERANCE
    packed = packed_kind("int8", CPU)
    whole = logits(loaded(path, dtype="int8", kind=packed).model)
    assert torch.equal(every_rank(group, path, "int8", packed)[0], whole)


def test_matrices_stored_as_int8(group: list[Exchange], tmp_path: Path) -> None:
    """A rank reads the scales of its rows, and of its columns all scales."""
    from safetensors.torch import load_file

    from saguaro.model.rounded import rounded

    folder = write_tiny(tmp_path, "llama")
    file = folder / "model.safetensors"
    save_tensors(rounded(load_file(file), torch.float16), file)
    whole, found = logits(loaded(folder).model), every_rank(group, folder, "float32", None)
    assert difference(found[0], whole) < TOLERANCE


@pytest.mark.parametrize("layout", ["blocks-that-do-not-divide", "rows", "modelopt"])
def test_matrices_stored_in_fp8(group: list[Exchange], tmp_path: Path, layout: str) -> None:
    """The cuts between ranks go through blocks that have a scale."""
    write_fp8(tmp_path, "qwen3", LAYOUTS[layout])
    whole, found = logits(loaded(tmp_path).model), every_rank(group, tmp_path, "float32", None)
    assert difference(found[0], whole) < TOLERANCE
    packed = packed_kind("int8", CPU)
    whole = logits(loaded(tmp_path, dtype="int8", kind=packed).model)
    assert torch.equal(every_rank(group, tmp_path, "int8", packed)[0], whole)


def test_a_rank_reads_and_holds_its_part_only(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", num_hidden_layers=1)
    alone, n_ranks = loaded(folder), 2
    ranks = [Split(rank, n_ranks, lambda x: x[None]) for rank in range(n_ranks)]
    parts = [loaded(folder, split) for split in ranks]
    assert {part.n_params for part in parts} == {alone.n_params}
    vectors = sum(4 * p.numel() for p in alone.model.parameters() if p.dim() == 1)
    assert sum(part.weight_bytes - vectors for part in parts) == alone.weight_bytes - vectors
    named = cuts(parts[1].model)
    layer = "model.layers.0."
    assert {named[f"{layer}{name}.weight"].dim for name in ("self_attn.o_proj", "mlp.down_proj")} == {1}
    assert {named[f"{layer}{name}.weight"].dim for name in ("self_attn.q_proj", "mlp.up_proj")} == {0}
    assert named["lm_head.weight"] == named["model.embed_tokens.weight"] == (144, 288, 0)


@pytest.mark.parametrize(("n_heads", "n_kv"), [(9, 3), (8, 8), (8, 2), (7, 1), (32, 8), (14, 2), (5, 5)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_rank_has_heads_of_equal_groups(n_heads: int, n_kv: int, size: int) -> None:
    """A rank with several key heads has all query heads of each; then attention need not know of ranks."""
    group, every = n_heads // n_kv, head_shares(n_heads, n_kv, size)
    assert [cut.first for cut in every] == [0, *(cut.last for cut in every[:-1])]
    assert every[-1].last == n_heads
    for cut in every:
        held = -(-cut.last // group) - cut.first // group
        assert cut.n > 0
        assert held == 1 or (cut.n == held * group and cut.first % group == 0)


@pytest.mark.parametrize("n", [4, 51, 96, 576, 49152])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_are_even(n: int, size: int) -> None:
    every = shares(n, size)
    assert sum(cut.n for cut in every) == n
    assert max(cut.n for cut in every) - min(cut.n for cut in every) <= 1


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    spec = loaded(write_tiny(tmp_path, "llama")).model.spec
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 5; the model has 4 heads.*use at most 4"):
        check_split(spec, 5)
    with pytest.raises(ConfigError, match=r"is 3; the model has 2 units in its MLP.*use at most 2"):
        check_split(replace(spec, intermediate=2), 3)

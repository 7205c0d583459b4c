"""On a CPU a token's logits do not depend, to the bit, on what is computed with it: so every method is exact."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.attention.native import NativeAttention
from saguaro.attention.sdpa import SDPAttention
from saguaro.attention.step import Segment, make_step
from saguaro.kernels.formats import FORMATS, computed_in, ready
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.model.load import load
from saguaro.model.norm import Norm
from saguaro.model.tiny import FAMILIES, write_tiny
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import Runner, make_runner

CPU = torch.device("cpu")
PAGE, N_PAGES, N_TEXT = 4, 128, 150
CHUNKS = ([150], [1] * 150, [7, 1, 1, 64, 33, 5, 5, 2, 9, 23], [5] * 30)


class Texts:
    """A model and two texts on scattered pages. way: how steps run."""

    def __init__(self, model: Transformer, way: str) -> None:
        self.model, self.way = model, way
        draw = random.Random(1)
        self.tokens = [[draw.randrange(model.spec.n_vocab) for _ in range(N_TEXT)] for _ in range(2)]
        places = draw.sample(range(N_PAGES), N_PAGES)
        n = -(-N_TEXT // PAGE)
        self.pages = [places[:n], places[n : 2 * n]]

    def logits(self, steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[Tensor]:  # per text [N_TEXT, V]
        """Compute in steps, each of (text, start, stop)."""
        runner = self._runner()
        found: list[list[Tensor]] = [[], []]
        for step in steps:
            segments = [Segment(self.tokens[t][a:b], a, self.pages[t], n_wanted=b - a) for t, a, b in step]
            parts = runner.forward(make_step(segments, PAGE, CPU)).split([b - a for _, a, b in step])
            for (text, _, _), part in zip(step, parts, strict=True):
                found[text].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]

    def run(self, *steps: Sequence[Segment]) -> Tensor:  # [wanted, V]
        """The logits of steps one after the other."""
        runner = self._runner()
        return torch.cat([runner.forward(make_step(step, PAGE, CPU)) for step in steps])

    def _runner(self) -> Runner:
        spec, dtype = self.model.spec, self.model.dtype
        cache = KVCache(KVPlan(N_PAGES, PAGE, spec.kv_bytes_per_token(dtype), N_PAGES * PAGE), spec, CPU, dtype)
        cache.memory.fill_(float("nan"))
        if self.way == "one call":
            runner = make_runner(self.model, cache, None, N_PAGES * PAGE)
            assert runner.is_native
            return runner
        if self.way == "modules":
            return Runner(self.model, cache, NativeAttention(cache, spec.softmax_scale))
        return Runner(self.model, cache, SDPAttention(cache, spec.n_heads // spec.n_kv_heads, spec.softmax_scale))


def chunks(text: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(text, end - size, end) for end, size in zip(ends, sizes, strict=True)]


PACKED = [name for name, one in FORMATS.items() if one.kind is not None and not one.fault(CPU)]


WAYS = [
    *(("llama", dtype, way) for dtype in PACKED for way in ("one call", "modules")),
    ("qwen3", "int8", "one call"),
    ("llama", "float32", "torch's attention"),
]


def new_model(folder: Path, family: str, dtype: str, **overrides: Any) -> Transformer:
    path = write_tiny(folder / "tiny", family, **overrides)
    return ready(load("tiny", path, CPU, computed_in(dtype)).model, dtype)


@pytest.fixture(params=WAYS, ids=", ".join)
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Texts:
    family, dtype, way = request.param
    return Texts(new_model(tmp_path, family, dtype), way)


def test_whatever_the_chunks(texts: Texts) -> None:
    found = [texts.logits([[chunk] for chunk in chunks(0, sizes)])[0] for sizes in CHUNKS]
    assert found[0].isfinite().all()
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_whatever_the_neighbours(texts: Texts) -> None:
    """K + 1 tokens of one text beside the prompt of another, and each by itself."""
    alone = [texts.logits([[chunk] for chunk in chunks(text, CHUNKS[1])])[text] for text in range(2)]
    pairs = [list(pair) for pair in zip(chunks(0, CHUNKS[3]), chunks(1, CHUNKS[3]), strict=True)]
    mixed = [[*chunks(0, [150]), *chunks(1, [5, 145])[:1]], *[[chunk] for chunk in chunks(1, [5, 145])[1:]]]
    for steps in (pairs, mixed):
        together = texts.logits(steps)
        assert torch.equal(together[0], alone[0])
        assert torch.equal(together[1], alone[1])


TREE = [-1, 0, 0, -1, 2, 1, 3, 4, 2]  # parents; depths 1, 2, 2, 1, 3, 3, 2, 4, 3


def test_a_node_of_a_tree_as_if_it_were_alone(texts: Texts) -> None:
    """The logits after a node are those after its path written as text, whatever the other nodes are."""
    n_text, known = 37, texts.tokens[0]
    nodes = texts.tokens[1][: len(TREE)]
    text = Segment(known[:n_text], 0, texts.pages[0], 1)
    tree = Segment([known[n_text], *nodes], n_text, texts.pages[0], len(TREE) + 1, TREE)
    together = texts.run([text], [tree])[1:]
    paths = tree.paths
    assert max(map(len, paths)) == 4
    for node, path in enumerate(paths):
        alone = Segment([known[n_text], *(nodes[at] for at in path)], n_text, texts.pages[0], 1)
        assert torch.equal(texts.run([text], [alone])[-1], together[1 + node]), f"node {node}"
    beside = texts.run([text], [Segment(known[:9], 0, texts.pages[1], 1), tree])
    assert torch.equal(beside[2:], together)


BIASES = {"attention_bias": True, "mlp_bias": True}
ODD = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 88}  # not whole panels


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(
    ("family", "overrides"), [*((family, {}) for family in FAMILIES), ("llama", BIASES), ("qwen3", ODD)], ids=str
)
def test_one_call_gives_the_bits_of_the_modules(
    family: str, overrides: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """Also with more threads than pieces of work."""
    model = new_model(tmp_path, family, dtype, **overrides)
    whole, parts = Texts(model, "one call"), Texts(model, "modules")
    tree = Segment([5, *range(len(TREE))], 37, whole.pages[0], len(TREE) + 1, TREE)
    steps = [[Segment(whole.tokens[0][:37], 0, whole.pages[0], 3), Segment(whole.tokens[1][:5], 0, whole.pages[1], 1)]]
    steps += [[tree, Segment(whole.tokens[1][5:6], 5, whole.pages[1], 1)]]
    expected = parts.run(*steps)
    assert expected.isfinite().all()
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3, 20):
            torch.set_num_threads(n_threads)
            assert torch.equal(whole.run(*steps), expected), f"{n_threads} threads"
    finally:
        torch.set_num_threads(before)


def test_python_threads_compute_at_once(tmp_path: Path) -> None:
    """Each has a team of its own."""
    texts = Texts(new_model(tmp_path, "llama", "int8"), "one call")
    steps = [[chunk] for chunk in chunks(0, [5] * 30)]
    expected, found = texts.logits(steps)[0], list[Tensor]()

    def compute() -> None:
        torch.set_num_threads(2)
        found.extend(texts.logits(steps)[0] for _ in range(5))

    workers = [threading.Thread(target=compute) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 15
    assert all(torch.equal(each, expected) for each in found)


def test_a_module_that_is_not_plain_is_computed_by_itself(tmp_path: Path) -> None:
    class Doubled(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    texts = Texts(new_model(tmp_path, "llama", "int8"), "modules")
    before = texts.logits([[(0, 0, 9)]])[0]
    norm = texts.model.layers[1].get_submodule("mlp_norm")
    assert isinstance(norm, Norm)
    texts.model.layers[1].mlp_norm = Doubled(norm.weight, norm.eps)
    plan = KVPlan(N_PAGES, PAGE, texts.model.spec.kv_bytes_per_token(torch.float32), N_PAGES * PAGE)
    cache = KVCache(plan, texts.model.spec, CPU, torch.float32)
    runner = make_runner(texts.model, cache, None, N_PAGES * PAGE)
    assert not runner.is_native
    step = make_step([Segment(texts.tokens[0][:9], 0, texts.pages[0], n_wanted=9)], PAGE, CPU)
    assert not torch.equal(runner.forward(step), before)

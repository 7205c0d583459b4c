"""On a CPU a token's logits do not depend, to the bit, on what is computed with it: so every method is exact."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saguaro.attention.native import NativeAttention
from saguaro.attention.sdpa import AttentionBackend, SDPAttention
from saguaro.attention.step import Segment, make_step
from saguaro.kernels.formats import FORMATS, computed_in, ready
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.model.load import load
from saguaro.model.tiny import write_tiny
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import Runner

CPU = torch.device("cpu")
PAGE, N_PAGES, N_TEXT = 4, 128, 150
CHUNKS = ([150], [1] * 150, [7, 1, 1, 64, 33, 5, 5, 2, 9, 23], [5] * 30)


class Texts:
    """A model and two texts on scattered pages."""

    def __init__(self, model: Transformer, backend: type[SDPAttention] | type[NativeAttention]) -> None:
        self.model, self.backend = model, backend
        draw = random.Random(1)
        self.tokens = [[draw.randrange(model.spec.n_vocab) for _ in range(N_TEXT)] for _ in range(2)]
        places = draw.sample(range(N_PAGES), N_PAGES)
        n = -(-N_TEXT // PAGE)
        self.pages = [places[:n], places[n : 2 * n]]

    def logits(self, steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[Tensor]:  # per text [N_TEXT, V]
        """Compute in steps, each of (text, start, stop)."""
        spec, dtype = self.model.spec, self.model.dtype
        plan = KVPlan(N_PAGES, PAGE, spec.kv_bytes_per_token(dtype), N_PAGES * PAGE)
        cache = KVCache(plan, spec, CPU, dtype)
        cache.memory.fill_(float("nan"))
        runner = Runner(self.model, cache, self._attention(cache))
        found: list[list[Tensor]] = [[], []]
        for step in steps:
            segments = [Segment(self.tokens[t][a:b], a, self.pages[t], n_wanted=b - a) for t, a, b in step]
            parts = runner.forward(make_step(segments, PAGE, CPU)).split([b - a for _, a, b in step])
            for (text, _, _), part in zip(step, parts, strict=True):
                found[text].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]

    def run(self, *steps: Sequence[Segment]) -> Tensor:  # [wanted, V]
        """The logits of steps one after the other."""
        spec, dtype = self.model.spec, self.model.dtype
        cache = KVCache(KVPlan(N_PAGES, PAGE, spec.kv_bytes_per_token(dtype), N_PAGES * PAGE), spec, CPU, dtype)
        cache.memory.fill_(float("nan"))
        runner = Runner(self.model, cache, self._attention(cache))
        return torch.cat([runner.forward(make_step(step, PAGE, CPU)) for step in steps])

    def _attention(self, cache: KVCache) -> AttentionBackend:
        if self.backend is NativeAttention:
            return NativeAttention(cache, self.model.spec.softmax_scale)
        spec = self.model.spec
        return SDPAttention(cache, spec.n_heads // spec.n_kv_heads, spec.softmax_scale)


def chunks(text: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(text, end - size, end) for end, size in zip(ends, sizes, strict=True)]


PACKED = [name for name, one in FORMATS.items() if one.kind is not None and not one.fault(CPU)]


@pytest.fixture(params=[*PACKED, "float32, by torch's attention", "int8 in qwen3"])
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Texts:
    family = "qwen3" if "qwen3" in request.param else "llama"
    dtype = request.param.replace(",", "").split()[0]
    model = ready(load("tiny", write_tiny(tmp_path / "tiny", family), CPU, computed_in(dtype)).model, dtype)
    return Texts(model, SDPAttention if "torch" in request.param else NativeAttention)


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

"""Our logits are transformers' logits, however a text is cut into steps, rows and pages."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from saguaro.kv.pages import PageTable
from saguaro.model import families, tiny
from saguaro.model.tiny import tiny_model
from tests.parity.driver import LINEAR, LLAMA3, PAGE_SIZE, TOLERANCE, Driver, difference, random_tokens, reference

N_TOKENS = 47

ODD = {
    "hidden_size": 60,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "intermediate_size": 51,
    "vocab_size": 101,
    "num_hidden_layers": 3,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-ungrouped": ("llama", {"num_key_value_heads": 4}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("llama", ODD),
    "llama-odd-tied": ("llama", {**ODD, "tied": True}),
    "llama-scale": ("llama", {"attention_multiplier": 0.1}),
    "llama-odd-scale": ("llama", {**ODD, "attention_multiplier": 0.1}),
    "mistral": ("mistral", {}),
    "mistral-wide-head": ("mistral", {"head_dim": 20, "tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tied": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-odd": ("qwen3", {**ODD, "num_key_value_heads": 5}),
}


class Pair(NamedTuple):
    """The same weights twice."""

    theirs: Any
    ours: Driver

    @property
    def n_vocab(self) -> int:
        return self.ours.model.spec.n_vocab


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, overrides = CASES[request.param]
    theirs = tiny_model(family, **overrides)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if "attention_multiplier" in overrides:  # a family that has it
            for layer in theirs.model.layers:
                layer.self_attn.scaling = overrides["attention_multiplier"]
            name = "LlamaForCausalLM"
            patch.setitem(families.FAMILIES, name, replace(families.FAMILIES[name], scales_attention=True))
        return Pair(theirs, Driver(folder))


def test_every_family_has_a_case() -> None:
    known = {name.removesuffix("ForCausalLM").lower() for name in families.FAMILIES}
    assert known == set(tiny.FAMILIES) == {family for family, _ in CASES.values()}


@pytest.mark.parametrize(
    "sizes",
    [[N_TOKENS], [7, 1, 13, 2, 24], [PAGE_SIZE, 1, PAGE_SIZE - 1, N_TOKENS - 2 * PAGE_SIZE], [1] * N_TOKENS],
    ids=["in one piece", "in uneven chunks", "in chunks that end with a page", "token by token"],
)
def test_a_text_computed(pair: Pair, sizes: list[int]) -> None:
    tokens = random_tokens(N_TOKENS, pair.n_vocab)
    assert difference(pair.ours.chunks(tokens, sizes), reference(pair.theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("is_first_gone", [False, True], ids=["shared with", "left by"])
def test_a_text_that_begins_in_pages(pair: Pair, is_first_gone: bool) -> None:
    """A prefix-cache hit: only what follows the shared pages is computed."""
    pool, seed = pair.ours.pool, 10 + is_first_gone
    shared = random_tokens(5 * PAGE_SIZE + 2, pair.n_vocab, seed)
    first, second = shared + random_tokens(9, pair.n_vocab, 2), shared + random_tokens(13, pair.n_vocab, 3)
    table, _ = pool.match(first)
    pair.ours.step([(table, first, 0, len(first))])
    pool.publish(table, first, len(first))
    if is_first_gone:
        pool.release(table)
    hit, n_cached = pool.match(second)
    assert n_cached == 5 * PAGE_SIZE
    [logits] = pair.ours.step([(hit, second, n_cached, len(second))])
    assert difference(logits, reference(pair.theirs, second)[n_cached:]) < TOLERANCE
    pool.check([hit] if is_first_gone else [table, hit])
    for used in [hit] if is_first_gone else [table, hit]:
        pool.release(used)
    pool.check([])


def test_rows_of_different_lengths_in_scattered_pages(pair: Pair) -> None:
    """Three texts grow in turns, so that their pages interleave; a step mixes whole prompts, chunks and single tokens.

    step       0        1        2       3
    text 0   0 .. 9   .. 10    .. 11   .. 30
    text 1   0 .. 1   .. 18    .. 19   .. 20
    text 2            0 .. 5   .. 29   .. 30
    """
    texts = [random_tokens(n, pair.n_vocab, seed=n) for n in (30, 20, 31)]
    ends = [[9, 10, 11, 30], [1, 18, 19, 20], [0, 5, 29, 31]]
    tables = [PageTable() for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for at in range(4):
        spans = [(0 if at == 0 else end[at - 1], end[at]) for end in ends]
        moving = [row for row, (start, stop) in enumerate(spans) if start < stop]
        logits = pair.ours.step([(tables[row], texts[row], *spans[row]) for row in moving])
        for row, new in zip(moving, logits, strict=True):
            found[row].append(new)
    for table, text, some in zip(tables, texts, found, strict=True):
        assert table.pages != list(range(table.pages[0], table.pages[0] + len(table.pages)))
        assert difference(torch.cat(some), reference(pair.theirs, text)) < TOLERANCE
        pair.ours.pool.release(table)


def test_the_first_token_moves_the_last_logits(pair: Pair) -> None:
    """The weights are random enough: changing the first token moves the last logits, so parity says something."""
    tokens = random_tokens(N_TOKENS, pair.n_vocab)
    other = [(tokens[0] + 1) % pair.n_vocab, *tokens[1:]]
    moved = reference(pair.theirs, tokens)[-1] - reference(pair.theirs, other)[-1]
    assert moved.abs().max() > 100 * TOLERANCE

"""Steps of an unrolled EAGLE-3 head are those of drafting: of a plain loop, and of the engine's own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from saguaro.config import SamplingParams
from saguaro.distill.batch import collate
from saguaro.distill.corpus import Text
from saguaro.distill.eagle_head import make_head, save_head
from saguaro.distill.eagle_learner import EagleLearner
from saguaro.distill.parallel import Parallel, hidden_states
from saguaro.distill.recipe import Recipe
from saguaro.distill.unroll import ahead, places_before, unroll, visible
from saguaro.draft.load import load_draft
from saguaro.methods import draft_side
from saguaro.model.eagle import Eagle
from saguaro.model.linear import Linear
from saguaro.model.load import load
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_eagle import LAYOUTS, write_tiny_eagle
from saguaro.model.transformer import Taps, Transformer
from saguaro.types import Features, Joined, Outcome
from tests.distill.test_parallel import difference
from tests.draft.config import new_config
from tests.model.eagle_reference import Reference, watched
from tests.model.test_eagle import draft_of

CPU = torch.device("cpu")
N_KNOWN, N_LAYERS, N_STEPS = 264, 6, 7
TOKENS = torch.randint(N_KNOWN, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Transformer:
    return load("target", target_folder, CPU, torch.float32).model


def features_of(target: Transformer, taps: tuple[int, ...], tokens: Tensor) -> Tensor:  # [B, L] -> [B, L, F]
    kept = torch.empty(tokens.numel(), len(taps) * target.spec.hidden)
    hidden_states(target, tokens, Taps(taps, kept))
    return kept.view(*tokens.shape, -1)


def unrolled(head: Eagle, target: Transformer, tokens: Tensor) -> list[Tensor]:  # N_STEPS times [B, L - 1, V]
    """The logits of every step at every place."""
    features = features_of(target, head.reads.taps, tokens)[:, :-1]
    by = Parallel(1, head.spec.softmax_scale)
    steps = unroll(head, tokens, features, N_STEPS)
    return [head.logits(hidden, by).view(len(tokens), tokens.shape[1] - 1, -1) for hidden in steps]


def in_float64(head: Eagle) -> Eagle:
    """The same weights: a loop of seven steps through random ones enlarges what float32 rounds."""
    lent, own_head = head.embedding.double(), head.token_map is not None
    spec, of_target = head.reads, None if own_head else Linear(head.head.matrix.double())
    twin = Eagle(spec, CPU, torch.float64, token_map=head.token_map, embedding=lent, head=of_target)
    for name, weight in twin.named_parameters():
        weight.data.copy_(head.get_parameter(name))
    return twin


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_every_step_at_every_place_is_that_of_a_loop(
    layout: str,
    block: int,
    tmp_path: Path,
    target_folder: Path,
    target: Transformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop reads a text with features, then further tokens of it one by one with its own states. Its places attend
    in blocks, or all at once."""
    monkeypatch.setattr("saguaro.distill.unroll.BLOCK", block)
    folder = write_tiny_eagle(tmp_path, layout, target_folder, seed=3)
    head, reference = in_float64(draft_of(folder, target_folder, target)), Reference(folder, target_folder)
    for held in (reference.weights, reference.of_target):
        held.update({name: one.double() for name, one in held.items() if one.is_floating_point()})
    features, found = features_of(target, head.reads.taps, TOKENS).double(), unrolled(head, target, TOKENS)
    n_compared = 0
    for row, text in enumerate(TOKENS.tolist()):
        for place in range(len(text) - 1):
            states = reference.states(features[row, : place + 1])
            for step in range(min(N_STEPS, len(text) - 1 - place)):
                outputs = reference.run(text[1 : place + step + 2], states)
                expected = reference.logits(outputs[-1:])[0].float()
                assert torch.allclose(found[step][row, place], expected, atol=1e-4, rtol=1e-4), (row, place, step)
                last = outputs[-1:]
                last = reference._norm(last, reference.weights["norm.weight"]) if head.reads.feeds_normed else last
                states = torch.cat((states, last))
                n_compared += 1
    assert n_compared == 2 * (7 * 5 + 6 + 5 + 4 + 3 + 2 + 1)


@torch.no_grad()
def test_steps_are_those_of_the_engine(tmp_path: Path, target_folder: Path, target: Transformer) -> None:
    """A head that is written, loaded and drafts greedily has the same logits when it is unrolled over the text and its
    drafted tokens."""
    ids = torch.arange(10, 260)
    save_head(make_head(target, (2, 3, 5), ids, seed=1), tmp_path, torch.float32)
    config = new_config(N_KNOWN, draft=str(tmp_path), target=str(target_folder), n_text=288, lookahead=N_STEPS)
    head = load_draft(config, target)
    assert isinstance(head, Eagle)
    side, none, said = draft_side(config, head), torch.zeros(1, dtype=torch.int64), list[Tensor]()
    side.drafter.runner.logits = watched(side.drafter.runner.logits, said)  # type: ignore[attr-defined]
    text = TOKENS[0].tolist()
    own = features_of(target, head.reads.taps, TOKENS[:1])[0, :-1]
    side.admit([Joined(0, text[:-1], len(text) - 1, 0, SamplingParams(temperature=0))])
    features = Features(none, none, none + len(own), own)
    side.respond(Outcome(none, none, none, torch.tensor([text[-1]]), features=features), [0], [N_STEPS])
    row = side.rows.get(0)
    assert row is not None
    assert len(row.speculation) == N_STEPS
    whole = torch.tensor([text + row.speculation])
    plain = draft_of(tmp_path, target_folder, target)  # its weights are not packed
    found = unrolled(plain, target, whole)  # features after the text are not read at the place of its last token
    steps = torch.stack([logits[0, len(text) - 2] for logits in found])
    assert torch.allclose(steps, torch.cat(said[-N_STEPS:]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_padding_is_not_seen(target: Transformer) -> None:
    head = make_head(target, (2, 3, 5), torch.arange(288), seed=0)
    other = TOKENS.clone()
    other[1, 8:] = 0
    ours, padded = unrolled(head, target, TOKENS), unrolled(head, target, other)
    for step in range(N_STEPS):
        n = 7 - step  # places whose token is text
        assert torch.allclose(ours[step][0], padded[step][0], atol=1e-5)
        assert torch.allclose(ours[step][1, :n], padded[step][1, :n], atol=1e-5)


def test_gradients_are_those_of_finite_differences(target: Transformer) -> None:
    """Through states and keys of all steps, in float64."""
    head = make_head(target, (1, 4), torch.arange(288), seed=0)
    twin = in_float64(head)
    weights = {name: weight for name, weight in twin.named_parameters() if name != "embedding"}
    features = features_of(target, (1, 4), TOKENS)[:, :-1].double()

    def value() -> Tensor:
        return torch.stack([step.square().mean() for step in unrolled_states()]).sum()

    def unrolled_states() -> list[Tensor]:
        return unroll(twin, TOKENS, features, 3)

    for name in list(weights):
        if name.startswith(("norm", "head")):
            del weights[name]  # not in hidden states
    for weight in weights.values():
        weight.requires_grad_(True)
    value().backward()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        way = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        assert float((weight.grad * way).sum()) == pytest.approx(difference(weight, way, value), rel=1e-4, abs=1e-7), (
            name
        )


def test_half_targets_and_autocast(target_folder: Path, target: Transformer) -> None:
    """As on a GPU: a target in bfloat16, a head in float32, products in bfloat16."""
    half = load("target", target_folder, CPU, torch.bfloat16).model
    batch = collate([Text([1, 2, 3, 4, 5, 9], 2), Text([5, 6, 7], 0)], prompt_weight=0.5)
    exact, rounded = (make_head(one, (2, 3, 5), torch.arange(288), seed=0) for one in (target, half))
    wanted = EagleLearner(exact, target, Recipe(unroll=3)).run(batch)
    rounded.fc.matrix.requires_grad_(True)  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        found = EagleLearner(rounded, half, Recipe(unroll=3)).run(batch)
    for ours, theirs in zip(found.ours, wanted.ours, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).detach().square().mean().sqrt() / theirs.std()) < 0.1
    torch.stack(found.ours).sum().backward()
    assert rounded.fc is not None
    assert rounded.fc.matrix.grad is not None
    assert rounded.fc.matrix.grad.isfinite().all()


# What is learnt, and where


def test_what_each_step_reads_and_learns() -> None:
    """By the definition: step k at place j reads token j + 1 + k, and learns what follows it."""
    tokens = torch.arange(10, 18).view(2, 4)
    assert [ahead(tokens, step).tolist()[1] for step in range(4)] == [
        [15, 16, 17], [16, 17, 0], [17, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    at = torch.tensor([0, 1, 3, 4, 6])  # rows 0 and 1, columns 0, 1, 3 and 0, 2
    place, is_there = places_before(at, 4, 3)
    for step in range(3):
        for which, (row, column) in enumerate([(0, 0), (0, 1), (0, 3), (1, 0), (1, 2)]):
            assert bool(is_there[step, which]) == (column >= 1 + step)
            if column >= 1 + step:
                own = int(place[step, which])
                assert divmod(own, 3) == (row, column - 1 - step)
                assert ahead(tokens, step).flatten()[own] == tokens[row, column]


def test_what_is_visible() -> None:
    seen = visible(2, 5, 3, CPU)
    assert seen.shape == (3, 5 + 2 * 3)
    for place in range(2, 5):
        for key in range(5):
            assert bool(seen[place - 2, key]) == (key <= place)
        for step in range(2):
            for at in range(2, 5):
                assert bool(seen[place - 2, 5 + 3 * step + at - 2]) == (at == place)


def test_weights_of_steps_and_positions(target: Transformer) -> None:
    batch = collate([Text([1, 2, 3, 4, 5], 2), Text([5, 6, 7], 0)], prompt_weight=0.5)
    head = make_head(target, (2, 3, 5), torch.arange(288), seed=0)
    passed = EagleLearner(head, target, Recipe(unroll=3, unroll_decay=0.5)).run(batch)
    assert batch.at.tolist() == [0, 1, 2, 3, 5, 6]  # columns 0 1 2 3, 0 1
    share = torch.tensor([4, 2, 1]) / 7
    expected = torch.tensor([[0, 1, 1, 1, 0, 1.0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0]]) / 5.5
    assert torch.allclose(passed.weight, share[:, None] * expected)
    assert torch.allclose(passed.judged, torch.tensor([0, 1, 1, 1, 0, 1]) / 4)
    assert len(passed.ours) == 3

"""Every proposer keeps the same promises: one suite for all of them, and what is special about each."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.config import SamplingParams
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.combined import Combined
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.growth import Shape
from saguaro.draft.load import load_draft
from saguaro.draft.match_chance import N_BINS
from saguaro.draft.ngram import Ngram
from saguaro.draft.policy.misses import NoProposer
from saguaro.draft.random import RandomTokens
from saguaro.draft.rows import DraftRow, DraftRows, Proposal, Proposer
from saguaro.draft.scripted import Scripted
from saguaro.draft.suffix import Suffix
from saguaro.draft.tree import NO_TREE
from saguaro.method import GROWTHS
from saguaro.methods import draft_side
from saguaro.model.load import load
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_dflash import write_tiny_dflash
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide
from saguaro.types import DRAFT, EMPTY, NGRAM, RANDOM, SCRIPT, SOURCES, SUFFIX, Features, Joined, Outcome
from tests.draft.config import new_config
from tests.draft.trees import entries, expanded

V, K = 264, 4
TEXTS = [[5, 6, 7, 8, 5, 6], [1, 2, 3], [9], [4, 4, 4, 4], list(range(30, 55))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=3)


class Known:
    """A drafter that has read every text it is asked about."""

    def __init__(self, drafter: TreeDrafter | Suffix | Combined | BlockDrafter) -> None:
        self.source = drafter.source
        self._drafter, self._admitted = drafter, set[int]()

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        new = [row for row in rows if row.slot not in self._admitted]
        self._admitted |= {row.slot for row in new}
        self._drafter.admit(new)
        self._drafter.settle(rows)
        self._drafter.read(rows, lambda: False)
        return self._drafter.propose(rows, lookahead)


def drafting(folder: Path, verification: str) -> TreeDrafter:
    paths = {"draft": str(folder), "target": str(folder)}
    config = new_config(V, **paths, verification=verification, lookahead=K, saguaro_c=0.5)
    drafter = draft_side(config, load_draft(config, None)).drafter
    assert isinstance(drafter, TreeDrafter)
    return drafter


def model(folder: Path, verification: str) -> Known:
    return Known(drafting(folder, verification))


class KnownBlocks(Known):
    """The same for a drafter that reads features of the texts: they are random."""

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """See Proposer."""
        drafter = self._drafter
        assert isinstance(drafter, BlockDrafter)
        drafter.admit([row for row in rows if row.slot not in self._admitted])
        self._admitted |= {row.slot for row in rows}
        for row in rows:
            trunk = drafter.trunks[row.slot]
            n = len(row.text) - 1 - trunk.n_computed
            values = torch.randn(n, 2 * 64, generator=torch.Generator().manual_seed(row.slot))
            slot, start, length = (torch.tensor([each]) for each in (row.slot, trunk.n_computed, n))
            drafter.receive(Features(slot, start, length, values))
        drafter.read(rows, lambda: False)
        return drafter.propose(rows, lookahead)


def blocks(folder: Path, verification: str, nodes: int = K) -> KnownBlocks:
    taps = {"mask_token_id": V, "target_layer_ids": [0, 1]}
    draft = write_tiny_dflash(folder.parent / f"{folder.name} blocks", "z-lab", folder, dflash_config=taps)
    paths = {"draft": str(draft), "target": str(folder), "n_text": 288}
    config = new_config(V, **paths, verification=verification, lookahead=K, nodes=nodes, width=1 if nodes == K else 2)
    drafter = draft_side(config, load_draft(config, None)).drafter
    assert isinstance(drafter, BlockDrafter)
    return KnownBlocks(drafter)


def repeating(nodes: int) -> Known:
    return Known(Suffix(Shape(K, nodes, 1 if nodes == K else 2), V))


def beside(folder: Path) -> Known:
    shape = Shape(K, K, 1)
    return Known(Combined(drafting(folder, "shared"), Suffix(shape, V), shape, completes=True))


MAKERS: dict[str, tuple[int, Callable[[Path], Proposer]]] = {
    "none": (EMPTY, lambda _: NoProposer()),
    "ngram": (NGRAM, lambda _: Ngram()),
    "random": (RANDOM, lambda _: RandomTokens(V)),
    "scripted": (SCRIPT, lambda _: Scripted(lambda text, n: [text[-1]] * (len(text) % 3 * n))),
    "model": (DRAFT, lambda folder: model(folder, "shared")),
    "drawn": (DRAFT, lambda folder: model(folder, "rejection")),
    "suffix": (SUFFIX, lambda _: repeating(K)),
    "suffix trees": (SUFFIX, lambda _: repeating(2 * K)),
    "model and suffix": (DRAFT, beside),
    "blocks": (DRAFT, lambda folder: blocks(folder, "shared")),
    "trees of blocks": (DRAFT, lambda folder: blocks(folder, "shared", 2 * K)),
    "drawn blocks": (DRAFT, lambda folder: blocks(folder, "rejection")),
}


@pytest.fixture(params=MAKERS)
def proposer(request: pytest.FixtureRequest, folder: Path) -> Proposer:
    source, make = MAKERS[request.param]
    made = make(folder)
    assert (made.source, SOURCES[made.source]) == (source, SOURCES[source])
    return made


def admitted(texts: Sequence[Sequence[int]]) -> list[DraftRow]:
    hot, cold = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
    return DraftRows().admit([Joined(s, text, 1, s, (hot, cold)[s % 2]) for s, text in enumerate(texts)])


def check(proposer: Proposer, rows: Sequence[DraftRow], lookahead: int) -> list[list[int]]:
    """Ask, and see that the promises are kept."""
    before = [(list(row.text), list(row.speculation), row.source) for row in rows]
    proposal = proposer.propose(rows, lookahead)
    assert [(row.text, row.speculation, row.source) for row in rows] == before, "rows are not the proposer's to change"
    assert len(proposal.tokens) == len(rows)
    for index, tokens in enumerate(proposal.tokens):
        assert len(tokens) <= lookahead
        parents = proposal.parents[index] if proposal.parents else None
        if parents is not None:
            assert len(parents) == len(tokens)
            assert all(-1 <= parent < node for node, parent in enumerate(parents))
        if proposal.chances:
            assert len(proposal.chances[index]) == len(tokens)
            assert all(0 < chance <= 1 for chance in proposal.chances[index])
        assert all(0 <= token < V for token in tokens)
        q = proposal.q[index] if proposal.q else None
        if q is not None:
            assert q.shape == (len(tokens), V)
            assert torch.allclose(q.sum(-1), torch.ones(len(tokens)))
            assert all(q[at, token] > 0 for at, token in enumerate(tokens))
    return proposal.tokens


@pytest.mark.parametrize("lookahead", [0, 1, K])
def test_a_proposal_for_every_row_and_none_too_long(proposer: Proposer, lookahead: int) -> None:
    check(proposer, admitted(TEXTS), lookahead)
    check(proposer, [], lookahead)


def test_texts_grow_and_rows_are_asked_for_in_any_order(proposer: Proposer) -> None:
    rows = admitted(TEXTS)
    for _ in range(3):
        tokens = check(proposer, rows, K)
        for row, own in zip(rows, tokens, strict=True):
            row.text.extend([*own[:2], 7])
        rows = rows[1:] + rows[:1]
    check(proposer, rows[1:3], K - 1)


@pytest.mark.parametrize("make", [model, blocks])
def test_a_model_says_the_same_whoever_else_is_asked(make: Callable[[Path, str], Proposer], folder: Path) -> None:
    together = check(make(folder, "shared"), admitted(TEXTS), K)
    assert all(len(tokens) == K for tokens in together)
    for index, row in enumerate(admitted(TEXTS)):
        assert check(make(folder, "shared"), [row], K) == [together[index]]


def test_q_is_that_of_its_row_beside_one_that_is_not_read_yet(folder: Path) -> None:
    """The first and the third are not known to the drafter: they get nothing, and the others what they get alone."""
    drafter, rows = drafting(folder, "rejection"), admitted(TEXTS)
    drafter.admit(rows[1::2])
    tokens = check(drafter, rows, K)
    assert [len(own) for own in tokens] == [0, K, 0, K, 0]
    drafter.settle(rows)
    q = drafter.propose(rows, 1).q
    assert [own is None for own in q] == [True, False, True, False, True]
    for index in (1, 3):
        alone, own = drafting(folder, "rejection"), q[index]
        alone.admit([rows[index]])
        (expected,) = alone.propose([rows[index]], 1).q
        assert own is not None
        assert expected is not None
        assert torch.allclose(own, expected)


def test_reading_ends_when_the_outcome_is_there(folder: Path) -> None:
    """What is left is read in the rounds that follow; nothing is drafted after a text that is not read."""
    drafter, (row,) = drafting(folder, "shared"), admitted([list(range(220))])
    drafter.admit([row])
    n_drafted = []
    for _ in range(4):
        drafter.read([row], is_late=lambda: True)
        n_drafted.append(len(drafter.propose([row], K).tokens[0]))
    assert n_drafted == [0, 0, 0, K]  # 64 tokens a time


@pytest.mark.parametrize("n_steps", [1, 2, K])
def test_preparing_ends_when_the_outcome_is_there(folder: Path, n_steps: int) -> None:
    """What was drafted until then is a speculation, and the beginning of what would be drafted just in time."""
    target = load("target", folder, torch.device("cpu"), torch.float32).model
    draft, row = side(target, "uniform"), Joined(0, TEXTS[0], 1, 0, SamplingParams(temperature=0))
    draft.admit([row])
    spec = draft.respond(Outcome.nothing(), [0], [K])
    asked: list[int] = []

    def is_late() -> bool:
        asked.append(len(asked))
        return asked[-1] >= n_steps

    draft.prepare(is_late)
    assert len(asked) == n_steps + 1  # before the first step, and after each
    k, bonus = prepared(draft, 0)[0]
    outcome = Outcome(torch.tensor([0]), spec.length, torch.tensor([k]), torch.tensor([bonus]))
    found = draft.respond(outcome, [0], [K])
    text = [*TEXTS[0], *spec.tokens[0, :k].tolist(), bonus]
    assert (found.hit.tolist(), found.length.tolist()) == ([True], [n_steps])
    expected = just_in_time(target, Joined(0, text, 1, 0, row.params))
    assert found.tokens[0, :n_steps].tolist() == expected[:n_steps]


def side(target: Transformer, growth: str) -> DraftSide:
    """The draft's side of a target without a layer; as it is drafted on a miss, or prepared."""
    config = new_config(V, draft="drop:1", growth=growth, lookahead=K, budget=6)
    return draft_side(config, load_draft(config, target))


def just_in_time(target: Transformer, row: Joined) -> list[int]:
    """What a draft says that has never heard of this text before."""
    fresh = side(target, "nothing")
    fresh.admit([row])
    fresh.prepare()  # reads what is far behind
    spec = fresh.respond(Outcome.nothing(), [row.slot], [K])
    assert spec.source.tolist() == [DRAFT]
    return list(spec.tokens[0].tolist())


@pytest.mark.parametrize("growth", [name for name in GROWTHS if name not in ("nothing", "list")])
def test_what_was_prepared_is_what_would_be_drafted(folder: Path, growth: str) -> None:
    """Whatever was accepted, and whether a row hits or misses: its keys and values are those of its own text."""
    target = load("target", folder, torch.device("cpu"), torch.float32).model
    draft, chance = side(target, growth), Random(1)
    texts = {slot: list(text) for slot, text in enumerate(TEXTS[:4])}
    rules = {slot: SamplingParams(temperature=slot % 2) for slot in texts}
    draft.admit([Joined(slot, text, 1, slot, rules[slot]) for slot, text in texts.items()])
    outcome, hits = Outcome.nothing(), Counter[bool]()
    for _ in range(8):
        slots = chance.sample(sorted(texts), len(texts))
        spec = draft.respond(outcome, slots, [K] * len(slots))
        for slot, n, tokens in zip(slots, spec.length.tolist(), spec.tokens.tolist(), strict=True):
            assert n == K or growth == "best"
            assert tokens[:n] == just_in_time(target, Joined(slot, texts[slot], 1, slot, rules[slot]))[:n]
        hits.update(spec.hit.tolist())
        draft.prepare()
        decided = [decide(draft, slot, chance) for slot in slots]
        for slot, (k, bonus), tokens in zip(slots, decided, spec.tokens.tolist(), strict=True):
            texts[slot] += [*tokens[:k], bonus]
        accepted, last = torch.tensor(decided).unbind(1)
        outcome = Outcome(torch.tensor(slots), spec.length, accepted, last)
    assert hits[True] > 10
    assert hits[False] > 3


def prepared(draft: DraftSide, slot: int) -> list[tuple[int, int]]:
    """The outcomes of a row that were prepared."""
    row = draft.rows.get(slot)
    assert row is not None
    assert isinstance(draft.drafter, TreeDrafter)
    flight = tuple(row.speculation)
    paths = [path for path in expanded(entries(draft.drafter.trees, slot)) if path != flight[: len(path)]]
    return [(len(path) - 1, path[-1]) for path in paths if path[:-1] == flight[: len(path) - 1]]


def decide(draft: DraftSide, slot: int, chance: Random) -> tuple[int, int]:
    """An outcome that was prepared, or sometimes any."""
    found = prepared(draft, slot)
    if found and chance.random() < 0.75:
        return chance.choice(found)
    row = draft.rows.get(slot)
    assert row is not None
    return chance.randrange(len(row.speculation) + 1), chance.randrange(V)


# n-grams


def naive(text: Sequence[int], lookahead: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest ending that has one."""
    for n in range(longest, shortest - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[-n:]:
                return list(text[at : at + lookahead])
    return []


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5),
    lookahead=st.integers(1, 5),
    longest=st.integers(1, 4),
)
def test_ngrams_are_those_of_a_search_through_the_text(pieces: list[list[int]], lookahead: int, longest: int) -> None:
    ngram, rows = Ngram(longest, 1), admitted([pieces[0], pieces[-1]])
    for piece in pieces:
        expected = [naive(row.text, lookahead, longest, 1) for row in rows]
        assert ngram.propose(rows, lookahead).tokens == expected
        rows[0].text.extend(piece)


def test_ngrams_forget_a_row_with_its_text() -> None:
    ngram, rows = Ngram(), DraftRows()
    rows.admit([Joined(0, [5, 6, 7, 5, 6])])
    assert ngram.propose(list(rows), 2).tokens == [[7, 5]]
    rows.retire([0])
    rows.admit([Joined(0, [1, 5, 6])])
    assert ngram.propose(list(rows), 2).tokens == [[]]


# What followed earlier, beside a model


def test_a_model_is_completed_where_the_text_repeats_itself(folder: Path) -> None:
    """Nodes of both: what the model alone drafts stays its own, and what follows is the text's."""
    row, shape = admitted([[7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7]])[0], Shape(K, 2 * K, 2)
    drafter = drafting(folder, "shared")
    both = Combined(drafter, Suffix(shape, V), shape, completes=True)
    both.suffix.chances.restore([[90.0] * N_BINS, [100.0] * N_BINS])
    found = check(Known(both), [row], 2 * K)[0]
    assert found[:K] == [8, 9, 10, 11]
    assert drafter._in_flight[0].count(NO_TREE) >= K - 1
    assert len(found) == len(drafter._in_flight[0])
    alone = check(model(folder, "shared"), [row], K)[0]
    assert alone[0] in found


# Chance and script


def test_random_tokens_are_any_tokens_and_come_back_with_their_seed() -> None:
    rows = admitted([[1]] * 50)
    first, second = (RandomTokens(7, seed).propose(rows, 4).tokens for seed in (1, 2))
    assert {token for tokens in first for token in tokens} == set(range(7))
    assert first != second
    assert first == RandomTokens(7, 1).propose(rows, 4).tokens


def test_a_script_sees_the_text_and_how_much_is_wanted() -> None:
    asked: list[tuple[list[int], int]] = []

    def script(text: Sequence[int], lookahead: int) -> Sequence[int]:
        asked.append((list(text), lookahead))
        return range(100)

    assert Scripted(script).propose(admitted([[3], [4, 5]]), 2).tokens == [[0, 1], [0, 1]]
    assert asked == [([3], 2), ([4, 5], 2)]

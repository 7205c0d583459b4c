"""The draft's books: texts grow by what was accepted and put, and by nothing else."""

from collections.abc import Sequence

import pytest
import torch

from saguaro.config import SamplingParams
from saguaro.draft.rows import DraftRows, stack_q
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, SOURCES, Joined, Outcome, Speculation


def outcome(*rows: tuple[int, int, int]) -> Outcome:
    """(slot, number accepted, bonus) of each row."""
    slots, k, bonus = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))
    return Outcome(slots, k, k, bonus)


@pytest.fixture
def rows() -> DraftRows:
    """Texts at slots 4, 0 and 2."""
    rows = DraftRows()
    rows.admit([Joined(4, [1, 2, 3]), Joined(0, [7]), Joined(2, [5, 6])])
    return rows


def texts(rows: DraftRows) -> dict[int, list[int]]:
    return {row.slot: row.text for row in rows}


def put(rows: DraftRows, slot: int, tokens: Sequence[int], source: int, q: torch.Tensor | None = None) -> None:
    row = rows.get(slot)
    assert row is not None
    row.propose(tokens, source, q)


def test_a_row_is_decoded_as_its_request_is() -> None:
    params, tokens = SamplingParams(temperature=0.3), [1, 2, 3, 4]
    (row,) = DraftRows().admit([Joined(3, tokens, n_prompt=2, seed=11, params=params)])
    request = row.request
    assert (row.slot, request.prompt, request.output, request.seed) == (3, [1, 2], [3, 4], 11)
    assert request.params is params
    row.text.append(5)
    assert tokens == [1, 2, 3, 4], "the target's own list must not grow"
    assert (row.speculation, row.source, row.is_hit) == ([], EMPTY, False)


def test_rows_come_and_go(rows: DraftRows) -> None:
    rows.retire([0, 9])
    assert texts(rows) == {4: [1, 2, 3], 2: [5, 6]}
    assert rows.get(0) is None
    admitted = rows.admit([Joined(0, [8, 8])])
    assert [row.slot for row in admitted] == [0]
    assert texts(rows)[0] == [8, 8]
    with pytest.raises(AssertionError, match="slot 2 was admitted twice"):
        rows.admit([Joined(2, [1])])


def test_an_outcome_is_written_into_the_texts(rows: DraftRows) -> None:
    put(rows, 4, [10, 11, 12], DRAFT, torch.ones(3, 5))
    put(rows, 0, [20, 21], CACHE)
    put(rows, 2, [30], NGRAM)
    rows.commit(outcome((0, 2, 99), (4, 1, 88), (7, 3, 77)))  # 7 is nobody; of 2 nothing was decided
    assert texts(rows) == {4: [1, 2, 3, 10, 88], 0: [7, 20, 21, 99], 2: [5, 6]}
    assert [(row.speculation, row.source, row.q) for row in rows] == [([], EMPTY, None)] * 3
    rows.commit(outcome((2, 0, 66)))
    assert texts(rows)[2] == [5, 6, 66]
    before = {slot: list(text) for slot, text in texts(rows).items()}
    rows.commit(Outcome.nothing())
    assert texts(rows) == before


def test_what_is_in_flight_comes_in_the_order_asked_for(rows: DraftRows) -> None:
    put(rows, 4, [10, 11, 12], DRAFT)
    put(rows, 0, [20], CACHE)
    put(rows, 2, [], NGRAM)
    spec = rows.in_flight([2, 9, 0, 4], lookahead=3, n_vocab=50)
    assert spec.tokens.tolist() == [[0, 0, 0], [0, 0, 0], [20, 0, 0], [10, 11, 12]]
    assert spec.length.tolist() == [0, 0, 1, 3]
    assert [SOURCES[source] for source in spec.source] == ["empty", "empty", "cache", "draft"]
    assert spec.hit.tolist() == [False, False, True, False]
    assert spec.q is None
    assert rows.in_flight([], lookahead=3, n_vocab=50).tokens.shape == (0, 0)


def test_rows_that_were_drawn_and_rows_that_were_not(rows: DraftRows) -> None:
    q = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.3, 0.3, 0.4]])
    put(rows, 4, [2, 0], DRAFT, q)  # one of three tokens was cut off
    put(rows, 0, [1], NGRAM)
    spec = rows.in_flight([0, 9, 4], lookahead=3, n_vocab=3)
    assert spec.q is not None
    assert torch.equal(spec.q[2], q)
    assert not spec.q[:2].any()
    put(rows, 4, [2, 0], DRAFT)
    assert rows.in_flight([0, 4], lookahead=3, n_vocab=3).q is None


def test_q_of_trees_has_a_line_for_each_family() -> None:
    """A chain of three and a tree of three siblings, which were drawn from one distribution; one that was not drawn."""
    spec = Speculation.of([[1, 2, 0], [2, 1, 0], [0, 0]], 3, [DRAFT] * 3, [[-1, 0, 1], [-1, -1, -1], None])
    chain, tree = torch.full((3, 3), 1 / 3, dtype=torch.float64), torch.full((1, 3), 0.2, dtype=torch.float64)
    q = stack_q(spec, [chain, tree, None], 3)
    assert q.shape == (3, 3, 3)
    assert q.dtype == torch.float64
    assert torch.equal(q[0], chain)
    assert torch.equal(q[1, :1], tree)
    assert not q[1, 1:].any()
    assert not q[2].any()
    assert stack_q(spec, [tree, tree, tree], 3).shape == (3, 1, 3)
    assert stack_q(spec, [tree, tree, None], 3).shape == (3, 2, 3), "each token of a chain is a family"

"""A tree in the format of return_speculation: every node with its text after its parent, and the path that stood."""

from pathlib import Path

from saguaro.engine.results import Delta
from saguaro.model.tiny import write_tiny
from saguaro.model.tokenizer import load_tokenizer
from saguaro.serve.front import Piece
from saguaro.serve.http.speculation import Narrator
from saguaro.types import RoundEvent, RowEvent


def test_nodes_are_told_with_parent_and_fate(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny(tmp_path, "llama"), 300)
    a, b, c, e_acute = ord("a"), ord("b"), ord("c"), tuple("é".encode())  # ids are bytes
    row = RowEvent("r", 5, 3, "draft", 4, 8, (a, e_acute[0], b, e_acute[1], c), True, (-1, -1, 0, 1, 3), (1, 3, 4))
    moments = ((0.0, 1.0), (1.0, 2.0), (2.0, 2.0), (2.0, 3.0))
    delta = Delta("r", 0, "éca", [*e_acute, c, a], [], n_accepted=3, source="draft")
    narrator = Narrator(tokenizer, [ord("x")], arrived=0.0)
    (told,) = narrator.tell(Piece(0, delta, (RoundEvent(1, 6, (row,), *moments, draft=None), row)))
    assert [one["parent"] for one in told["drafted"]] == [-1, -1, 0, 1, 3]
    assert [one["accepted"] for one in told["drafted"]] == [False, True, False, True, True]
    assert [one["text"] for one in told["drafted"]] == ["a", "", "b", "é", "c"]
    assert [one["text"] for one in told["tokens"]] == ["", "é", "c", "a"]
    assert told["accepted"] == 3

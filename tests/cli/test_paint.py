"""Colours of trees: the accepted path in the colour of its speculation, the bonus in none, and all of the text."""

from pathlib import Path

import pytest

from saguaro import SamplingParams
from saguaro.cli.paint import HIT, MISS, OWN, RESET, STYLES, Painter, origins_of
from saguaro.model.tiny import write_tiny
from saguaro.types import RoundEvent, RowEvent
from tests.serve.http.driver import tiny_llm


def told(row: RowEvent) -> list[tuple[int, str]]:
    """The accepted tokens of a round with their origin, by its event."""
    path = row.path if row.parents else range(row.k)
    return [(row.drafted[node], HIT if row.source == "cache" else MISS) for node in path][: row.n_tokens]


@pytest.mark.parametrize(
    ("settings", "origins"),
    [
        ({"method": "sd"}, {MISS, OWN}),
        ({"method": "ssd", "prepare": "always", "fallback": "draft"}, {HIT, MISS, OWN}),
    ],
)
def test_an_output_of_trees(tmp_path: Path, settings: dict[str, str], origins: set[str]) -> None:
    events: list[RoundEvent] = []
    llm = tiny_llm(write_tiny(tmp_path, "llama", num_hidden_layers=4), nodes=8, width=2, **settings)
    llm.engine.round.observers.append(events.append)
    prompt = llm.engine.tokenizer.encode("the end")
    painter, shown, text = Painter(llm.engine.tokenizer, prompt), "", ""
    deltas = list(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
    llm.close()
    for delta in deltas:
        shown += painter.paint(delta)
        text += delta.text
    rows = [row for event in events for row in event.rows]
    assert any(row.path and row.path != tuple(range(row.k)) for row in rows), "a path that is not the first nodes"
    made = [delta for delta in deltas if delta.token_ids]
    for row, delta in zip(rows, made, strict=True):
        painted = list(zip(delta.token_ids, origins_of(delta), strict=True))
        accepted = told(row)
        assert painted[: len(accepted)] == accepted
        assert [origin for _, origin in painted[len(accepted) :]] in ([], [OWN])
    assert {origin for origin, n in painter.n_tokens.items() if n} == origins
    for style in filter(None, (*STYLES.values(), RESET)):
        shown = shown.replace(style, "")
    assert shown == text

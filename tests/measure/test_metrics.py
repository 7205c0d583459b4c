"""Figures of rounds, worked out by hand; the files of rounds; where tokens are said to come from."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro.cli.paint import Painter
from saguaro.engine.results import Delta
from saguaro.errors import ConfigError
from saguaro.measure import metrics
from saguaro.measure.metrics import NumberedRates, Recorder, Summary
from saguaro.measure.trace import Trace
from saguaro.model.tiny import tiny_tokenizer
from saguaro.model.tokenizer import TextStream, Tokenizer
from saguaro.types import SOURCES, DraftTimes, Interval, RoundEvent, RowEvent


def event(number: int, rows: Sequence[RowEvent], at: Sequence[float], draft: DraftTimes | None = None) -> RoundEvent:
    """A round whose five instants are given."""
    parts: list[Interval] = list(itertools.pairwise(at))
    speculate, launch, overlap, collect = parts
    return RoundEvent(number, 9, tuple(rows), speculate, launch, overlap, collect, draft)


# Two requests. Seconds, drawn for round 2 and what came before it:
#
#   target   |s:0-1|launch:1-5|o|collect:5-6|   |s:7-8|launch:8-12|o:12-13|collect:13-14|
#   draft          |prepare:2 ----------- 6.5|   |7-8: respond|
ROUNDS = [
    event(1, [RowEvent("a", 0, 0, "empty", 1, 3), RowEvent("b", 0, 0, "empty", 1, 3)], [0, 1, 5, 5, 6]),
    event(
        2,
        [RowEvent("a", 3, 3, "cache", 4, 3), RowEvent("b", 3, 1, "draft", 2, 3)],
        [7, 8, 12, 13, 14],
        DraftTimes(respond=(7, 8), prepare=(2, 6.5)),
    ),
    event(
        3,
        [RowEvent("a", 2, 0, "draft", 1, 3), RowEvent("b", 3, 2, "cache", 3, 3)],
        [14, 16, 18, 18, 18],
        DraftTimes(respond=(15, 16), prepare=(9, 15)),
    ),
    event(4, [RowEvent("a", 3, 3, "cache", 2, 3)], [20, 20, 24, 24, 24], DraftTimes(respond=(20, 20), prepare=(9, 15))),
    event(5, [RowEvent("c", 0, 0, "empty", 1, 3)], [50, 50, 54, 54, 54]),
]


@pytest.fixture
def summary() -> Summary:
    """Of these rounds."""
    found = Summary()
    for one in ROUNDS:
        found.add(one)
    return found


def test_tokens_and_acceptance(summary: Summary) -> None:
    facts = summary.as_dict()
    assert (facts["rounds"], facts["row_rounds"], facts["tokens"]) == (5, 8, 15)
    assert facts["tokens_per_round"] == 15 / 8
    assert (facts["accepted"], facts["speculated"], facts["acceptance"]) == (9, 14, 9 / 14)
    # Position 0: a3 yes, b1 yes, a0 no, b2 yes, a3 yes. Position 1: yes, no, yes, yes. Position 2: yes, no, yes.
    assert facts["acceptance_by_position"] == [4 / 5, 3 / 4, 2 / 3]


def test_hits(summary: Summary) -> None:
    facts = summary.as_dict()
    # In question: a2 hit, b2 miss, a3 miss, b3 hit, a4 hit; not the first rounds of a, b and c.
    assert facts["hit_rate"] == 3 / 5
    assert facts["hit_rate_after_primary"] == 0 / 1  # a3, after the hit a2
    assert facts["hit_rate_after_backup"] == 3 / 4  # a2, b2, b3, a4
    assert facts["hit_rate_by_k"] == {"0": 2 / 3, "1": 1.0, "3": 0.0}  # a2 b2 a4 | b3 | a3
    assert facts["sources"] == {"empty": 3 / 8, "cache": 3 / 8, "draft": 2 / 8}


def test_a_round_that_nothing_was_prepared_for_misses_nothing(summary: Summary) -> None:
    before = summary.as_dict()
    assert before["prepared"] == 1.0
    times = DraftTimes(respond=(60, 60), prepare=(55, 55), is_prepared=False)
    summary.add(event(6, [RowEvent("c", 3, 3, "draft", 4, 3)], [60, 60, 64, 64, 64], times))
    facts = summary.as_dict()
    assert facts["prepared"] == 3 / 4
    for name in ("hit_rate", "hit_rate_after_primary", "hit_rate_after_backup", "hit_rate_by_k"):
        assert facts[name] == before[name]
    assert "prepared 0.75 of the rounds; hit rate 0.60" in str(summary)


def test_a_round_in_which_the_draft_was_not_asked_misses_nothing(summary: Summary) -> None:
    before = summary.as_dict()
    assert before["asked"] == 1.0
    plain = event(6, [RowEvent("c", 0, 0, "empty", 1, 3)], [60, 60, 64, 64, 64])
    summary.add(replace(plain, is_asked=False))
    facts = summary.as_dict()
    assert facts["asked"] == 5 / 6
    for name in ("prepared", "hit_rate", "hit_rate_after_primary", "hit_rate_after_backup", "hit_rate_by_k"):
        assert facts[name] == before[name]
    assert "asked the draft in 0.83 of the rounds; prepared 1.00 of the rounds that asked; hit rate" in str(summary)


def test_hidden_time(summary: Summary) -> None:
    # prepare 2-6.5: hidden 2-5 and 5-6. respond 7-8: waited for. prepare 9-15: hidden 9-12 and 13-14. respond 15-16:
    # waited for. Told again in round 4: not counted again.
    assert summary.hidden_s == pytest.approx(4 + 4)
    assert summary.busy_s == pytest.approx(4.5 + 1 + 6 + 1)
    assert summary.hidden_share == pytest.approx(8 / 12.5)
    assert summary.as_dict()["draft_ms"] == pytest.approx({"hidden": 8e3 / 5, "exposed": 4.5e3 / 5})


def test_where_a_round_goes(summary: Summary) -> None:
    # Between rounds: 6-7, 14-14, 18-20; from round 4 to 5 nobody waited.
    split = summary.as_dict()["round_ms"]
    assert split == pytest.approx({"wait": 4e3 / 5, "verify": 20e3 / 5, "overlap": 1e3 / 5, "rest": 3e3 / 5})


def test_the_terminal_shows_the_same(summary: Summary) -> None:
    text = str(summary)
    for words in ("5 rounds, 15 tokens, 1.88 per round", "acceptance 0.64", "hit rate 0.60", "0.64 of it hidden"):
        assert words in text
    json.dumps(summary.as_dict(), allow_nan=False)


def test_where_nothing_is_drafted_nothing_is_claimed() -> None:
    plain = Summary()
    assert plain.as_dict()["tokens_per_round"] is None
    assert str(plain)
    for number in range(3):
        plain.add(
            event(number, [RowEvent("a", 0, 0, "empty", 1, 3)], [number, number, number + 1, number + 1, number + 1])
        )
    facts = plain.as_dict()
    assert (facts["tokens_per_round"], facts["sources"]) == (1.0, {"empty": 1.0})
    assert [facts[name] for name in ("acceptance", "hit_rate", "hidden_share")] == [None, None, None]
    assert "hit rate" not in str(plain)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_REQUESTS", 3)
    summary = Summary()
    for number in range(50):
        summary.add(
            event(number, [RowEvent("old", 1, 1, "cache", 2, 3), RowEvent(f"{number}", 1, 1, "cache", 2, 3)], [0] * 5)
        )
    assert summary.hits.of == 49  # all rounds of "old" but its first
    assert len(summary._before) == 3


@st.composite
def events(draw: st.DrawFn) -> list[RoundEvent]:
    """Rounds one after the other, of a draft that works alone and one thing after the other."""
    clock, free_from, made = 0.0, 0.0, []
    step = st.floats(0, 5)
    for number in range(draw(st.integers(1, 6))):
        at = [clock + draw(step)]
        for _ in range(4):
            at.append(at[-1] + draw(step))
        rows = []
        for name in draw(st.sets(st.sampled_from("abcd"), max_size=3)):
            length = draw(st.integers(0, 4))
            k = draw(st.integers(0, length))
            source = draw(st.sampled_from(SOURCES[1:])) if length else "empty"
            rows.append(RowEvent(name, length, k, source, draw(st.integers(1, k + 1)), draw(st.integers(length, 5))))
        draft = None
        if draw(st.booleans()):
            edges = [free_from + draw(step)]
            for _ in range(3):
                edges.append(edges[-1] + draw(step))
            draft, free_from = DraftTimes(respond=(edges[2], edges[3]), prepare=(edges[0], edges[1])), edges[3]
        made.append(event(number, rows, at, draft))
        clock = at[-1]
    return made


@given(events())
def test_invariants(rounds: list[RoundEvent]) -> None:
    summary = Summary()
    for one in rounds:
        summary.add(one)
    facts = summary.as_dict()
    worked = sum(b - a for one in rounds if one.draft for a, b in (one.draft.prepare, one.draft.respond))
    assert summary.hidden_s + summary.exposed_s == pytest.approx(worked)
    assert 0 <= summary.hidden_s <= summary.busy_s + 1e-9
    if any(one.rows for one in rounds):
        assert sum(facts["sources"].values()) == pytest.approx(1)
        assert facts["tokens_per_round"] >= 1
    rates = [facts["acceptance"], facts["hit_rate"], *facts["acceptance_by_position"], *facts["hit_rate_by_k"].values()]
    assert all(rate is None or 0 <= rate <= 1 for rate in rates)
    assert summary.hits_after_primary.of + summary.hits_after_backup.of == summary.hits.of
    assert sum(rate.of for rate in summary.hits_by_k.values()) == summary.hits.of
    assert all(
        later.of <= earlier.n for earlier, later in zip(summary.by_position, summary.by_position[1:], strict=False)
    )
    for nodes in (counted(summary.by_depth).values(), counted(summary.by_rank).values()):
        assert sum(n for n, _ in nodes) == facts["accepted"]
        assert sum(of for _, of in nodes) == facts["speculated"]
    whole = rounds[-1].collect[1] - rounds[0].speculate[0]
    assert sum(facts["round_ms"].values()) * len(rounds) <= whole * 1e3 + 1e-6


def test_positions_of_a_tree_are_its_levels() -> None:
    """Five nodes on three levels, of which two were accepted."""
    summary = Summary()
    row = RowEvent("a", 5, 2, "draft", 3, 8, (1, 2, 3, 4, 5), True, (-1, -1, 0, 1, 2), (0, 2))
    summary.add(event(1, [row], [0, 1, 5, 5, 6]))
    assert [(rate.n, rate.of) for rate in summary.by_position] == [(1, 1), (1, 1), (0, 1)]


# Seven nodes on four levels, of which 1, 3 and 6 were accepted; then the bonus. With depth and rank:
#
#   root ── 0       1 1
#      └─── 1 ── 2  1 2, 2 1
#           └─── 3 ── 4       2 2, 3 1
#                └─── 5       3 2
#                └─── 6       3 3
BUSHY = RowEvent("a", 7, 3, "draft", 4, 8, (5, 6, 7, 8, 9, 10, 11), True, (-1, -1, 1, 1, 3, 3, 3), (1, 3, 6))


def counted(rates: NumberedRates) -> dict[str, tuple[int, int]]:
    """Accepted and verified nodes."""
    return {name: (rate.n, rate.of) for name, rate in rates.named().items()}


def test_nodes_by_depth_and_rank() -> None:
    summary = Summary()
    summary.add(event(1, [BUSHY], [0, 1, 5, 5, 6]))
    assert counted(summary.by_depth) == {"1": (1, 2), "2": (1, 2), "3": (1, 3)}
    assert counted(summary.by_rank) == {"1": (0, 3), "2": (2, 3), "3": (1, 1)}
    assert summary.nodes_per_token == 7 / 4
    # A second round, of which nothing is accepted: the same nodes, and one token.
    summary.add(event(2, [replace(BUSHY, k=0, n_tokens=1, path=())], [6, 7, 8, 8, 9]))
    assert counted(summary.by_depth) == {"1": (1, 4), "2": (1, 4), "3": (1, 6)}
    assert counted(summary.by_rank) == {"1": (0, 6), "2": (2, 6), "3": (1, 2)}
    facts = summary.as_dict()
    assert facts["nodes_per_token"] == 14 / 5
    assert facts["nodes_by_depth"]["3"] == {"verified": 6, "accepted": 1}
    assert facts["nodes_by_rank"]["2"] == {"verified": 6, "accepted": 2}


def test_a_chain_is_a_tree_with_one_child_each(summary: Summary) -> None:
    # Depth 1: a3 b1 a0 b2 a3. Every node is the first and only child.
    assert counted(summary.by_depth) == {"1": (4, 5), "2": (3, 5), "3": (2, 4)}
    assert counted(summary.by_rank) == {"1": (9, 14)}
    assert summary.nodes_per_token == 14 / 15
    assert "0.93 nodes verified per token" in str(summary)
    assert "accepted by depth 0.80 0.60 0.50, by rank among siblings 0.64\n" in str(summary)
    spelled = Summary()
    for one in ROUNDS:
        rows = [
            replace(row, parents=tuple(range(-1, row.length - 1)), path=tuple(range(row.k))) if row.length else row
            for row in one.rows
        ]
        spelled.add(replace(one, rows=tuple(rows)))
    assert spelled.as_dict() == summary.as_dict(), "the parents of a chain may be told or not"


def test_what_is_deep_or_late_is_counted_together() -> None:
    summary = Summary()
    deep, wide = 70, 12
    summary.add(event(1, [RowEvent("a", deep, deep, "ngram", deep + 1, deep)], [0] * 5))
    bush = RowEvent("b", wide, 1, "draft", 2, wide, tuple(range(wide)), True, (-1,) * wide, (11,))
    summary.add(event(2, [bush], [0] * 5))
    depths, ranks = counted(summary.by_depth), counted(summary.by_rank)
    assert list(depths) == [*map(str, range(1, 65)), "more"]
    assert list(ranks) == [*map(str, range(1, 9)), "more"]
    assert (depths["1"], depths["64"], depths["more"]) == ((2, 1 + wide), (1, 1), (6, 6))
    assert (ranks["1"], ranks["8"], ranks["more"]) == ((70, 71), (0, 1), (1, 4))


def test_without_speculation_there_are_no_nodes() -> None:
    summary = Summary()
    summary.add(ROUNDS[0])
    facts = summary.as_dict()
    assert (facts["nodes_per_token"], facts["nodes_by_depth"], facts["nodes_by_rank"]) == (None, {}, {})


def test_a_record_holds_every_round(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with Recorder(path) as recorder:
        for one in ROUNDS:
            recorder(one)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == json.loads(json.dumps([asdict(one) for one in ROUNDS]))
    row = {"request": "a", "length": 3, "k": 3, "source": "cache", "n_tokens": 4, "room": 3}
    assert lines[1]["rows"][0] == {**row, "drafted": [], "prepares": True, "parents": [], "path": []}
    assert (lines[1]["launch"], lines[1]["draft"]["prepare"], lines[0]["draft"]) == ([8, 12], [2, 6.5], None)


@pytest.mark.parametrize("kind", [Recorder, Trace])
def test_a_file_that_cannot_be_written_is_an_error(kind: type[Recorder] | type[Trace], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/rounds.*No such file or directory; give a file"):
        kind(tmp_path / "no" / "rounds.jsonl")


def test_a_full_disk_does_not_break_rounds_and_is_reported() -> None:
    recorder = Recorder(Path("/dev/full"))
    for _ in range(200):
        for one in ROUNDS:
            recorder(one)
    with pytest.raises(ConfigError, match="No space left"):
        recorder.close()


def test_a_trace_shows_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for one in ROUNDS:
            trace(one)
    slices = [entry for entry in json.loads(path.read_text())["traceEvents"] if entry["ph"] == "X"]
    target = [entry for entry in slices if entry["tid"] == 1]
    assert [entry["name"] for entry in target[5:10]] == ["round 2", "speculate", "launch", "overlap", "collect"]
    assert target[5]["args"]["k"] == [3, 1]
    assert target[5]["args"]["sources"] == ["cache", "draft"]
    assert target[5]["args"]["hits"] == 1
    for at in range(0, len(target), 5):
        whole, *parts = target[at : at + 5]
        assert whole["ts"] == parts[0]["ts"]
        assert end(whole) == pytest.approx(end(parts[-1]))
        for one, other in itertools.pairwise(parts):
            assert end(one) == pytest.approx(other["ts"])
    draft = [entry for entry in slices if entry["tid"] == 2]
    assert [entry["name"] for entry in draft] == ["prepare", "respond", "prepare", "respond", "respond"]
    assert (draft[0]["ts"], draft[0]["dur"]) == (2e6, 4.5e6)
    assert all(end(one) <= other["ts"] for one, other in itertools.pairwise(draft))


def test_a_trace_of_nothing_is_whole(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json"):
        pass
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 4


def end(entry: dict[str, Any]) -> float:
    """Where a slice ends."""
    return float(entry["ts"] + entry["dur"])


GREEN, YELLOW, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def test_tokens_are_coloured_by_origin() -> None:
    painter = Painter(Tokenizer(tiny_tokenizer(), "tiny"), [65])
    first = Delta("a", 0, "abc", [97, 98, 99], [], source="cache", n_accepted=2)
    assert painter.paint(first) == f"{GREEN}a{RESET}{GREEN}b{RESET}c"
    # Two bytes of one character in two deltas: the character belongs to the token that completed it.
    assert painter.paint(Delta("a", 0, "d", [100, 0xC3], [], source="draft", n_accepted=1)) == f"{YELLOW}d{RESET}"
    assert painter.paint(Delta("a", 0, "é", [0xA9], [], source="ngram", n_accepted=1)) == f"{YELLOW}é{RESET}"
    # What is held back for a stop string comes later; half a character at the end is coloured with its delta.
    assert painter.paint(Delta("a", 0, "", [101, 102], [], source="cache", n_accepted=1)) == ""
    assert painter.paint(Delta("a", 0, "efg", [103], [], source="empty", n_accepted=0)) == f"{GREEN}e{RESET}fg"
    last = Delta("a", 0, "h\ufffd", [104, 0xC3], [], "length", source="cache", n_accepted=2)
    assert painter.paint(last) == f"{GREEN}h\ufffd{RESET}"
    assert "5 prepared" in painter.legend()


@given(st.text(max_size=30), st.data())
def test_colours_change_nothing_but_colours(text: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), "tiny")
    tokens = tokenizer.encode(text)
    stream, painter, shown, at = TextStream(tokenizer), Painter(tokenizer, []), "", 0
    while at < len(tokens):
        new = tokens[at : at + data.draw(st.integers(1, 4))]
        at += len(new)
        piece = "".join(map(stream.push, new)) + (stream.finish() if at >= len(tokens) else "")
        n_accepted = data.draw(st.integers(0, len(new)))
        shown += painter.paint(Delta("a", 0, piece, new, [], source="cache", n_accepted=n_accepted))
    assert shown.replace(GREEN, "").replace(RESET, "") == text.replace(GREEN, "").replace(RESET, "")


def test_a_round_after_the_last_is_a_first_again() -> None:
    """A request's end is seen where its tokens were cut, so that another of the same name begins anew."""
    summary = Summary()
    summary.add(event(1, [RowEvent("a", 3, 3, "cache", 2, 3)], [0] * 5))
    summary.add(replace(ROUNDS[0], rows=(RowEvent("a", 0, 0, "empty", 1, 3),)))
    assert summary.hits.of == 0

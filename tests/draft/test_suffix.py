"""What followed earlier: the automaton against a search through the text, its chances, the store, and the nodes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.config import SamplingParams
from saguaro.draft.automaton import COUNTED, NO_STATE, SuffixAutomaton
from saguaro.draft.best_first import NOT_DRAFTED, Nodes, Source, best_nodes
from saguaro.draft.growth import Shape
from saguaro.draft.match_chance import N_BINS, MatchChances
from saguaro.draft.rows import DraftRow, DraftRows
from saguaro.draft.suffix import AHEAD, END, Store, Suffix
from saguaro.types import Joined

V = 50
CHAIN, TREE = Shape(4, 4, 1), Shape(4, 8, 2)
quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
texts = st.lists(st.integers(0, 3), max_size=COUNTED - 2)


def of(text: Sequence[int]) -> SuffixAutomaton:
    found = SuffixAutomaton()
    for token in text:
        found.append(token)
    return found


def repeated(text: Sequence[int]) -> int:
    """How long the longest run at the end is that occurred before."""
    ends = {tuple(text[at - n : at]) for at in range(len(text)) for n in range(1, at + 1)}
    return max((n for n in range(1, len(text)) if tuple(text[-n:]) in ends), default=0)


def followed(text: Sequence[int], run: Sequence[int]) -> Counter[int]:
    """What followed a run, and how often."""
    n = len(run)
    return Counter(text[at + n] for at in range(len(text) - n) if list(text[at : at + n]) == list(run))


@quick
@given(texts)
def test_the_longest_run_that_occurred_before_and_what_followed(text: list[int]) -> None:
    automaton = of(text)
    assert len(automaton) == len(text)
    assert len(automaton.length) <= max(2, 2 * len(text))
    state = automaton.repeated
    assert automaton.length[state] == repeated(text)
    while automaton.length[state] > 0:  # and every shorter run that ends elsewhere too
        run = text[len(text) - automaton.length[state] :]
        expected = followed(text, run)
        assert {token: count for token, count, _ in automaton.followers(state)} == expected
        assert automaton.n_followers(state) == len(expected)
        state = automaton.link[state]


@quick
@given(texts, texts)
def test_every_run_is_found_and_no_other(text: list[int], run: list[int]) -> None:
    automaton, state = of(text), 0
    for token in run:
        state = automaton.step(state, token) if state != NO_STATE else state
    occurs = not run or any(text[at : at + len(run)] == run for at in range(len(text)))
    assert (state != NO_STATE) == occurs


@quick
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=25))
def test_another_text_is_followed_while_this_one_grows(pairs: list[tuple[int, int]]) -> None:
    """The longest run at the other text's end that occurs here. What it missed before this one grew is not caught up
    with, so a run that occurs is at most as long as the longest one."""
    automaton, state, length, other, own = SuffixAutomaton(), 0, 0, list[int](), list[int]()
    for here, there in pairs:
        other.append(there)
        state, length = automaton.follow(state, length, there)
        runs = {tuple(own[at : at + n]) for at in range(len(own)) for n in range(1, len(own) - at + 1)}
        longest = max((n for n in range(1, len(other) + 1) if tuple(other[-n:]) in runs), default=0)
        assert length <= longest
        assert length == 0 or tuple(other[-length:]) in runs
        if length:
            expected = followed(own, other[-length:])
            assert {token: count for token, count, _ in automaton.followers(state)} == expected
        own.append(here)
        automaton.append(here)


def test_a_text_that_was_complete_is_followed_exactly() -> None:
    automaton, state, length = of([1, 2, 3, 4, 1, 2, 5]), 0, 0
    found = []
    for token in (9, 2, 3, 4, 1, 2, 5, 1):
        state, length = automaton.follow(state, length, token)
        found.append(length)
    assert found == [0, 1, 2, 3, 4, 5, 6, 1]


def test_a_periodic_text_takes_no_longer() -> None:
    """Counts of its longest runs grow, not of all."""
    automaton = of([7] * 2000)
    assert sum(automaton.count) <= COUNTED * 2000
    assert automaton.length[automaton.repeated] == 1999


# Nodes


@quick
@given(st.data(), st.integers(0, 7), st.integers(1, 4), st.booleans())
def test_nodes_are_connected_and_the_likeliest(data: st.DataObject, most: int, depth: int, is_chain: bool) -> None:
    """Of a source and a drafted tree: by comparison with all paths of both."""
    chance = st.sampled_from([0.1, 0.25, 0.4, 0.55])
    tables = data.draw(st.dictionaries(st.integers(0, 2), st.dictionaries(st.integers(0, 2), chance), max_size=3))
    source = Source[int](lambda at: list(tables.get(at, {}).items()), lambda _, token: token)
    drafted = Nodes([1, 2, 0], [-1, 0, -1], [0.5, 0.3, 0.2]) if data.draw(st.booleans()) else None
    found = best_nodes(source, 0, most, depth, is_chain=is_chain, drafted=drafted)
    every = sorted((c for _, c in _paths(tables, drafted, depth)), reverse=True)
    assert all(parent < at for at, parent in enumerate(found.parents))
    assert len(set(zip(found.parents, found.tokens, strict=True))) == len(found.tokens)
    if is_chain:
        assert found.parents == list(range(-1, len(found.tokens) - 1))
        assert len(found.tokens) <= min(most, depth)
    else:
        assert found.chances == pytest.approx(every[:most])
    for at, node in enumerate(found.drafted):
        assert node == NOT_DRAFTED or (drafted is not None and drafted.tokens[node] == found.tokens[at])


def _paths(
    tables: dict[int, dict[int, float]], drafted: Nodes | None, depth: int
) -> list[tuple[tuple[int, ...], float]]:
    """Every path of both, with its probability."""
    own: dict[tuple[int, ...], float] = {(): 1.0}
    for at, token in enumerate(drafted.tokens if drafted is not None else ()):
        assert drafted is not None
        path: tuple[int, ...] = (token,) if drafted.parents[at] < 0 else (drafted.tokens[drafted.parents[at]], token)
        own[path] = drafted.chances[at]
    found: list[tuple[tuple[int, ...], float]] = []
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        before, chance = todo.pop()
        if len(before) == depth:
            continue
        for token in range(3):
            known = tables.get(before[-1] if before else 0, {}).get(token, 0.0)
            model = own[(*before, token)] / own[before] if (*before, token) in own else 0.0
            if max(known, model) > 0:
                found.append(((*before, token), chance * max(known, model)))
                todo.append(found[-1])
    return found


# Chances


def test_rates_follow_what_happens_and_come_back_from_a_file() -> None:
    chances = MatchChances()
    for _ in range(300):
        chances.learn(5, is_hit=True)
        chances.learn(6, is_hit=False)
    assert chances.rate(5) > 0.95
    assert chances.rate(6) < 0.05
    other = MatchChances()
    other.restore(chances.state())
    assert [other.rate(at) for at in range(N_BINS)] == pytest.approx([chances.rate(at) for at in range(N_BINS)])


@pytest.mark.parametrize("damage", [[[1.0], [1.0]], [[2.0] * N_BINS, [1.0] * N_BINS], [[0.0] * N_BINS], None])
def test_damaged_rates_are_refused(damage: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        MatchChances().restore(damage)


def test_long_runs_are_assumed_to_go_on_sooner_than_short_ones() -> None:
    chances = MatchChances()
    rates = [chances.rate(chances.first_bin(n, 1, 0, is_greedy=True) + 4) for n in (1, 3, 9, 50)]
    assert rates == sorted(rates)
    assert rates[0] < 0.4
    assert rates[-1] > 0.8


# Rows and the store


def admitted(suffix: Suffix, *joined: Sequence[int], n_prompt: int = 1, slot: int = 0) -> list[DraftRow]:
    rows = DraftRows().admit([Joined(slot + at, text, n_prompt) for at, text in enumerate(joined)])
    suffix.admit(rows)
    return rows


@quick
@given(texts, st.integers(0, 5))
def test_a_chain_follows_the_longest_run(text: list[int], room: int) -> None:
    suffix = Suffix(CHAIN, V)
    (tokens,) = suffix.propose(admitted(suffix, text or [1]), room).tokens
    assert len(tokens) <= min(room, 4)
    assert bool(tokens) == (room > 0 and repeated(text or [1]) > 0)
    if tokens:
        assert tokens[0] in followed(text, text[len(text) - repeated(text) :]) or repeated(text) < 3


def test_a_text_that_grows_is_what_would_be_read_at_once() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    suffix, fresh = Suffix(TREE, V), Suffix(TREE, V)
    (row,) = admitted(suffix, text[:4], n_prompt=4)
    for token in text[4:]:
        suffix.propose([row], 8)
        row.text.append(token)
    found = suffix.propose([row], 8)
    assert found.tokens == fresh.propose(admitted(fresh, text, n_prompt=4), 8).tokens
    assert set(found.tokens[0][:2]) == {4, 5}
    assert suffix.chances.state() == fresh.chances.state()


def test_a_long_text_is_indexed_before_it_is_drafted_for() -> None:
    suffix = Suffix(CHAIN, V)
    (row,) = admitted(suffix, [1, 2, 3] * (AHEAD + 1))
    assert suffix.propose([row], 4).tokens == [[]]
    assert suffix.read([row], lambda: True)
    assert suffix.read([row], lambda: False) == (3 * (AHEAD + 1) > 512 + AHEAD)
    assert not suffix.read([row], lambda: False)
    assert suffix.propose([row], 4).tokens == [[1, 2, 3, 1]]


def test_tokens_that_the_target_cannot_emit_are_not_proposed() -> None:
    suffix = Suffix(CHAIN, V)
    assert suffix.propose(admitted(suffix, [1, 2, V, 1, 2]), 4).tokens == [[]]


def test_a_row_repeats_nothing_of_another() -> None:
    suffix = Suffix(CHAIN, V)
    rows = admitted(suffix, [1, 2, 3, 4], [1, 2, 3])
    assert suffix.propose(rows, 4).tokens == [[], []]
    suffix.retire([0, 1, 7])
    assert suffix.propose(admitted(suffix, [1, 2, 3]), 4).tokens == [[]]


def test_earlier_outputs_are_repeated_if_asked_for_and_prompts_never() -> None:
    suffix = Suffix(CHAIN, V, 1024)
    admitted(suffix, [9, 8, 7, 1, 2, 3, 4, 5], n_prompt=3)
    suffix.retire([0])
    rows = admitted(suffix, [6, 1, 2], [9, 8], [5])
    assert suffix.propose(rows, 4).tokens == [[3, 4, 5], [], []]  # END is no token


@quick
@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=12), st.integers(8, 40))
def test_the_store_is_bounded(outputs: list[list[int]], most: int) -> None:
    """And its latest half is there."""
    store = Store(most)
    for output in outputs:
        store.add(output)
        assert sum(len(part) for part in store.parts) <= most
        assert len(store.parts) <= 2
        kept, state = output[-(most // 2) + 1 :], 0
        for token in (*kept, END):
            state = store.parts[-1].step(state, token)
            assert state != NO_STATE


def test_rows_of_a_store_that_moved_on_are_drafted_for() -> None:
    suffix = Suffix(CHAIN, V, 16)
    (row,) = admitted(suffix, [1, 2])
    for at in range(6):
        others = admitted(suffix, [0, *range(10 + at, 16 + at)], slot=1)
        suffix.propose([row, *others], 4)
        suffix.retire([1])
        row.text.append(10 + at)
    assert suffix.propose([row], 4).tokens[0][:1] == [16]


def test_sampled_and_greedy_rows_are_learnt_apart() -> None:
    suffix = Suffix(CHAIN, V)
    greedy = SamplingParams(temperature=0.0)
    rows = DraftRows().admit([Joined(0, [1, 2] * 20, 4, 0, greedy), Joined(1, [1, 2] * 20, 4)])
    suffix.admit(rows[:1])
    suffix.propose(rows[:1], 4)
    first = suffix.chances.state()
    suffix.admit(rows[1:])
    suffix.propose(rows[1:], 4)
    assert first != suffix.chances.state()
    n = N_BINS // 2
    assert [each[n:] for each in first] == [each[n:] for each in suffix.chances.state()]

"""Where the draft runs: as asked, as tuned, or without taking a core from the target."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.config import EngineConfig
from saguaro.engine.placement import (
    Placed,
    Placement,
    Rates,
    choose_placement,
    fastest,
    possible_placements,
    rates_of,
    state_of,
)
from saguaro.engine.preparation import choose_preparation
from saguaro.link.apart import Apart
from saguaro.link.inline import Inline
from saguaro.method import find_method
from saguaro.model.tiny import write_tiny

INLINE, ONE, TWO = Placement(), Placement("process", 1), Placement("process", 2)
TUNED: Rates = {INLINE: {1: 100.0, 2: 190.0}, ONE: {1: 90.0, 2: 170.0}, TWO: {1: 120.0, 2: 200.0}}


def place(rates: Rates, n_cores: int, method: str = "ssd", **where: str) -> Any:
    """A function of the settings."""
    on = {"draft_on": "cpu", "target_on": "cpu", **where}

    def choose(**settings: Any) -> Placed:
        config = EngineConfig(draft="drop:1", **settings)
        return choose_placement(config, find_method(method), rates, n_cores=n_cores, **on)

    return choose


@pytest.mark.parametrize("n_cores", [2, 3, 4, 16, 128])
def test_untuned_it_takes_no_core_from_the_target(n_cores: int) -> None:
    assert place({}, n_cores)() == Placed(INLINE, "untuned")


def test_alone_on_a_core_there_is_no_other_place() -> None:
    assert place({}, 1)() == Placed(INLINE, "only")
    assert place(TUNED, 5, draft_on="cuda")() == Placed(INLINE, "only"), "a GPU works on two streams"
    assert place(TUNED, 5, "sd")() == Placed(INLINE, "only"), "it does not prepare"


def test_tuned_it_runs_where_it_is_fastest() -> None:
    assert place(TUNED, 5)() == Placed(TWO, "tuned")
    assert place({**TUNED, TWO: {1: 99.0, 2: 190.0}}, 5)() == Placed(INLINE, "tuned")
    assert place(TUNED, 3)() == Placed(INLINE, "tuned"), "two of three cores are too many"
    assert place(TUNED, 8)() == Placed(INLINE, "untuned"), "four were not measured"


def test_what_is_asked_for_is_done() -> None:
    assert place(TUNED, 5)(link="inline") == Placed(INLINE, "asked")
    assert place(TUNED, 5)(link="process") == Placed(TWO, "asked"), "with as many cores as are fastest"
    assert place({}, 5)(link="process") == Placed(ONE, "asked")
    assert place(TUNED, 5)(link="process", draft_threads=3) == Placed(Placement("process", 3), "asked")
    assert place(TUNED, 5)(draft_threads=1) == Placed(INLINE, "tuned"), "the faster of inline and one core"
    assert place({**TUNED, ONE: {1: 200.0, 2: 300.0}}, 5)(draft_threads=1) == Placed(ONE, "tuned")


@pytest.mark.parametrize(("method", "target_on"), [("swiftspec", "cpu"), ("saguaro", "cpu"), ("ssd", "cuda")])
def test_where_preparing_inline_makes_no_sense_a_free_core_is_taken(method: str, target_on: str) -> None:
    assert place({}, 3, method, target_on=target_on)() == Placed(ONE, "untuned")
    assert place({}, 2, method, target_on=target_on)() == Placed(INLINE, "untuned")


def test_small_batches_count_more() -> None:
    allowed = [INLINE, ONE]
    assert fastest({INLINE: {1: 100.0, 16: 400.0}, ONE: {1: 110.0, 16: 300.0}}, allowed) == ONE
    assert fastest({INLINE: {1: 110.0, 16: 300.0}, ONE: {1: 100.0, 16: 400.0}}, allowed) == INLINE
    assert fastest({INLINE: {1: 1.0}, ONE: {2: 1.0}}, allowed) is None, "not comparable"
    assert fastest({}, []) is None


def test_more_cores_are_tried_up_to_half() -> None:
    assert possible_placements(1) == [INLINE]
    assert possible_placements(2) == [INLINE, ONE]
    assert possible_placements(16)[1:] == [Placement("process", n) for n in (1, 2, 4, 8)]
    assert possible_placements(4, 3) == [INLINE]


def test_rates_are_read_back() -> None:
    assert rates_of(json.loads(json.dumps(state_of(TUNED)))) == TUNED


@pytest.mark.parametrize("broken", [{"link": "tcp"}, {"threads": "x"}, {"tok_s": {"1": -1.0}}, {"tok_s": {"0": 1.0}}])
def test_damaged_rates_are_refused(broken: dict[str, Any]) -> None:
    one = {"link": "inline", "threads": 1, "tok_s": {"1": 5.0}}
    with pytest.raises(ValueError, match=r"measured|invalid literal"):
        rates_of({"placements": [{**one, **broken}]})


@pytest.mark.parametrize(
    ("placed", "n_cores", "words"),
    [
        (Placed(INLINE, "untuned"), 4, "has not been measured here: `saguaro tune` measures it"),
        (Placed(INLINE, "tuned"), 4, "is where `saguaro tune` found the draft fastest"),
        (Placed(INLINE, "asked"), 4, "with --link inline"),
        (Placed(INLINE, "only"), 1, "of 1 core the target needs all"),
        (Placed(ONE, "tuned"), 4, "own process (1 core, as `saguaro tune` found fastest)"),
        (Placed(ONE, "asked"), 4, "by the draft's own process, where"),
    ],
)
def test_the_reason_is_given(placed: Placed, n_cores: int, words: str) -> None:
    found = choose_preparation(find_method("ssd"), placed, on_cpu=True, n_cores=n_cores)
    assert words in found.why
    assert found.when == ("measured" if placed.placement.is_apart else "never")


# Engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=4))


def start(folder: str, kept: Path, **settings: Any) -> LLM:
    settings = {"draft": "drop:1", "device": "cpu", "kv_memory": "2MiB", "learnt_dir": str(kept), **settings}
    return LLM(folder, **settings)


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saguaro.engine.assembly.usable_cores", lambda: [0, 0, 0, 0])


@pytest.mark.usefixtures("_four_cores")
def test_an_engine_follows_the_file_that_was_tuned(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(folder, tmp_path) as llm:
        assert isinstance(llm.engine.round.draft, Inline)
        assert llm.engine.placed.why == "untuned"
        file = llm.engine.tuned
        assert file is not None
    file.write(state_of(TUNED))
    with start(folder, tmp_path) as llm:
        assert isinstance(llm.engine.round.draft, Apart)
        assert llm.engine.placed == Placed(TWO, "tuned")
        assert llm.engine.preparation.when == "measured"
    with start(folder, tmp_path, lookahead=3) as llm:
        assert llm.engine.placed.why == "untuned", "that was not measured"
    file.path.write_text(file.path.read_text().replace("inline", "outline"))
    with caplog.at_level(logging.WARNING), start(folder, tmp_path) as llm:
        assert llm.engine.placed == Placed(INLINE, "untuned")
    assert "is ignored, it is damaged" in caplog.text


def test_what_is_learnt_belongs_to_a_placement(folder: str, tmp_path: Path) -> None:
    paths = set()
    for settings in ({"link": "inline"}, {"link": "process"}, {"link": "auto"}):
        with start(folder, tmp_path, **settings) as llm:
            assert llm.engine.learnt is not None
            paths.add(llm.engine.learnt.path)
    assert len(paths) == 2, "auto is inline before it is tuned"
    with start(folder, tmp_path, learnt_dir="none") as llm:
        assert llm.engine.learnt is llm.engine.tuned is None
    with start(folder, tmp_path, method="ar") as llm:
        assert llm.engine.learnt is llm.engine.tuned is None


def test_what_a_draft_in_its_own_process_learnt_is_kept_at_its_end(folder: str, tmp_path: Path) -> None:
    with start(folder, tmp_path, link="process", prepare="always") as llm:  # a tiny target hardly asks it otherwise
        file = llm.engine.learnt
        assert file is not None
        params = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)
        for prompt in ("the end", "in an inn", "another"):
            llm.generate([prompt], params)
    state = file.read()
    assert state is not None
    assert state["policy"]["learnt"]["drafting"]

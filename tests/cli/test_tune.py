"""`saguaro tune` on a tiny pair: what is measured, what is kept, and that the next start uses it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from saguaro import LLM
from saguaro.cli import main
from saguaro.cli.tune import Tuned, costs_table, speeds_table
from saguaro.device.affinity import usable_cores
from saguaro.draft.policy.costs import LearntCosts
from saguaro.engine.placement import Placement, possible_placements, rates_of
from saguaro.errors import ConfigError
from saguaro.measure.tune import Measured
from saguaro.model.tiny import write_tiny
from tests.cli.here import Here

INLINE, APART = Placement(), Placement("process", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=4))


def test_what_is_tuned_is_used_by_the_next_start(folder: str, tmp_path: Path, here: Here) -> None:
    kept = tmp_path / "below" / "learnt"
    args = (folder, "--draft", "drop:1", "--learnt-dir", str(kept), "--threads", "1")
    command = [sys.executable, "-m", "saguaro", "tune", *args, "--max-tokens", "48", "--seconds", "1", "--json"]
    done = subprocess.run([*command, "--batches", "1", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "batch of 1 ..." in done.stderr
    found = json.loads(done.stdout)
    places = possible_placements(len(usable_cores()))
    measured = [(one["placement"]["link"], one["placement"]["threads"], one["batch"]) for one in found["measured"]]
    assert sorted(measured) == sorted((place.link, place.threads, batch) for place in places for batch in (1, 2))
    assert all(one["tok_s"] > 0 for one in found["measured"])
    assert found["learnt_dir"] == str(kept)
    assert {path.suffix for path in kept.iterdir()} == {".json"}, "nothing temporary is left"
    with LLM(folder, draft="drop:1", learnt_dir=str(kept), threads=1) as llm:
        engine = llm.engine
        assert engine.placed.why == ("tuned" if len(places) > 1 else "only")
        assert engine.placed.placement == Placement(**found["chosen"])
        assert engine.tuned is not None
        state = engine.tuned.read()
        assert state is not None
        assert set(rates_of(state)) == set(places)
        assert engine.learnt is not None
        assert engine.learnt.read() is not None, "what its rounds take is kept too"
    info = ("info", "--model", *args)
    facts = json.loads(here(*info, "--json").stdout)
    assert facts["placement"] == str(engine.placed.placement)
    assert set(facts["learnt"]) == {"verification_ms", "draft_step_ms", "tokens_per_round"}
    assert set(facts["learnt"]["verification_ms"]) == {"1", "5"}
    assert "verify 1 token" in here(*info).stdout


def test_tables_and_the_choice_in_one_line(folder: str, tmp_path: Path, here: Here) -> None:
    args = (folder, "--draft", "drop:1", "--learnt-dir", str(tmp_path), "--max-tokens", "48", "--seconds", "0.4")
    done = here("tune", *args, "--batches", "1", "--draft-threads", "64")
    assert done.returncode == 0, done.stderr
    assert "in the target's thread" in done.stdout
    assert "process" not in done.stdout, "64 cores are not there"
    assert "The draft will run in the target's thread. Batch 1: " in done.stdout
    assert f"Kept in {tmp_path}" in done.stdout


def test_the_figures_are_shown() -> None:
    measured = [
        Measured(placement=place, batch=batch, tok_s=rate, tokens_per_round=2.0, prepared=apart, sources={"cache": 0.9})
        for place, rate, apart in ((INLINE, 80.0, 0.0), (APART, 90.0, 1.0))
        for batch in (1, 16)
    ]
    found = Tuned(measured, {APART: LearntCosts({1: 10.0, 5: 12.5}, {1: 1.25}, 1.5, 2.5)}, APART, Path("/kept"))
    assert str(found) == (
        "The draft will run in its own process, 2 cores. Batch 1: prepares, 2.00 tokens per round, 90 tok/s; batch 16: "
        "prepares, 2.00 tokens per round, 90 tok/s."
    )
    console = Console(width=80)
    with console.capture() as shown:
        console.print(speeds_table(measured))
        console.print(costs_table(found.costs))
    text = shown.get()
    assert "…" not in text
    assert all(
        words in text for words in ("verify 5 tokens", "12.50", "draft step, 1 row", "1.25", "drafts just in time")
    )
    assert json.loads(json.dumps(found.as_dict()))["chosen"] == {"link": "process", "threads": 2}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "x"), "there is no draft model, so there is nothing to tune; pass draft"),
        (("--method", "sd"), "method is 'sd', which does not prepare, so there is nothing to tune"),
        (("--method", "ar"), "method is 'ar', which does not prepare"),
        (("--link", "process"), "link is 'process'; tune measures every place for the draft: leave --link out"),
        (("--learnt-dir", "none"), "learnt_dir is none, so nothing would be kept; name a folder with --learnt-dir"),
        ((), "learnt_dir is none"),  # $SAGUARO_LEARNT of the tests
        (("--learnt-dir", "/dev/null/x"), "cannot write to learnt_dir, /dev/null/x (Not a directory); name another"),
        (("--seconds", "0"), "seconds is 0; it must be more than 0"),
        (("--batches", "1", "64"), "batches holds 64; it must be between 1 and max_batch_rows, 32"),
        (("--prompts", "/no/such"), "cannot read prompts from /no/such"),
        (("--n", "2", "--learnt-dir", "/tmp"), "n is 2 and max_tokens 64"),
    ],
)
def test_mistakes_are_explained_before_anything_is_loaded(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        main.run(main.parse(["tune", *args]))
    assert message in str(found.value)


def test_an_interrupted_run_changes_nothing(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saguaro.cli.tune.measure_placements", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main.run(main.parse(["tune", folder, "--draft", "drop:1", "--learnt-dir", str(tmp_path)]))
    assert list(tmp_path.iterdir()) == []

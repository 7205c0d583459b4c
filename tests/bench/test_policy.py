"""`python -m bench.policy`: a cell on a tiny pair, what is judged, and what is refused."""

import doctest
import json
from pathlib import Path

import pytest

import bench.cells
import bench.policy
from bench.policy import AGAIN, COLD, EARLY, TUNED, Args, Cell, fixed_settings, main, ratios_of
from saguaro.errors import ConfigError
from saguaro.measure.candidate import Candidate, Timed
from saguaro.model.tiny import write_tiny


def test_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = write_tiny(tmp_path / "target", "llama", num_hidden_layers=4), tmp_path / "out.json"
    args = Args(
        model=str(target),
        drafts=("drop:1",),
        cores=(1,),
        samplings=("0.7:0.95",),
        batches=(2,),
        settings=("sd:2", "ssd:2:4/always"),
        num_prompts=2,
        tune_seconds=0.1,
        max_tokens=8,
        device="cpu",
        json=out,
    )
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "== draft drop:1, 1 cores, temperature 0.7, top-p 0.95, batch 2" in shown
    assert "tuned: The draft will run in the target's thread" in shown
    assert f"{COLD}: " in shown
    assert f"identical output: ar, sd:2, ssd:2:4/always, {AGAIN}, {COLD}, {TUNED}" in shown
    (cell,) = json.loads(out.read_text())["cells"]
    assert [row["method"] for row in cell["results"]] == ["ar", "sd:2", "ssd:2:4/always", AGAIN, COLD, TUNED]
    assert set(cell["ratios"]) == {COLD, TUNED, AGAIN}
    assert (cell["draft"], cell["cores"], cell["batch"]) == ("drop:1", 1, 2)


def runs(*each: tuple[float, int]) -> Candidate:
    """A candidate with runs of 10 tokens: seconds, and rounds so far."""
    one = Candidate("", None, True, runs=[Timed(seconds, 10, n) for seconds, n in each])
    one.outputs, one.seconds = [[1] * 10 for _ in each], sum(seconds for seconds, _ in each)
    return one


def test_auto_is_judged_in_all_and_in_its_first_rounds() -> None:
    ar, sd = runs((2.0, 10), (2.0, 20), (2.0, 30)), runs((1.0, 5), (1.0, 9), (1.0, 15))
    auto = runs((4.0, EARLY - 1), (1.0, EARLY), (1.0, EARLY + 9))
    ar.name, sd.name, auto.name = "ar", "sd:4", COLD
    found = ratios_of(auto, [ar, sd, auto])
    assert found.best == "sd:4"
    assert [found.of_best, found.of_ar] == pytest.approx([0.5, 1.0])
    assert [found.median_of_best, found.median_of_ar] == pytest.approx([1.0, 2.0]), "one slow group is no matter"
    assert [found.early_of_best, found.early_of_ar] == pytest.approx([0.4, 0.8])


def test_what_is_fixed() -> None:
    assert fixed_settings(Args(), 1) == ["ar", *bench.policy.CHAINS, *bench.policy.TREES]
    assert "ssd:4:8/process:8/always" in fixed_settings(Args(), 16)
    assert bench.cells.settings_of("ssd:4:8/process:2/always") == {
        "method": "ssd",
        "lookahead": 4,
        "budget": 8,
        "nodes": 4,
        "width": 1,
        "link": "process",
        "draft_threads": 2,
        "prepare": "always",
        "fallback": "draft",
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Args(cores=(9999,)), "cores is 9999; this machine lets us use 1 to"),
        (Args(samplings=("hot",)), "'hot' is no sampling; write a temperature, or TEMPERATURE:TOP_P"),
        (Args(samplings=("-1",)), r"temperature is -1.0"),
        (Args(settings=("sdd:3",)), "method is 'sdd'"),
        (Args(settings=("sd:0",)), "lookahead is 0"),
    ],
)
def test_mistakes_are_explained_before_anything_is_loaded(args: Args, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(args)


def test_doctests() -> None:
    for module in (bench.policy, bench.cells):
        assert doctest.testmod(module) == (0, doctest.testmod(module).attempted)
    assert str(Cell("default", 2, "1", 8)) == "draft default, 2 cores, temperature 1, top-p 1, batch 8"

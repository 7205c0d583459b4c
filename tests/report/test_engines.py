"""Pairs of a report: what a grown pair runs, which engines stay open, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saguaro import LLM
from saguaro.config import SamplingParams
from saguaro.errors import ConfigError
from saguaro.measure.grown import SHAPES, Shape
from saguaro.measure.grown_pair import bytes_read, make_pair
from saguaro.model.tiny import write_tiny
from saguaro.report.cell import PROFILES
from saguaro.report.engines import MOST_OPEN, Engines, Grown, LoadedPair
from saguaro.report.experiments.exact import n_different
from saguaro.report.experiments.table import chosen
from saguaro.report.report import measured
from saguaro.report.runner import Runner
from saguaro.report.store import Store
from tests.report.conftest import TEXTS, TINY
from tests.report.driver import CIRCUMSTANCES, report_of

CPU = torch.device("cpu")
LARGE, SMALL = Shape("large", 160, 4, 8, 4, 32, 160, 320), Shape("small", 128, 3, 4, 2, 32, 128, 320)


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grown:
    """A grown pair of tiny shapes: the code of --gpu, on a CPU."""
    for shape in (LARGE, SMALL):
        monkeypatch.setitem(SHAPES, shape.name, shape)
    folder = write_tiny(tmp_path / "source", "llama", tied=True)
    pair, facts = make_pair("large", "small", ["abc"], device=CPU, dtype="float32", epsilon=0.2, folder=folder)
    assert facts["weight_bytes_read"] == bytes_read(pair.target.model) > facts["draft_bytes_read"] > 0
    return Grown("tiny", pair, facts, n_output=TINY.max_tokens)


def test_the_experiments_of_a_grown_pair(grown: Grown, tmp_path: Path) -> None:
    profile = replace(TINY, name="gpu", max_tokens=8, apart=PROFILES["gpu"].apart)
    report = report_of(profile, chosen("fig3,drafters,exact"))
    runner = Runner(
        store=Store(tmp_path / "out", {}, {}),
        pairs={"tiny": lambda: grown},
        texts=TEXTS,
        rows=2,
        circumstances=CIRCUMSTANCES,
        tell=lambda _: None,
    )
    with runner.store.opened():
        done = runner.run(report.cells)
    assert set(measured(done)) == {cell.name for cell in report.cells}, done
    assert n_different(measured(done)) == 0
    cell = done["exactness, all methods"]
    assert cell["pair"]["draft"] == "small (grown)"
    ssd = next(one for one in cell["measured"]["entries"] if one["name"] == "ssd-uniform")
    assert ssd["summary"]["hit_rate"] > 0, "the grown draft prepares"


def test_noise_is_searched_for_an_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in (LARGE, SMALL):
        monkeypatch.setitem(SHAPES, shape.name, shape)
    folder = write_tiny(tmp_path, "llama", tied=True, max_position_embeddings=2048)
    _, facts = make_pair("large", "small", ["abc"], device=CPU, dtype="float32", agreement=0.7, folder=folder)
    assert facts["epsilon"] > 0


def loaded(folder: Path, n_output: int = 12) -> LoadedPair:
    base = LLM(folder, method="ar", draft="drop:1", device="cpu", dtype="float32", threads=1, kv_memory="1MiB")
    return LoadedPair("tiny", base, chat=True, n_output=n_output)


def test_engines_stay_open_until_there_are_too_many(folder: Path) -> None:
    engines = Engines(loaded(folder), rows=2)
    settings = [{"method": "sd", "lookahead": n} for n in range(1, MOST_OPEN + 3)]
    first = engines.get(settings[:2])
    assert engines.get(settings[:1]) == first[:1]
    together = engines.get(settings)
    assert len({id(one) for one in together}) == MOST_OPEN + 2, "a cell may have more entries than usually stay open"
    params = SamplingParams(max_tokens=4, temperature=0)
    assert len({tuple(one.generate(["abc"], params)[0].token_ids) for one in together}) == 1
    (alone,) = engines.get([{"method": "ngram"}])
    assert alone.generate(["abc"], params)
    with pytest.raises(Exception, match="closed"):
        together[0].generate(["abc"], params)
    assert engines.get(settings[-1:]) == together[-1:]
    engines.close()


def test_long_prompts_are_cut_to_what_fits(folder: Path) -> None:
    pair = loaded(folder)
    (tokens,) = pair.encode(["abc " * 200])
    assert len(tokens) == 256 - 12 - 32
    pair.close()


def test_a_model_for_short_texts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reads texts of at most 256 tokens, and the outputs of this report have 200"):
        loaded(folder, n_output=200)

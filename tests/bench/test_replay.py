"""A replayed target: the rounds and tokens of the real one, from a recording."""

import doctest
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.columns
import bench.recording
import bench.replay
import bench.replay_verifier
import bench.step_times
from bench.cells import settings_of
from bench.recording import Recording, Source, load_recording, params_of, record
from bench.replay import Args, check_recording, main, ratios, shape_of, with_bound
from bench.replay_verifier import CapturedShape, ReplayVerifier, wait_until, without_weights
from bench.step_times import PRESETS, parse_times
from saguaro import EngineConfig, SamplingParams
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError
from saguaro.model.load import Loaded, load
from saguaro.model.tiny import write_tiny
from saguaro.model.tokenizer import Tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.types import RoundEvent

CPU = torch.device("cpu")
PROMPTS = [list(b"the thin man in the inn"), list(b"an error")]
TEMPERATURES = (0.0, 1.0)
N_TOKENS = 40
SOURCE = Source("tiny", None, "float32", "cpu")
QUICK = parse_times("given", ["0.01"])
CELLS = ("ar", "sd:3", "sd:4:8:12:3", "ssd:3:6", "ssd:4:8:12:3", "pearl:3", "ssd-uniform:3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)
    return load("tiny", path, CPU, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(target: Loaded) -> Tokenizer:
    return load_tokenizer(target.path, target.model.spec.n_vocab)


@pytest.fixture(scope="module")
def draft(target: Loaded) -> Transformer:
    return target.model.without([2])


@pytest.fixture(scope="module")
def recording(target: Loaded, tokenizer: Tokenizer) -> Recording:
    engine = Engine(target, tokenizer, config_of("ar"))
    return Recording(SOURCE, N_TOKENS, record(engine, PROMPTS, TEMPERATURES, N_TOKENS))


def config_of(cell: str, **settings: Any) -> EngineConfig:
    """A config in which nothing is decided by measured times."""
    sizes = settings_of(cell)
    if sizes["method"] not in ("ar", "pearl"):
        settings = {"fallback": "draft", **settings}
    given = {"draft": "given", "link": "inline", "prepare": "always", "device": "cpu", "dtype": "float32"}
    return EngineConfig(**sizes, **{**given, "max_batch_rows": 2, "max_model_len": 128, **settings})


def absent(target: Loaded) -> Loaded:
    return replace(target, model=without_weights(target.model.spec, CPU, torch.float32, "float32"))


def serve(engine: Engine, params: list[SamplingParams]) -> tuple[list[list[int]], list[RoundEvent]]:
    """The outputs and the rounds."""
    events: list[RoundEvent] = []
    engine.round.observers.append(events.append)
    names = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while engine.has_work:
        engine.step()
        engine.pool.check(engine.scheduler.tables())
    engine.close()
    return [engine.result(name).outputs[0].token_ids for name in names], events


def params_at(temperature: float, n_tokens: int = N_TOKENS) -> list[SamplingParams]:
    return [params_of(temperature, seed, n_tokens) for seed in range(len(PROMPTS))]


def recorded(recording: Recording, temperature: float) -> list[list[int]]:
    return [recording.output(prompt, temperature, seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("cell", CELLS)
def test_the_rounds_are_those_of_the_real_target(
    target: Loaded, tokenizer: Tokenizer, draft: Transformer, recording: Recording, cell: str, temperature: float
) -> None:
    real, rounds = serve(Engine(target, tokenizer, config_of(cell), draft=draft), params_at(temperature))
    verifier = ReplayVerifier(recording, QUICK, shape_of(cell))
    engine = Engine(absent(target), tokenizer, config_of(cell), draft=draft, verifier=verifier)
    replayed, others = serve(engine, params_at(temperature))
    assert replayed == real == recorded(recording, temperature)
    assert [event.rows for event in others] == [event.rows for event in rounds]
    assert cell == "ar" or any(row.k for event in others for row in event.rows)


def test_a_draft_in_its_own_process(target: Loaded, tokenizer: Tokenizer, recording: Recording) -> None:
    config = config_of("ssd:3:6:8:2", draft=str(target.path), link="process")
    engine = Engine(
        absent(target), tokenizer, config, verifier=ReplayVerifier(recording, parse_times("given", ["5"]), None)
    )
    outputs, events = serve(engine, params_at(1.0))
    assert outputs == recorded(recording, 1.0)
    assert any(row.k for event in events for row in event.rows)


def test_fewer_tokens_than_recorded(target: Loaded, tokenizer: Tokenizer, recording: Recording) -> None:
    verifier = ReplayVerifier(recording, QUICK, None)
    outputs, _ = serve(Engine(absent(target), tokenizer, config_of("ar"), verifier=verifier), params_at(0.0, 7))
    assert outputs == [tokens[:7] for tokens in recorded(recording, 0.0)]


@pytest.mark.parametrize(("padded", "n_tokens"), [(True, 2 * 13), (False, None)])
def test_a_step_takes_the_time_of_its_tokens(
    target: Loaded,
    tokenizer: Tokenizer,
    draft: Transformer,
    recording: Recording,
    padded: bool,
    n_tokens: int | None,
) -> None:
    cell = "sd:4:8:12:3"
    verifier = ReplayVerifier(recording, parse_times("given", ["0.01@1", "1@100"]), shape_of(cell) if padded else None)
    engine = Engine(absent(target), tokenizer, config_of(cell), draft=draft, verifier=verifier)
    _, (first, *rounds) = serve(engine, params_at(0.0))

    def verified(event: RoundEvent) -> float:
        assert event.verify is not None
        return round(1 + (1e3 * (event.verify[1] - event.verify[0]) - 0.01) / 0.01, 3)

    assert verified(first) == first.n_computed == sum(map(len, PROMPTS))  # prompts are never padded
    both = [event for event in rounds if len(event.rows) == 2]
    assert [verified(event) for event in both] == [n_tokens or event.n_computed for event in both]


def test_a_wait_ends_at_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds + 1e-4

    monkeypatch.setattr(bench.replay_verifier, "now", lambda: clock[0])
    monkeypatch.setattr("time.sleep", sleep)
    wait_until(0.02)
    assert 0.02 <= clock[0] < 0.0202
    assert slept[0] == pytest.approx(0.0195)
    assert set(slept[1:]) == {0.0}  # gives way to other threads
    slept.clear()
    wait_until(0.01)
    assert slept == []


def test_a_target_without_weights_has_no_memory(target: Loaded) -> None:
    model = absent(target).model
    assert (model.spec, model.device) == (target.model.spec, CPU)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_a_recording_is_kept(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    recording.save(path)
    assert load_recording(path) == recording


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"outputs": [], "n_tokens": 1, "source": {}}', '{"outputs": [{"prompt": [1]}], "n_tokens": 1}'],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        load_recording(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path} is no recording"):
        load_recording(path)


def test_a_short_output_is_refused(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    recording.save(path)
    found = json.loads(path.read_text())
    found["outputs"][1]["tokens"].pop()
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=rf"is no recording \(ValueError: the tokens of an output .*, not {N_TOKENS}"):
        load_recording(path)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (params_of(0.5, 0, 8), "temperature 0.5 and seed 0 after the prompt"),
        (params_of(1.0, 9, 8), "temperature 1 and seed 9 after the prompt"),
        (params_of(0.0, 0, N_TOKENS + 1), "a request is longer than its recording"),
        (replace(params_of(1.0, 0, 8), top_p=0.9), "a replayed target has no logits"),
        (replace(params_of(1.0, 0, 8), logprobs=1), "a replayed target has no logits"),
    ],
)
def test_requests_that_were_not_recorded(
    target: Loaded, tokenizer: Tokenizer, recording: Recording, params: SamplingParams, said: str
) -> None:
    verifier = ReplayVerifier(recording, QUICK, None)
    engine = Engine(absent(target), tokenizer, config_of("ar"), verifier=verifier)
    with pytest.raises(ConfigError, match=said):
        serve(engine, [params, params_of(0.0, 1, 4)])


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), "there are no step times"),
        (("16ms",), "a step time is '16ms'; write MS, MS@TOKENS"),
        (("0@4",), "a step time is '0@4'"),
        (("16@0",), "a step time is '16@0'"),
        (("16@4", "17@4"), "give one time for each number of tokens"),
        (("16", "17@4"), "must be the only one"),
    ],
)
def test_step_times_that_cannot_be_read(entries: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_times("given", entries)


def test_step_times_by_rows() -> None:
    times = parse_times("given", ["10@1x1", "20@9x1", "30@36x4"])
    assert times.seconds(5, 1) == pytest.approx(0.015)
    assert times.seconds(5, 2) == times.seconds(36, 4) == pytest.approx(0.030)
    with pytest.raises(ConfigError, match=r"a batch has 5 rows, and the step times given are for up to 4"):
        times.seconds(5, 5)
    with pytest.raises(ConfigError, match=r"2 rows verify up to 64 tokens, and the step times given end at 36"):
        times.check(64, 2)
    assert parse_times("given", ["10@1x1", "12@1"]).tables == {1.0: [(1, 10.0)], math.inf: [(1, 12.0)]}


def test_presets_cover_a_tree_of_31_nodes() -> None:
    for name, entries in PRESETS.items():
        parse_times(name, entries).check(CapturedShape(31, 8).n_tokens(1), 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"target": "33b"}, "target is '33b'; it must be one of 32b"),
        ({"draft": "drop:3"}, "draft is 'drop:3'"),
        ({"presets": ("9b",)}, "presets is '9b'"),
        ({"link": "null"}, "link is 'null'"),
        ({"link": "process"}, "link is process and draft 0.6b, which is grown in this process"),
        ({"link": "service"}, "link is service and draft 0.6b, which is grown in this process"),
        ({"drafts": (1, 2)}, "drafts is 1 2 and link inline; several drafts need link service"),
        ({"link": "service", "draft": "default", "drafts": (0,)}, "drafts is 0; it must be numbers of at least 1"),
        ({"link": "service", "draft": "default", "drafts": ()}, "drafts is empty; it must be"),
        ({"cells": ("saguaro:4",)}, "cell saguaro:4 verifies by rejection"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Args(**flags)


def test_step_times_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="1 row verifies up to 61 tokens, and the step times 32b end at 32"):
        main(Args(cells=("sd:8:8:60:8",)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"target": "32b"}, "is a recording of smollm2, float32, cpu; the flags say 32b with epsilon 0.27"),
        ({"max_tokens": N_TOKENS + 1}, f"has {N_TOKENS} tokens of each output; max_tokens is {N_TOKENS + 1}"),
        ({"temperatures": (0.0, 0.7)}, "temperature 0.7 and seed 0 after"),
    ],
)
def test_recordings_that_do_not_fit_the_flags(recording: Recording, flags: dict[str, Any], said: str) -> None:
    mine = replace(recording, source=replace(SOURCE, target="smollm2"))
    given: dict[str, Any] = {
        "target": "smollm2",
        "draft": "default",
        "max_tokens": N_TOKENS,
        "temperatures": TEMPERATURES,
    }
    check_recording(mine, Args(**given), PROMPTS)
    with pytest.raises(ConfigError, match=said):
        check_recording(mine, Args(**{**given, **flags}), PROMPTS)


def test_ratios_compare_the_same_tree() -> None:
    def cell(name: str, tok_s: float | None, exposed: float = 0.0, times: str = "32b", N: int = 31) -> dict[str, Any]:
        where = {
            "times": times,
            "cell": name,
            "batch": 1,
            "T": 0.0,
            "method": name.partition(":")[0],
            "K": 8,
            "R": 8,
            "drafts": 1,
        }
        return with_bound({**where, "N": N, "tok_s": tok_s, "round_ms": 20.0, "verify": 19.5 - exposed, "host": 0.5})

    cells = [cell("sd:8", 100.0, N=8), cell("sd:8:8:31:8", 200.0, 4.0), cell("sd:8:8:31:8", 300.0, times="70b")]
    cells += [cell("ssd:8:8:31:8", 240.0), cell("ssd:8:16:31:8", 260.0), cell("ssd:8:24:31:8", None)]
    found = [(each["cell"], each["sd"], each["ssd / sd"], round(each["ssd / free sd"], 3)) for each in ratios(cells)]
    assert found == [("ssd:8:8:31:8", "sd:8:8:31:8", 1.2, 0.96), ("ssd:8:16:31:8", "sd:8:8:31:8", 1.3, 1.04)]


@pytest.mark.network
def test_the_command(default_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "recording.json", tmp_path / "replay.json"
    flags: dict[str, Any] = {"target": "smollm2", "draft": "default", "num_prompts": 1, "max_tokens": 12}
    flags |= {"device": "cpu", "verify_ms": ("1",), "cells": ("sd:2", "ssd:2:4"), "prepare": "always", "json": out}
    assert main(Args(**flags, save=kept)) == 0
    assert "replayed target: smollm2, " in capsys.readouterr().out
    first = json.loads(out.read_text())
    assert first["target"] == "replayed"
    assert [cell["cell"] for cell in first["cells"]] == ["sd:2", "ssd:2:4"]
    assert [cell["verify"] for cell in first["cells"]] == pytest.approx([1.0, 1.0])
    assert [each["sd"] for each in first["ratios"]] == ["sd:2"]
    assert main(Args(**flags, load=kept)) == 0
    assert "recorded" not in capsys.readouterr().out
    again = json.loads(out.read_text())
    assert again["cells"][0]["per_round"] == first["cells"][0]["per_round"]


@pytest.mark.network
def test_several_drafts(default_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    flags: dict[str, Any] = {"target": "smollm2", "draft": "default", "num_prompts": 2, "max_tokens": 8, "warm": 0}
    flags |= {"device": "cpu", "verify_ms": ("20",), "cells": ("ar", "ssd-uniform:2:4"), "batches": (2,), "json": out}
    assert main(Args(**flags, link="service", drafts=(1, 2))) == 0
    ar, *drafted = json.loads(out.read_text())["cells"]
    assert (ar["cell"], ar["drafts"]) == ("ar", 0)
    assert [(cell["drafts"], cell["n_deaths"], cell["prepared"] > 0) for cell in drafted] == [
        (1, 0, True),
        (2, 0, True),
    ]


@pytest.mark.parametrize(
    "module", [bench.columns, bench.recording, bench.replay, bench.replay_verifier, bench.step_times]
)
def test_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0

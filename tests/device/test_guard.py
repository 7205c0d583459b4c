"""Devices by number: absent ones are refused by name, and work runs with its own device as the current one."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from saguaro import LLM
from saguaro.device.graphs import guard
from saguaro.engine.assembly import find_device
from saguaro.errors import ConfigError
from saguaro.link import inline
from saguaro.link.inline import Inline
from saguaro.model.tiny import write_tiny
from saguaro.round import DraftSide


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")


@pytest.mark.usefixtures("two_gpus")
def test_a_device_has_a_number() -> None:
    wanted = {"auto": "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
    assert {name: str(find_device("device", name)) for name in wanted} == wanted


@pytest.mark.usefixtures("two_gpus")
def test_an_absent_device_is_named_with_those_that_are_there() -> None:
    said = (
        "device is 'cuda:7'; this machine has 2 CUDA devices: cuda:0 (GPU number 0), cuda:1 (GPU number 1); use one of "
        "them or cpu"
    )
    with pytest.raises(ConfigError) as refused:
        find_device("device", "cuda:7")
    assert str(refused.value) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["device", "draft_device"])
def test_it_is_refused_before_the_model_is_loaded(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {name: "cuda:1", "draft": "drop:1", "method": "sd"}
    folder = write_tiny(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{name} is 'cuda:1'; this machine has 0 CUDA devices; use cpu"):
        LLM(str(folder), **settings)


def test_a_guard_sets_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", asked.append)
    with guard(torch.device("cpu")):
        assert asked == []
    guard(torch.device("cuda:1"))
    assert asked == [torch.device("cuda:1")]


class Side:
    """A draft side that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def test_a_draft_in_this_process_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[torch.device] = []

    def noted(device: torch.device) -> Any:
        guarded.append(device)
        return guard(torch.device("cpu"))

    monkeypatch.setattr(inline, "guard", noted)
    side = Side()
    link = Inline(cast(DraftSide, side), torch.device("cuda:1"))
    link.warm(1)
    link.admit([])
    link.speculate(cast(Any, None), [], [])
    link.overlap()
    assert side.calls == ["warm", "admit", "respond", "prepare"]
    assert guarded == [torch.device("cuda:1")] * 4

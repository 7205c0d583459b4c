"""The bundle of a device, and what is said where its kernels cannot be had."""

import sys

import pytest
import torch

from saguaro.errors import ConfigError
from saguaro.kernels.bundle import kernels_for, triton_kernels


def test_a_cpu_needs_no_kernels() -> None:
    assert kernels_for(torch.device("cpu")) is None


def test_without_triton_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("saguaro.kernels.") and name != "saguaro.kernels.bundle"
    ]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ConfigError, match=r"device is cuda, whose kernels need Triton.*install triton, or set device to cpu"
    ):
        triton_kernels(torch.device("cuda"))

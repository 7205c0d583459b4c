"""Kernels fit GPUs that are not here, by what the compiler makes of them."""

import os
import subprocess
import sys
from functools import cache

import pytest

pytest.importorskip("triton")

from tests.kernels.compile_for import LIMITS


@cache
def compiled(gpu: str) -> list[tuple[str, int]]:
    """Kernels and their bytes of shared memory; not in this process, whose kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_for", gpu]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [(name, int(n_bytes)) for name, n_bytes in map(str.split, ran.stdout.splitlines())]


@pytest.mark.parametrize("gpu", LIMITS)
def test_shared_memory_is_enough(gpu: str) -> None:
    found = compiled(gpu)
    files = {name.partition(".")[0] for name, _ in found}
    assert files >= {"linear", "rotary", "attention", "sample", "limits", "adjust", "grow"}
    assert ("fp8_rows" in files) == (gpu != "gfx942")
    assert [one for one in found if one[1] > LIMITS[gpu]] == []


@pytest.mark.parametrize("gpu", ["89", "90"])
def test_small_weights_are_held_in_registers(gpu: str) -> None:
    """Shared memory is for warps to add up their sums in: 16 rows of 3072 would be 96 KiB of it."""
    found = [one for one in compiled(gpu) if one[0].startswith("short.")]
    assert {"short._read_kernel", "short._heads_kernel", "short._write_kernel"} == {name for name, _ in found}
    assert [one for one in found if one[1] > 16 * 1024] == []


def test_on_amd_no_weights_are_held() -> None:
    assert not any(name.startswith("short.") for name, _ in compiled("gfx942"))

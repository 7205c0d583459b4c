"""What compilers make of kernels, where there is no GPU to run them on: for one that is named."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from saguaro.kernels import short

ROUND = {"n_in", "n_out", "a_stride", "weight_stride", "y_stride", "x_stride"}  # multiples of 16
TYPES = {"squares": "*fp32", "slots": "*i64", "eps": "fp32"} | dict.fromkeys(ROUND | {"n_rows", "n_parts"}, "i32")


def shared(kernel, n_in, n_rows, **constants):
    cut = short.short(n_in, 1024, torch.bfloat16)
    words = short._keywords(torch.empty(n_rows, n_in, dtype=torch.bfloat16, device="meta"), cut) | constants
    constants = {name: words[name] for name in kernel.arg_names if name in words}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*bf16") for n in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    is_round = [name for name, kind in signature.items() if kind.startswith("*") or name in ROUND]
    source = ASTSource(
        kernel, signature, {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in is_round},
    )
    options = {"num_warps": words["num_warps"], "num_stages": words["num_stages"], "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


for n_rows in (1, 8, 33):
    print(shared(short._read_kernel, 1024, n_rows, PARTS=64, IS_GATED=True, HAS_BIAS=False))
    print(shared(short._heads_kernel, 1024, n_rows, PARTS=64, N_QUERIES=16, N_STORED=16, HALF=64, HAS_BIAS=False))
    print(shared(short._write_kernel, 3072, n_rows, HAS_BIAS=False))
"""


def test_small_weights_are_held_in_registers() -> None:
    """Shared memory is for warps to add up their sums in: 16 rows of 3072 would be 96 KiB of it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [int(line) for line in ran.stdout.split()]
    assert len(found) == 9
    assert max(found) <= 16 * 1024, found

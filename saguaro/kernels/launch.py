# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""How kernels of one stream follow one another: the next may start before the one before has ended.

Programmatic dependent launch (NVIDIA, from Hopper on): a kernel that was launched early does what does not depend on
the ones before (it finds its place, fetches weights), then waits until they are done and seen. Elsewhere a kernel
starts when the one before has ended, and the wait is nothing.

Products let the next kernel start at once: it may be a product, too, whose weights are then on their way. All others
let it start when they have waited: a kernel that waits takes room from whatever else runs on the device. Several may be
in flight. One of torch's lets nobody start: all before it is done when the next one starts. Every step of a model
begins with one, the look-up of its tokens.

Invariant: a kernel waits before it reads what was written in this step, before it writes anything at all, and before it
ends. Weights, and what was written before the step (page tables, lengths, keys of former tokens), it may read at once.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The kernel after this one may be launched from now on."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until here nothing may be read that was written in this step, and nothing written."""
    if EARLY:
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the kernel before, then let the next one start."""
    wait_for_previous(EARLY)
    let_next_start(EARLY)


def early(device: torch.device) -> dict[str, Any]:
    """Keywords of a launch: the constexpr EARLY, and what the launcher must know."""
    return {"EARLY": True, "launch_pdl": True} if _can_start_early(device) else {"EARLY": False}


@cache
def _can_start_early(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None and "TRITON_INTERPRET" not in os.environ
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 9

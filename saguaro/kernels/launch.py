# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Programmatic dependent launch (NVIDIA, from Hopper on): a kernel may start before the previous one has ended.

A kernel that starts early does the work that does not depend on earlier kernels (compute addresses, load weights), then
waits until these are complete and their writes visible. On other devices a kernel starts when the previous one has
ended, and the wait does nothing.

Products let the next kernel start at once: if it is a product too, it can load its weights. Other kernels let it start
after their own wait, since a waiting kernel occupies resources. Several kernels may be in flight. A torch kernel never
lets the next one start early: all earlier work is complete when that one starts. Every step of a model begins with a
torch kernel, the embedding look-up.

Invariant: a kernel waits before it reads data written in this step, before any write, and before it ends. It may read
weights, and data from before the step (page tables, lengths, keys of earlier tokens), before the wait.
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
    """Allow the next kernel to start from now on."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait for earlier kernels. Before this, do not read data of this step and do not write."""
    if EARLY:
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for earlier kernels, then let the next one start."""
    wait_for_previous(EARLY)
    let_next_start(EARLY)


def early(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the constexpr EARLY, and the launcher's option."""
    return {"EARLY": True, "launch_pdl": True} if _can_start_early(device) else {"EARLY": False}


@cache
def _can_start_early(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None and "TRITON_INTERPRET" not in os.environ
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 9

"""Warnings about slow machine setups that the user can change. Each is logged once."""

import functools
import logging

import torch

import saguaro
from saguaro.kernels import native
from saguaro.types import Progress

log = logging.getLogger(__name__)


def check_machine(device: torch.device, progress: Progress) -> None:
    """Compile the CPU kernels, and warn if the machine will be slower than necessary."""
    if device.type != "cpu":
        return
    progress("compiling CPU kernels", 0, 1)
    reason = native.find()
    progress("compiling CPU kernels", 1, 1)
    if isinstance(reason, str):
        _warn_once(
            f"This will be slow: {reason}. Without one no kernels can be built for this CPU, and the model computes "
            "in float32 at about an eighth of the speed (13 tokens a second in place of 100 with the default model)"
        )
    if saguaro.IS_SPINNING and torch.get_num_threads() > 1:
        _warn_once(
            "This may be slow: torch was imported before saguaro, so its threads spin while they wait for each other, "
            "and beside other work decoding takes up to ten times as long. Import saguaro before torch, or set "
            "GOMP_SPINCOUNT=10000"
        )


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)

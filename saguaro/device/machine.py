"""What machine this is."""

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def cpu_model() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def device_model(device: torch.device) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()

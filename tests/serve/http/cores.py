"""Processor time of a process: unlike a clock's, it does not depend on what else this machine does."""

import os
import resource
from pathlib import Path


def core_seconds(pid: int) -> float:
    """Of all its threads, up to now."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def core_seconds_of_ended() -> float:
    """Of this process's children that have ended, up to now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

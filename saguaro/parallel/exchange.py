"""The exchange of tensors between the ranks of a group: gloo between CPU processes, NCCL between GPUs.

The group is an object that is passed on; torch's default group is not used, so a program may have one of its own.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import RankError

JOIN_SECONDS = 60.0  # for the ranks to find each other
WAIT_SECONDS = 300.0  # for another rank's part of a step


class ExchangeLost(RankError):
    """Another rank ended, or took too long."""


class GroupExchange:
    """See saguaro.model.split.Exchange. On a GPU it can be captured like any other operation."""

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """Join the group; all ranks must do so. store: a file for this group alone."""
        self._size = size
        try:
            self._group = _group(rank, size, store, device)
        except RuntimeError as e:
            raise ExchangeLost(
                f"rank {rank} could not join the group ({_first_line(e)}); start the engine again"
            ) from e

    def __call__(self, x: Tensor) -> Tensor:  # [T, n] -> [N, T, n]
        """See Exchange."""
        found = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        try:
            self._group._allgather_base(found, x.contiguous()).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise ExchangeLost(f"an exchange between ranks failed: {_first_line(e)}") from e
        return found.view(self._size, *x.shape)


def _group(rank: int, size: int, store: Path, device: torch.device) -> Any:
    import torch.distributed as dist

    if not dist.is_available():
        raise RankError("this torch is built without torch.distributed; install another build, or use one rank")
    shared: Any = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    shared.set_timeout(timedelta(seconds=JOIN_SECONDS))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=WAIT_SECONDS)
        return dist.ProcessGroupNCCL(shared, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=WAIT_SECONDS)
    gloo._threads = 1
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # reachable from this machine only
    return dist.ProcessGroupGloo(shared, rank, size, gloo)


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__

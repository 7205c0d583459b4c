"""KV memory: its size, and the tensor."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.config import EngineConfig, format_bytes, parse_bytes
from saguaro.errors import CapacityError, ConfigError
from saguaro.model.spec import ModelSpec

DEFAULT_GPU_SHARE = 0.9  # of the memory that is free after the weights are loaded and the workspace is subtracted
DEFAULT_CPU_SHARE = 0.25  # of all memory, at most
DEFAULT_CPU_CONTEXTS = 2  # texts of full length


@dataclass(frozen=True)
class KVPlan:
    """How the KV memory is divided into pages."""

    n_pages: int
    page_size: int
    bytes_per_token: int
    max_length: int  # longest text that the configuration allows

    @property
    def n_tokens(self) -> int:
        """Tokens that fit the memory."""
        return self.n_pages * self.page_size

    @property
    def longest(self) -> int:
        """The longest text that can be served: allowed, and fits the memory."""
        return min(self.max_length, self.n_tokens)

    @property
    def n_bytes(self) -> int:
        """Size of the memory."""
        return self.n_tokens * self.bytes_per_token


def plan_kv(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    beside: int = 0,  # KV bytes per token of a draft on the same device
    workspace: int = 0,  # bytes that steps need
    n_ranks: int = 1,  # that share this machine's memory
) -> KVPlan:
    """Divide kv_memory (auto: the free memory) into pages; an error if one text of max_model_len does not fit.

    A draft's share is taken out of an automatic budget. A stated budget is for the target alone, and is that of each
    rank; spec: with a rank's heads.
    """
    per_token = spec.kv_bytes_per_token(dtype)
    budget = _budget(config, spec, device, per_token, workspace, n_ranks)
    if config.kv_memory == "auto":
        budget = budget * per_token // (per_token + beside)
    # All rows at full length need no more than this.
    useful = -(-(config.max_model_len or spec.max_length) // config.page_size) * config.max_batch_rows
    n_pages = min(budget // (per_token * config.page_size), useful)
    wanted = config.max_model_len or 2 * config.page_size
    if n_pages * config.page_size < wanted:
        need = -(-wanted // config.page_size) * config.page_size * per_token
        raise CapacityError(
            f"kv_memory {format_bytes(budget)} holds {n_pages * config.page_size} tokens "
            f"({format_bytes(per_token)} each); {wanted} are needed: raise kv_memory to at least {format_bytes(need)}"
            + (", or lower max_model_len" if config.max_model_len else "")
        )
    if config.max_model_len is not None and config.max_model_len > spec.max_length:
        raise CapacityError(f"max_model_len is {config.max_model_len}; the model knows {spec.max_length} positions")
    return KVPlan(n_pages, config.page_size, per_token, config.max_model_len or spec.max_length)


def _budget(
    config: EngineConfig, spec: ModelSpec, device: torch.device, per_token: int, workspace: int, n_ranks: int
) -> int:
    if config.kv_memory != "auto":
        return parse_bytes(config.kv_memory, "kv_memory")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return _gpu_budget(config.gpu_memory_utilization, free, total, workspace)
    if config.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}, and the model computes on {device}: use "
            "kv_memory, such as 2GiB"
        )
    contexts = DEFAULT_CPU_CONTEXTS * (config.max_model_len or spec.max_length) * per_token
    return min(contexts, int(DEFAULT_CPU_SHARE * _memory()) // n_ranks)


def _gpu_budget(share: float | None, free: int, total: int, workspace: int) -> int:
    """KV bytes on a GPU after the weights are loaded. Without a share: 90% of the free memory minus the workspace. With
    one: as much as brings the used GPU memory, other processes included, to this share of the total.

    >>> [_gpu_budget(share, free=60, total=100, workspace=10) for share in (None, 0.9, 0.4)]
    [45, 40, 0]
    """
    if share is None:
        return max(0, int((free - workspace) * DEFAULT_GPU_SHARE))
    return max(0, int(share * total) - (total - free) - workspace)


def _memory() -> int:
    """Bytes of physical memory; 16 GiB where the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 16 * 2**30


class KVCache:
    """Keys and values of every page and layer. A token's KV index is page * page_size + offset."""

    def __init__(self, plan: KVPlan, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.page_size, self.device, self.dtype = plan.page_size, device, dtype
        n_kv = spec.n_kv_heads
        # Untouched memory costs nothing on a CPU: the system allocates pages on first write.
        memory = torch.empty(spec.n_layers, plan.n_tokens, 2 * n_kv, spec.head_dim, device=device, dtype=dtype)
        self.memory = memory  # [layers, tokens, 2 * H_kv, d]
        self.layers = list(memory)  # per layer [tokens, 2 * H_kv, d]: a token's keys, then its values
        by_head = [layer.transpose(0, 1)[None] for layer in memory]
        self.keys = [layer[:, :n_kv] for layer in by_head]  # per layer [1, H_kv, tokens, d]
        self.values = [layer[:, n_kv:] for layer in by_head]

    def move(self, sources: Tensor, kv_index: Tensor) -> None:  # [T], [T]
        """Copy keys and values of all layers from some places to others."""
        self.memory.index_copy_(1, kv_index, self.memory.index_select(1, sources))

    def copy_in(self, kv_index: Tensor, kv: Tensor) -> None:  # [T], [layers, T, 2 * H_kv, d]
        """Store keys and values of all layers that were computed outside this cache."""
        self.memory.index_copy_(1, kv_index, kv)

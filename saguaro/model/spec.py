"""A model's hyperparameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rope parameters: base frequency and scaling."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def frequencies(self, head_dim: int) -> Tensor:  # [head_dim / 2] float32
        """Radians per position of each rotated pair."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequency = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "llama3":
            return self._llama3(frequency)
        return frequency

    def _llama3(self, frequency: Tensor) -> Tensor:
        """Scale long wavelengths, keep short ones, interpolate between them."""
        wavelength = 2 * math.pi / frequency
        longest = self.original_length / self.low_freq_factor
        shortest = self.original_length / self.high_freq_factor
        blend = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - blend) * frequency / self.factor + blend * frequency
        stretched = torch.where(wavelength > longest, frequency / self.factor, frequency)
        is_between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(is_between, between, stretched)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The hyperparameters of one transformer."""

    architecture: str
    n_layers: int
    hidden: int  # D
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    n_vocab: int  # rows of the embedding; a tokenizer may have fewer
    norm_eps: float
    max_length: int
    rope: Rope
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_ids: tuple[int, ...]
    attention_scale: float | None = None  # factor of query-key products; None: 1 / sqrt(head_dim)
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)  # that only this family's blocks need

    @property
    def softmax_scale(self) -> float:
        """The factor of query-key products before the softmax."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * dtype.itemsize

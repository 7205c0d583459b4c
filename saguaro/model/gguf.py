"""GGUF files: metadata as a ModelSpec, tensors under Hugging Face names.

Tensors are read one at a time. llama.cpp stores the query and key rows of Llama with the two rope halves interleaved;
decoding restores their order.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from saguaro.errors import CorruptModel, ModelNotFound, UnsupportedModel
from saguaro.model.families import FAMILIES
from saguaro.model.files import brief, is_there
from saguaro.model.gguf_header import TensorInfo, read_header
from saguaro.model.hf_config import parse_spec
from saguaro.model.shapes import Shapes
from saguaro.model.split import Cut
from saguaro.model.stored import Stored, read_stored

ROPE_FREQS = "rope_freqs.weight"
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFModel:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        if not is_there(path):
            raise ModelNotFound(f"{path} does not exist; give the path of a .gguf file")
        self.path = path
        self.metadata, self.infos = read_header(path)
        n_files = self.whole("split.count", 1)
        if n_files > 1:
            raise UnsupportedModel(
                f"{path} is one of {n_files} files of a split model; merge them with llama-gguf-split --merge"
            )
        self.family = self.text("general.architecture")
        if self.family not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModel(f"{path} holds architecture {brief(self.family)}; Saguaro reads {known}")
        self.spec = parse_spec(self.config(), source=f"the metadata of {path}")
        self._refuse_unknown_tensors()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        return self.metadata.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """An integer in the metadata; required if there is no default."""
        found = self._value(key, default)
        if type(found) is not int:
            raise self._wrong(key, found, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A number in the metadata; required if there is no default."""
        found = self._value(key, default)
        if type(found) not in (int, float):
            raise self._wrong(key, found, "a number")
        return float(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string in the metadata; required if there is no default."""
        found = self._value(key, default)
        if not isinstance(found, str):
            raise self._wrong(key, found, "a text")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A boolean in the metadata."""
        found = self._value(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, found, "true or false")
        return found

    def special_id(self, role: str) -> int | None:
        """The token of a role: bos, eos, unknown, padding, eot or eom; SentencePiece has default ids for three."""
        usual = {"unknown": 0, "bos": 1, "eos": 2} if self.get("tokenizer.ggml.model") == "llama" else {}
        key = f"tokenizer.ggml.{role}_token_id"
        return self.whole(key, usual.get(role)) if role in usual or key in self.metadata else None

    def config(self) -> dict[str, Any]:
        """The metadata as the content of a Hugging Face config.json."""
        own = self.family
        if self.get(f"{own}.expert_count"):
            raise UnsupportedModel(f"{self.path} is a mixture of experts, which Saguaro does not compute")
        if self.get(f"{own}.attention.sliding_window"):
            raise UnsupportedModel(f"{self.path} uses a sliding window, which Saguaro does not compute")
        if self.number(f"{own}.rope.scale_linear", 1.0) != 1.0:
            raise UnsupportedModel(f"{self.path} has the old rope.scale_linear; convert the model anew")
        ends = {token: None for role in ("eos", "eot", "eom") if (token := self.special_id(role)) is not None}
        heads, hidden = self.whole(f"{own}.attention.head_count"), self.whole(f"{own}.embedding_length")
        head_dim = self.whole(f"{own}.attention.key_length", hidden // max(heads, 1))
        return {
            "architectures": [ARCHITECTURES[own]],
            "model_type": own,
            "num_hidden_layers": self.whole(f"{own}.block_count"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self.whole(f"{own}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self.whole(f"{own}.feed_forward_length"),
            "vocab_size": self._info("token_embd.weight").shape[0],
            "rms_norm_eps": _short(self.number(f"{own}.attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self.whole(f"{own}.context_length"),
            "rope_theta": self.number(f"{own}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": self.whole(f"{own}.rope.dimension_count", head_dim) / max(head_dim, 1),
            "tie_word_embeddings": "output.weight" not in self.infos,
            "attention_bias": own == "llama" and "blk.0.attn_q.bias" in self.infos,
            "hidden_act": "silu",
            "bos_token_id": self.special_id("bos"),
            "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        }

    def check_shapes(self) -> None:
        """Raise unless the file's tensors have the names and shapes that its metadata implies."""
        held = ((self._rename(name), info.shape) for name, info in self.infos.items() if name != ROPE_FREQS)
        Shapes(self.spec).check(held, self.path, "its metadata")

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Every weight, with its Hugging Face name."""
        for info in self.infos.values():
            if info.name != ROPE_FREQS:  # see rope_factors
                name = self._rename(info.name)
                yield name, read_stored(self.path, info, self._n_interleaved(name))

    def parts(self, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Stored | Tensor]]:
        """Every weight, of some only a part. Parts of rows are decoded: a block of weights may lie in two parts."""
        for info in self.infos.values():
            if info.name != ROPE_FREQS:
                name = self._rename(info.name)
                cut, n_heads = cuts.get(name), self._n_interleaved(name)
                if cut is not None and cut.dim == 1:
                    yield name, cut.of(read_stored(self.path, info, n_heads).decoded())
                else:
                    yield name, read_stored(self.path, info, n_heads, cut)

    def rope_factors(self) -> Tensor | None:
        """Per-frequency divisors of the rotary base: how a GGUF file stores llama3 rope scaling. [d / 2] float32"""
        if ROPE_FREQS not in self.infos:
            return None
        shape, n = self.infos[ROPE_FREQS].shape, self.spec.head_dim // 2
        if shape != (n,):
            raise CorruptModel(
                f"{self.path} holds {list(shape)} divisors of rotations; there are {n}: download it again"
            )
        return read_stored(self.path, self.infos[ROPE_FREQS]).decoded()

    def _n_interleaved(self, name: str) -> int:
        """See Stored.n_heads."""
        if self.family != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return 0
        return self.spec.n_heads if ".q_proj." in name else self.spec.n_kv_heads

    def _value(self, key: str, default: object) -> Any:
        found = self.get(key, default)
        if found is None:
            raise CorruptModel(f"{self.path} lacks the metadata {key}; download it again")
        if isinstance(found, list):
            raise UnsupportedModel(f"{self.path} has a list as {key}; Saguaro reads one value for all layers")
        return found

    def _wrong(self, key: str, found: object, wanted: str) -> CorruptModel:
        return CorruptModel(
            f"{self.path} has the metadata {key} {brief(found)}; it must be {wanted}: download it again"
        )

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise CorruptModel(f"{self.path} has no tensor {name!r}; download it again")
        return self.infos[name]

    def _refuse_unknown_tensors(self) -> None:
        """Refuse tensors that the model does not use: ignoring them would change the result (no damaged file)."""
        spec = self.spec
        optional = {f"self_attn.{name}_proj.bias": spec.has_qkv_bias for name in "qkv"}
        optional |= {f"self_attn.{name}_norm.weight": spec.has_qk_norm for name in "qk"}
        optional["self_attn.o_proj.bias"] = spec.has_output_bias
        for name in self.infos.keys() - {ROPE_FREQS}:
            part = self._rename(name).split(".", 3)[-1]
            if not optional.get(part, part.endswith("weight")):
                raise UnsupportedModel(
                    f"{self.path} holds {brief(name)}, which Saguaro's {spec.architecture} does not have"
                )
        if spec.has_output_bias and "blk.0.attn_output.bias" not in self.infos:
            raise UnsupportedModel(
                f"{self.path} has biases of queries and none of the attention's output, which Saguaro's "
                f"{spec.architecture} does not compute"
            )

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.text(f"{self.family}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self.number(f"{self.family}.rope.scaling.factor", 1.0)}

    def _rename(self, name: str) -> str:
        if name in _GLOBAL:
            return _GLOBAL[name]
        parts = name.split(".")  # blk.3.attn_q.weight
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
            return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
        raise UnsupportedModel(
            f"{self.path} holds tensor {brief(name)}, which {ARCHITECTURES[self.family]} does not have"
        )


def _short(value: float) -> float:
    """The shortest decimal of a float32 metadata value: 9.99999974e-06 is 1e-05."""
    with np.errstate(over="ignore"):  # infinite, which parse_spec refuses
        return float(np.format_float_scientific(np.float32(value)))

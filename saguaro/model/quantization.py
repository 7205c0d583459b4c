"""How a model folder says that its matrices are stored in FP8: three layouts, or an error that names what is not read.

layout                                  matrix           scales
quant_method fp8 (Qwen3-FP8, DeepSeek)  NAME in e4m3     NAME_scale_inv: one per block of weight_block_size
compressed-tensors, float-quantized     NAME in e4m3     NAME_scale: one per row, block or matrix
modelopt, quant_algo FP8, FP8_PB_WO ... NAME in e4m3     NAME_scale: one per matrix, block or row

Only weights are dequantised; activations stay in the dtype of computation, where they are more precise than these
layouts ask for. Which matrices are stored so is read from the tensors: the layouts also list modules that are not.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.files import AGAIN, brief, is_there, read_json
from saguaro.model.scaled import Modules, Scheme

FILE = "hf_quant_config.json"  # ModelOpt's, beside config.json
E4M3 = "F8_E4M3"
READS = (
    "FP8 (e4m3) is read as blocks (quant_method fp8), rows, blocks or whole matrices (compressed-tensors with dynamic "
    "activations), and whole matrices, blocks or rows (ModelOpt): use such a checkpoint, use the unquantised "
    "checkpoint or a GGUF file"
)
ALGORITHMS = {"FP8": (None, None), "FP8_PER_CHANNEL_PER_TOKEN": (1, None), "FP8_PB_WO": (128, 128)}  # their blocks
MOST_PATTERNS = 1000  # with wildcards, in a list of modules
_REGEX = "re:"  # begins a regular expression in compressed-tensors' lists


def read_quantization(folder: Path) -> Scheme | None:
    """How the matrices of a model folder are stored, by its config.json or ModelOpt's own file; None: as they are."""
    config, own = folder / "config.json", folder / FILE
    said = parse_quantization(read_json(config).get("quantization_config"), str(config))
    if not is_there(own):
        return said
    also = parse_quantization(_of_modelopt(read_json(own), str(own)), str(own))
    if said is not None and also is not None and replace(said, kept=Modules()) != replace(also, kept=Modules()):
        raise CorruptModel(f"{own} says {also.name}, and config.json {said.name}: they do not agree; {AGAIN}")
    return said or also


def parse_quantization(about: object, source: str = "config.json") -> Scheme | None:
    """The scheme of a `quantization_config`; None if there is none. Raise if it is not supported.

    >>> parse_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}).name
    'FP8 (e4m3), a scale per block of 128 x 128'
    """
    if not about:
        return None
    if not isinstance(about, dict):
        raise CorruptModel(f"{source} says quantization_config is {brief(about)}; it is an object: {AGAIN}")
    method = about.get("quant_method", "modelopt" if "quant_algo" in about else "unknown")
    read = {"fp8": _blocks, "compressed-tensors": _compressed, "modelopt": _modelopt}.get(str(method).lower())
    if read is None:
        raise _unsupported(f"quantisation {brief(method)}", source)
    try:
        return read(about, source)
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        raise CorruptModel(f"{source} has no complete quantization_config of {method} ({e!r}); {AGAIN}") from e


def _blocks(about: Mapping[str, Any], source: str) -> Scheme:
    """Qwen3-FP8 and DeepSeek."""
    if about.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(f"FP8 of fmt {brief(about['fmt'])}", source)
    if about.get("activation_scheme", "dynamic") != "dynamic":
        scheme = brief(about["activation_scheme"])
        raise _unsupported(
            f"FP8 with the activation_scheme {scheme}, which quantises activations ahead of time", source
        )
    sizes = about.get("weight_block_size", [128, 128])
    if sizes is None:
        raise _unsupported("quant_method fp8 with the weight_block_size null", source)
    block = _block(sizes, "weight_block_size")
    kept = about.get("modules_to_not_convert") or about.get("ignored_layers")
    return Scheme(_named(block), E4M3, "_scale_inv", block, kept=_modules(kept))


def _compressed(about: Mapping[str, Any], source: str) -> Scheme:
    """compressed-tensors, as LLM Compressor writes it."""
    layout = about.get("format", "unknown")
    if layout not in ("float-quantized", "naive-quantized"):
        raise _unsupported(f"compressed-tensors of format {brief(layout)}", source)
    sparsity = about.get("sparsity_config") or {}
    is_dense = sparsity.get("format", "dense") == "dense"
    for key in ("kv_cache_scheme", "transform_config", *(() if is_dense else ("sparsity_config",))):
        if about.get(key):
            raise _unsupported(f"compressed-tensors with a {key}", source)
    schemes = [_group(group, source) for group in about["config_groups"].values()]
    if len(set(schemes)) != 1:
        raise _unsupported(f"compressed-tensors with {len(set(schemes))} different config_groups", source)
    return replace(schemes[0], kept=_modules(about.get("ignore")))


def _group(group: Mapping[str, Any], source: str) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    for what, each in (("weights", weights), ("input_activations", inputs)):
        if each is not None and (each["type"], each["num_bits"]) != ("float", 8):
            kind = f"{brief(each['num_bits'])}-bit {brief(each['type'])}"
            raise _unsupported(f"compressed-tensors with {what} of {kind}", source)
    if inputs is not None and inputs.get("dynamic") is not True:
        raise _unsupported("compressed-tensors with static FP8 activations", source)
    if group.get("output_activations"):
        raise _unsupported("compressed-tensors with quantised output_activations", source)
    if not weights.get("symmetric", True):
        raise _unsupported("compressed-tensors with weights that are not symmetric", source)
    if group.get("format") not in (None, "float-quantized", "naive-quantized"):
        raise _unsupported(f"compressed-tensors of format {brief(group['format'])}", source)
    return _with_scales(_strategy(weights, source))


def _strategy(weights: Mapping[str, Any], source: str) -> tuple[int | None, int | None]:
    """The blocks of a strategy of compressed-tensors."""
    default = "channel" if weights.get("group_size") == -1 else "tensor"
    found = weights.get("strategy") or default
    if found == "block":
        blocks = weights["block_structure"]
        in_words = re.fullmatch(r"(\d{1,9})x(\d{1,9})", blocks) if isinstance(blocks, str) else None
        return _block([int(n) for n in in_words.groups()] if in_words else blocks, "block_structure")
    if found not in ("channel", "tensor"):
        raise _unsupported(f"compressed-tensors with weights of strategy {brief(found)}", source)
    return (1, None) if found == "channel" else (None, None)


def _modelopt(about: Mapping[str, Any], source: str) -> Scheme:
    """NVIDIA's ModelOpt: its own object, or one inside of it."""
    about = {**about, **(about.get("quantization") or {})}
    algorithm = about.get("quant_algo", "unknown")
    block = ALGORITHMS.get(str(algorithm).upper())
    if block is None:
        raise _unsupported(f"ModelOpt's quant_algo {brief(algorithm)}", source)
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        if about.get(key):
            raise _unsupported(f"ModelOpt with quantised keys and values ({key})", source)
    kept = _modules(about.get("exclude_modules") or about.get("ignore"))
    return replace(_with_scales(block), unread=(".input_scale",), kept=kept)


def _of_modelopt(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The `quantization` object of hf_quant_config.json, as a quantization_config."""
    found = content.get("quantization")
    if not isinstance(found, dict):
        raise CorruptModel(f"{source} says quantization is {brief(found)}; it is an object: {AGAIN}")
    return {**found, "quant_method": "modelopt"}


def _with_scales(block: tuple[int | None, int | None]) -> Scheme:
    return Scheme(_named(block), E4M3, "_scale", block)


def _named(block: tuple[int | None, int | None]) -> str:
    rows, columns = block
    per = "matrix" if rows is None else "row" if columns is None else f"block of {rows} x {columns}"
    return f"FP8 (e4m3), a scale per {per}"


def _block(found: object, key: str) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise ValueError(f"{key} is {brief(found)}; it must be two whole numbers of at least 1")
    return found[0], found[1]


def _modules(found: object) -> Modules:
    """A list of modules. Its regular expressions are left out: those of a file could take forever."""
    if found is not None and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise TypeError(f"the list of modules that are not converted is {brief(found)}")
    names = [name for name in found or () if not name.startswith(_REGEX)]
    patterns = tuple(name for name in names if "*" in name)
    if len(patterns) > MOST_PATTERNS:
        raise ValueError(f"{len(patterns)} modules with wildcards are not converted; at most {MOST_PATTERNS} are read")
    return Modules(frozenset(names), patterns)


def _unsupported(what: str, source: str) -> UnsupportedModel:
    return UnsupportedModel(f"{source}: {what} is not supported; {READS}")

"""Writes tiny checkpoints in FP8, in the layouts that Saguaro reads, and the plain model that each of them is."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from saguaro.model.tiny import tiny_model, tiny_tokenizer

LARGEST = 448.0  # of e4m3
Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written."""

    block: Block  # None: all rows or columns
    scale: str  # the end of a scale's name
    about: dict[str, Any]  # quantization_config, but the list of modules
    kept_key: str  # the list's name
    kept: tuple[str, ...] = ("lm_head", "model.layers.0.mlp.down_proj")  # as the layout writes names
    is_kept: Callable[[str], bool] = lambda module: module.endswith("layers.0.mlp.down_proj")
    shaped: Callable[[Tensor], Tensor] = lambda scales: scales  # from [blocks downwards, blocks across]
    file: str = "config.json"
    beside: dict[str, Tensor] = field(default_factory=dict)  # other tensors of every matrix, by the end of their name

    def __str__(self) -> str:
        return str(self.about["quant_method"])


def blocks(rows: int, columns: int, **more: Any) -> Layout:
    """As Qwen3-FP8 and DeepSeek."""
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    return Layout((rows, columns), "_scale_inv", about, "modules_to_not_convert", **more)


def compressed(strategy: str, block: Block, **more: Any) -> Layout:
    """As LLM Compressor."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    about = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }
    kept = ("lm_head", "re:.*layers\\.0\\.mlp\\.down_proj$")
    return Layout(block, "_scale", about, "ignore", **{"kept": kept, **more})


def modelopt(algorithm: str, block: Block, *, own_file: bool, **more: Any) -> Layout:
    """As NVIDIA's ModelOpt."""
    about: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if not own_file:
        about["quant_method"] = "modelopt"
    file, key = ("hf_quant_config.json", "exclude_modules") if own_file else ("config.json", "ignore")
    beside = {".input_scale": torch.tensor(0.02)}
    kept = ("lm_head", "*layers.0.mlp.down*")
    return Layout(block, "_scale", about, key, file=file, beside=beside, kept=kept, **more)


LAYOUTS = {
    "blocks": blocks(128, 128),
    "blocks-of-bfloat16-scales": blocks(128, 128, shaped=lambda scales: scales.bfloat16()),
    "blocks-that-do-not-divide": blocks(24, 40),
    "rows": compressed("channel", (1, None)),
    "rows-without-a-second-size": compressed("channel", (1, None), shaped=lambda scales: scales.flatten()),
    "compressed-blocks": compressed("block", (128, 128)),
    "compressed-matrices": compressed("tensor", (None, None), shaped=lambda scales: scales.flatten()),
    "modelopt": modelopt("FP8", (None, None), own_file=True, shaped=lambda scales: scales.reshape(())),
    "modelopt-in-config": modelopt("FP8", (None, None), own_file=False, shaped=lambda scales: scales.reshape(())),
    "modelopt-blocks": modelopt("fp8_pb_wo", (128, 128), own_file=True, shaped=lambda scales: scales[:, None, :, None]),
    "modelopt-rows": modelopt("FP8_PER_CHANNEL_PER_TOKEN", (1, None), own_file=True, shaped=lambda s: s.flatten()),
}
SIZES = {"hidden_size": 192, "intermediate_size": 320}  # blocks of 128 x 128 do not divide them


def quantised(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The steps in e4m3, and the scales [blocks downwards, blocks across] in bfloat16's values."""
    n, m = weight.shape
    height, width = block[0] or n, block[1] or m
    bands = weight.split(height, 0)
    scales = torch.stack([torch.stack([each.abs().max() for each in band.split(width, 1)]) for band in bands]) / LARGEST
    scales = scales.bfloat16().float()
    return (weight / spread(scales, height, width, n, m)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, height: int, width: int, n: int, m: int) -> Tensor:  # [n, m]
    """The scale of every weight."""
    return scales.repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :m].contiguous()


def write_fp8(folder: Path, family: str, layout: Layout, *, n_files: int = 1, **overrides: Any) -> Any:
    """Write a checkpoint and its tokenizer; the transformers model with the weights that the quantisation left."""
    model = tiny_model(family, **{**SIZES, **overrides})
    folder.mkdir(parents=True, exist_ok=True)
    save_fp8(folder, model, layout, n_files)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return model


def save_fp8(folder: Path, model: Any, layout: Layout, n_files: int = 1) -> None:
    """Write a model's checkpoint, and leave in the model the weights that the quantisation left."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or ".layers." not in name or layout.is_kept(module):
            tensors[name] = weight.data
            continue
        steps, scales = quantised(weight.data, layout.block)
        (n, m), (height, width) = weight.shape, layout.block
        weight.data = steps.float() * spread(scales, height or n, width or m, n, m)
        tensors |= {name: steps, name + layout.scale: layout.shaped(scales).clone()}
        tensors |= {module + end: tensor.clone() for end, tensor in layout.beside.items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    _save(tensors, folder, n_files)
    _write_config(folder, model.config, layout)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint of one file."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _write_config(folder: Path, config: Any, layout: Layout) -> None:
    about = {**layout.about, layout.kept_key: list(layout.kept)}
    content = {**config.to_dict(), "architectures": [type(config).__name__.removesuffix("Config") + "ForCausalLM"]}
    if layout.file == "config.json":
        content["quantization_config"] = about
    else:
        whole = {"producer": {"name": "modelopt", "version": "0.1"}, "quantization": about}
        (folder / layout.file).write_text(json.dumps(whole))
    (folder / "config.json").write_text(json.dumps(content))


def _save(tensors: dict[str, Tensor], folder: Path, n_files: int) -> None:
    """Tensors go to the files in turn, so that matrices and their scales are in different ones."""
    if n_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names: Sequence[str] = list(tensors)
    files = [f"model-{at + 1:05d}-of-{n_files:05d}.safetensors" for at in range(n_files)]
    for at, file in enumerate(files):
        save_file({name: tensors[name] for name in names[at::n_files]}, folder / file)
    places = {name: files[at % n_files] for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

"""An EAGLE-3 head for a target: begun from the target or from another head, and written in the layout of SafeAILab and
SpecForge.

    config.json          architectures LlamaForCausalLMEagle3; the sizes of its layer; the layers that it reads
    model.safetensors    fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding: it is the target's

Engines number layers in two ways (saguaro.model.eagle_config). Both lists are written, each where its readers look:
outputs in eagle_config, inputs at the top.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro import rng
from saguaro.distill.student import config_of, half_for, write_draft
from saguaro.errors import ConfigError
from saguaro.model.eagle import Eagle
from saguaro.model.eagle_config import IDS, LEAST_LAYERS, EagleSpec, default_taps, read_eagle_spec
from saguaro.model.feature_config import reads_features
from saguaro.model.feature_files import FeatureFiles, load_feature_draft, places, stored_name
from saguaro.model.load import Loaded
from saguaro.model.shapes import EMBEDDING, HEAD
from saguaro.model.spec import ModelSpec
from saguaro.model.token_map import fault
from saguaro.model.transformer import Transformer

ARCHITECTURE = "LlamaForCausalLMEagle3"
FIRST_STATE = 0.1  # a new head's states are this much of the highest feature: its layer can soon change what it says
MOST_ROUNDED = 0.01  # an embedding in a file may differ from the target's by rounding


def pick_taps(n_layers: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers of the target whose input a new head reads; None: the usual ones.

    >>> pick_taps(32, None), pick_taps(4, [1, 3])
    ((2, 16, 29), (1, 3))
    """
    found = default_taps(n_layers) if layers is None else tuple(layers)
    if found is None:
        raise ConfigError(
            f"the target has {n_layers} layers, and the usual feature layers, 2, L // 2 and L - 3, need at least "
            f"{LEAST_LAYERS}; give feature_layers"
        )
    if not found or not all(1 <= layer <= n_layers for layer in found):
        raise ConfigError(
            f"feature_layers is {list(found)}; give layers from 1 to {n_layers}, whose input is read ({n_layers}: the "
            "output of the last)"
        )
    return found


def make_head(target: Transformer, taps: Sequence[int], ids: Tensor, seed: int) -> Eagle:  # [head rows] int64
    """A new head with rows for these tokens. It begins with the target's last norm and rows of its head, and with
    a part of the highest feature as the state; its layer is random, with small outputs."""
    wrong = fault(ids, target.spec.n_vocab)
    if wrong is not None:
        raise ConfigError(f"the draft's head {wrong}")
    assert target.token_map is None, "rows of the head are tokens"
    eagle = EagleSpec(
        layers=_layer_of(target.spec),
        taps=tuple(taps),
        target_hidden=target.spec.hidden,
        n_draft_vocab=len(ids),
        norm_before_residual=False,
        feeds_normed=False,
        norms_features=False,
        logit_scale=1.0,
    )
    head = Eagle(eagle, target.device, torch.float32, token_map=ids, embedding=target.embedding)
    _begin(head, target, seed)
    return head


def load_head(folder: Path, target: Loaded) -> Eagle:
    """An EAGLE-3 draft of this target, in float32, to train on."""
    model = target.model
    if reads_features(folder) != EagleSpec.name:
        raise ConfigError(f"start is {folder}, which is no EAGLE-3 draft; give the folder of one, or leave start out")
    files = FeatureFiles(folder, read_eagle_spec(folder, model.spec))
    if min(files.reads.taps) < 1:
        raise ConfigError(f"start is {folder}, which reads the target's embedding as a feature; this is not written")
    own = None if files.has_embedding else model.embedding
    lent = None if files.has_head else model.head
    head = load_feature_draft(files, model.device, torch.float32, None, embedding=own, head=lent)
    assert isinstance(head, Eagle)
    if files.has_embedding:
        if head.embedding.shape != model.embedding.shape or _differ(head.embedding, model.embedding):
            raise ConfigError(
                f"start is {folder}, whose embedding is not its target's; a head with its own is not made"
            )
        del head.embedding
        head.embedding = model.embedding
    return head


@torch.no_grad()
def with_rows(head: Eagle, target: Transformer, ids: Tensor) -> Eagle:  # [head rows] int64
    """The draft with a head of these tokens: rows that it has are kept, the others are copied from the target."""
    eagle = replace(head.reads, n_draft_vocab=len(ids))
    has_fc = head.fc is not None
    changed = Eagle(eagle, head.device, head.dtype, token_map=ids, has_fc=has_fc, embedding=head.embedding)
    theirs = places(head)
    for name, place in places(changed).items():
        if name not in (EMBEDDING, HEAD):
            place.copy_(theirs[name])
    changed.head.matrix.copy_(target.head.matrix.index_select(1, ids.to(target.device)))
    if head.token_map is not None:
        row = torch.full((target.spec.n_vocab,), -1, device=head.device)
        row[head.token_map] = torch.arange(len(head.token_map), device=head.device)
        row = row[ids.to(head.device)]
        changed.head.matrix[:, row >= 0] = head.head.matrix[:, row[row >= 0]]
    return changed


def save_head(head: Eagle, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder for `--draft`, in this dtype (None: the half precision that loses less)."""
    ids, n_layers = head.token_map, head.spec.n_layers
    assert ids is not None
    weights = {name: place for name, place in places(head).items() if name != EMBEDDING}
    dtype = dtype or half_for(weights)
    tensors = {stored_name(name, n_layers): weight.to(dtype) for name, weight in weights.items()}
    ids = ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(head.spec.n_vocab, dtype=torch.bool).index_fill_(0, ids, True)
    write_draft(folder, tensors, {**config_of_head(head.reads), "torch_dtype": str(dtype).removeprefix("torch.")})


def config_of_head(eagle: EagleSpec) -> dict[str, Any]:
    """The content of config.json, which read_eagle_spec reads as this spec."""
    plain = config_of(eagle.layers)
    rope = dict(plain["rope_parameters"])
    theta = rope.pop("rope_theta")
    flags = {"fc_norm": eagle.norms_features, "norm_output": eagle.feeds_normed, "logit_scale": eagle.logit_scale}
    usual = {"fc_norm": False, "norm_output": False, "logit_scale": 1.0}
    found = {
        **plain,
        "architectures": [ARCHITECTURE],
        "rope_theta": theta,  # as older readers have it
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "draft_vocab_size": eagle.n_draft_vocab,
        "target_hidden_size": eagle.target_hidden,
        "num_aux_hidden_states": len(eagle.taps),
        "norm_before_residual": eagle.norm_before_residual,
        **{name: value for name, value in flags.items() if value != usual[name]},
        "eagle_config": {IDS: [tap - 1 for tap in eagle.taps], "use_aux_hidden_state": True},
        IDS: list(eagle.taps),
    }
    return {name: value for name, value in found.items() if value is not None}


def _layer_of(target: ModelSpec) -> ModelSpec:
    """One layer of the target's sizes, as Llama has it."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        n_layers=1,
        hidden=target.hidden,
        n_heads=target.n_heads,
        n_kv_heads=target.n_kv_heads,
        head_dim=target.head_dim,
        intermediate=target.intermediate,
        n_vocab=target.n_vocab,
        norm_eps=target.norm_eps,
        max_length=target.max_length,
        rope=target.rope,
        is_tied=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        eos_ids=(),
    )


@torch.no_grad()
def _begin(head: Eagle, target: Transformer, seed: int) -> None:
    """See make_head. Random numbers are drawn on the CPU, so that they are the same on any device."""
    draw = torch.Generator().manual_seed(rng.derive_seed(seed, 0))
    assert head.fc is not None
    assert head.token_map is not None
    for name, place in sorted(places(head).items()):
        if place.dim() == 1:
            place.fill_(1.0)
        elif name not in (EMBEDDING, HEAD):
            gain = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            place.copy_(torch.empty(place.shape).normal_(0.0, gain * place.shape[1] ** -0.5, generator=draw))
    d = head.spec.hidden
    head.fc.matrix.zero_()
    head.fc.matrix[-d:].copy_(FIRST_STATE * torch.eye(d))  # [F, D]
    head.norm.load_state_dict(target.norm.state_dict())
    head.head.matrix.copy_(target.head.matrix.index_select(1, head.token_map))


def _differ(one: Tensor, other: Tensor) -> bool:
    return float((one.float() - other.float()).abs().max()) > MOST_ROUNDED * float(other.float().abs().max())

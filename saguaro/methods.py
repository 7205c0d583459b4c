"""Builds the draft side of a method from its row in the table (saguaro.method)."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch

from saguaro.config import DraftConfig
from saguaro.device.graphs import bucket, captured_sizes
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.combined import Combined, ModelDrafter
from saguaro.draft.drafter import Drafter, NoDrafter
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.growth import Shape
from saguaro.draft.ngram import Ngram
from saguaro.draft.planner import make_planner
from saguaro.draft.policy.critical import BatchSizeMisses
from saguaro.draft.policy.depth import MeasuredDepth
from saguaro.draft.policy.free import FreeFirst, FreeMisses
from saguaro.draft.policy.kept import Kept
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import FixedMisses, MeasuredMisses, Misses, NoProposer
from saguaro.draft.policy.policy import Policy
from saguaro.draft.policy.prepare import AlwaysPrepare, MeasuredPrepare, NeverPrepare, Prepares
from saguaro.draft.random import RandomTokens
from saguaro.draft.ranking import Draws
from saguaro.draft.rows import Proposer
from saguaro.draft.suffix import Suffix
from saguaro.kernels.best import ranker_for
from saguaro.kernels.bundle import Kernels, kernels_for
from saguaro.kv.memory import KVPlan
from saguaro.method import METHODS, MODEL_FALLBACKS, Method, find_method
from saguaro.model.dflash import DFlash
from saguaro.model.dflash_config import DFlashSpec
from saguaro.model.grammar import Grammars
from saguaro.model.tokenizer import load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide
from saguaro.target.grammar import Start
from saguaro.target.sampler import Sampler

log = logging.getLogger(__name__)

N_CHILDREN = 8  # candidates kept after a node, at least

__all__ = ["METHODS", "Method", "draft_shape", "draft_side", "find_method"]


def draft_side(
    config: DraftConfig,
    model: Transformer | None,
    kernels: Kernels | None = None,
    start: Start | None = None,
    *,
    reads_prompts: bool = True,
) -> DraftSide:
    """Build the draft side of a method. With kernels, its steps are captured. start comes from the target side if it
    runs in the same process; reads_prompts: see DraftSide."""
    if start is None:
        tokenizer = partial(load_tokenizer, Path(config.tokenizer), config.n_text)
        start = Grammars(tokenizer, config.n_vocab, config.ends).start
    drafter: Drafter = NoDrafter()
    primary: Proposer = NoProposer()
    suffix = None
    if config.suffix or config.fallback == "suffix":
        drafter = suffix = Suffix(draft_shape(config), config.n_vocab, config.suffix_store)
    if model is not None:
        model_drafter = _model_drafter(config, model, kernels)
        drafter = primary = model_drafter
        if suffix is not None:
            completes = config.verification == "shared" and config.growth in ("nothing", "best")
            drafter = primary = Combined(model_drafter, suffix, draft_shape(config), completes=completes)
    policy, kept = _policy(config, primary, drafter, suffix)
    return DraftSide(
        drafter,
        policy,
        lookahead=config.most_nodes,
        n_vocab=config.n_vocab,
        start=start,
        read_s=config.read_s,
        kept=kept,
        reads_prompts=reads_prompts,
    )


def warm_side(config: DraftConfig, model: Transformer | None, start: Start | None = None) -> DraftSide:
    """The draft side for this config's device. On a GPU its steps are captured now, not in the first rounds."""
    kernels = kernels_for(torch.device(config.device))
    side = draft_side(config, model, kernels, start)
    for size in captured_sizes(config.max_rows) if kernels is not None else ():
        side.warm(size)
    return side


def draft_shape(config: DraftConfig) -> Shape:
    """How the trees of a method grow."""
    budget = {"nothing": 0, "continuation": 1, "list": sum(config.fan_out)}.get(config.growth, config.budget)
    n_children = N_CHILDREN if config.growth == "best" else max(N_CHILDREN, budget + 1)  # + 1: one is in flight
    return Shape(config.lookahead, config.most_nodes, config.width, budget, n_children)


def _model_drafter(config: DraftConfig, model: Transformer, kernels: Kernels | None) -> ModelDrafter:
    draws = None
    if config.verification == "rejection":
        n = 1 if draft_shape(config).is_chain else draft_shape(config).n_children
        draws = Draws(config.saguaro_c, config.generation, model.device, n=n, kernels=kernels)
    kv, sampler, shape = _kv(config, model), Sampler(config.n_vocab, ranker_for(model.device)), draft_shape(config)
    planner = make_planner(config.growth, config.fan_out, bucket(config.max_rows))
    if isinstance(model.reads, DFlashSpec):
        block = partial(BlockDrafter, cast(DFlash, model), kv, sampler, shape, max_rows=config.max_rows)
        return block(planner=planner, draws=draws, cut=config.cut, kernels=kernels)
    tree = partial(TreeDrafter, model, kv, sampler, shape, max_rows=config.max_rows, n_known=config.n_vocab)
    return tree(planner=planner, draws=draws, cut=config.cut, kernels=kernels)


def _kv(config: DraftConfig, model: Transformer) -> KVPlan:
    """Room for the target's tokens and for the speculation of each row."""
    n_tokens = config.n_tokens + config.max_rows * 2 * (config.lookahead + 1 + config.page_size)
    per_token = model.spec.kv_bytes_per_token(model.dtype)
    return KVPlan(-(-n_tokens // config.page_size), config.page_size, per_token, model.spec.max_length)


def _policy(
    config: DraftConfig, primary: Proposer, drafter: Drafter, suffix: Suffix | None
) -> tuple[Policy, Kept | None]:
    """The policy, as it was kept if it was, and where it will be kept."""
    policy = make_policy(config, primary, suffix)
    if not config.learnt:
        return policy, None
    kept = Kept(Path(config.learnt), json.loads(config.learnt_facts), policy.learnt.now)
    state = kept.read()
    if state is None:
        return policy, kept
    try:
        policy.restore(state["policy"])
        drafter.restore(state["drafter"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        log.warning("%s is ignored, it is damaged: %r", kept.path, e)
        return make_policy(config, primary, suffix), kept
    return policy, kept


def make_policy(config: DraftConfig, primary: Proposer, suffix: Suffix | None = None) -> Policy:
    """What decides on the draft's side of a method. suffix: drafts for free, alone or before the primary."""
    by_model = primary if isinstance(primary, TreeDrafter | BlockDrafter | Combined) else None
    learnt = Learnt(is_prepared_alike=by_model is None or by_model.is_prepared_alike)
    misses: dict[str, Callable[[], Misses]] = {
        "empty": lambda: FixedMisses(NoProposer()),
        "draft": lambda: FixedMisses(primary),
        "ngram": lambda: FixedMisses(Ngram()),
        "random": lambda: FixedMisses(RandomTokens(config.n_vocab)),
        "batch": lambda: BatchSizeMisses(primary, Ngram(), learnt.now),
        "batch-random": lambda: BatchSizeMisses(primary, RandomTokens(config.n_vocab), learnt.now),
        "measured": lambda: _measured(primary, None if config.suffix else Ngram(), learnt),
        "suffix": lambda: FreeMisses(_free(suffix), learnt),
    }
    prepares: dict[str, Callable[[], Prepares]] = {
        "always": AlwaysPrepare,
        "measured": lambda: MeasuredPrepare(learnt),
        "never": NeverPrepare,
    }
    chosen = misses[config.fallback]()
    if config.suffix and config.fallback in MODEL_FALLBACKS:
        chosen = FreeFirst(_free(suffix), chosen, learnt)
    elif config.suffix and config.fallback == "empty":
        chosen = FreeMisses(_free(suffix), learnt)
    depth = None
    if config.fallback == "measured" and config.growth == "best" and isinstance(primary, TreeDrafter | BlockDrafter):
        depth = MeasuredDepth(primary, learnt)
    return Policy(learnt, chosen, prepares[config.prepare](), depth)


def _measured(primary: Proposer, backup: Proposer | None, learnt: Learnt) -> Misses:
    assert isinstance(primary, TreeDrafter | BlockDrafter | Combined)
    return MeasuredMisses(primary, backup, learnt)


def _free(suffix: Suffix | None) -> Suffix:
    assert suffix is not None
    return suffix

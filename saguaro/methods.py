"""Builds the draft side of a method from its row in the table."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from saguaro.config import DraftConfig
from saguaro.device.graphs import bucket
from saguaro.draft.cache import SpeculationCache, TreeCache
from saguaro.draft.graphed import GraphDrafter
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.growth import Shape
from saguaro.draft.model import Drafter, ModelDrafter, NoModel
from saguaro.draft.ngram import Ngram
from saguaro.draft.planner import make_planner
from saguaro.draft.policy.adaptive import AdaptiveFallback, AdaptiveGrowth
from saguaro.draft.policy.fallback import BatchSizeFallback, Fallback, FixedFallback, MeasuredFallback, NoProposer
from saguaro.draft.policy.prepare import AlwaysPrepare, MeasuredPrepare, NeverPrepare, PreparePolicy
from saguaro.draft.random import RandomTokens
from saguaro.draft.ranking import Ranker, SampledRanker, SharedRanker
from saguaro.draft.rows import Proposer
from saguaro.kernels.best import ranker_for
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVPlan
from saguaro.method import METHODS, Method, find_method
from saguaro.model.grammar import Grammars
from saguaro.model.tokenizer import load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide
from saguaro.target.grammar import Start
from saguaro.target.sampler import Sampler

__all__ = ["METHODS", "Method", "draft_side", "find_method"]


def draft_side(
    config: DraftConfig, model: Transformer | None, kernels: Kernels | None = None, start: Start | None = None
) -> DraftSide:
    """Build the draft side of a method. With kernels, its steps are captured where possible. start comes from the
    target side if it runs in the same process."""
    if start is None:
        tokenizer = partial(load_tokenizer, Path(config.tokenizer), config.n_text)
        start = Grammars(tokenizer, config.n_vocab, config.ends).start
    drafter: Drafter = NoModel()
    primary: Proposer = NoProposer()
    is_tree = config.width > 0
    is_plain = kernels is not None and config.verification == "shared" and config.cut == 0
    joint = kernels.joint if kernels and is_plain else None
    # Without trees, the likeliest outcomes of a chain take the place of growing.
    name = "joint" if config.planner == "grow" else config.planner
    planner = None if is_tree else make_planner(name, joint, bucket(config.max_rows))
    cache: SpeculationCache | TreeCache = SpeculationCache()
    if model is not None and is_tree:
        drafter = primary = trees = _tree_drafter(config, model, kernels)
        cache = TreeCache(trees)
    elif model is not None:
        drafter = primary = eager = _model_drafter(config, model, kernels)
        if kernels is not None and is_plain and (planner is None or planner.is_fixed):
            drafter = primary = _graph_drafter(config, model, eager, kernels)
    economies: dict[str, Callable[[], PreparePolicy]] = {
        "always": AlwaysPrepare,
        "measured": MeasuredPrepare,
        "never": NeverPrepare,
    }
    return DraftSide(
        drafter,
        planner,
        _fallback(config, primary, isinstance(drafter, GraphDrafter) or (is_tree and kernels is not None)),
        economies[config.prepare](),
        lookahead=config.most_nodes,
        n_vocab=config.n_vocab,
        start=start,
        cache=cache,
        read_s=config.read_s,
    )


def _tree_drafter(config: DraftConfig, model: Transformer, kernels: Kernels | None) -> TreeDrafter:
    return TreeDrafter(
        model,
        _kv(config, model),
        Sampler(config.n_vocab, ranker_for(model.device)),
        Shape(config.lookahead, config.most_nodes, config.width),
        max_rows=config.max_rows,
        n_known=config.n_vocab,
        n_grown=config.budget if config.planner == "grow" else 0,
        kernels=kernels,
    )


def _kv(config: DraftConfig, model: Transformer) -> KVPlan:
    """Room for the target's tokens and for the speculation of each row."""
    n_tokens = config.n_tokens + config.max_rows * 2 * (config.lookahead + 1 + config.page_size)
    per_token = model.spec.kv_bytes_per_token(model.dtype)
    return KVPlan(-(-n_tokens // config.page_size), config.page_size, per_token, model.spec.max_length)


def _graph_drafter(config: DraftConfig, model: Transformer, eager: ModelDrafter, kernels: Kernels) -> GraphDrafter:
    sizes = {"max_rows": config.max_rows, "lookahead": config.lookahead, "budget": config.budget}
    return GraphDrafter(eager, model, kernels, n_known=config.n_vocab, longest=eager.longest, **sizes)


def _model_drafter(config: DraftConfig, model: Transformer, kernels: Kernels | None) -> ModelDrafter:
    sampler = Sampler(config.n_vocab, ranker_for(model.device))
    n_candidates = config.budget + 1 if config.planner != "nothing" else 1  # + 1: the token in flight is no bonus
    guess: Ranker = SharedRanker(sampler, n_candidates)
    if config.verification == "rejection":
        fan_out = max(1, round(config.budget / (config.lookahead + 1)))
        guess = SampledRanker(sampler, n_candidates, fan_out, config.saguaro_c, config.generation)
    sizes = {"max_rows": config.max_rows, "lookahead": config.lookahead, "budget": config.budget}
    return ModelDrafter(model, guess, _kv(config, model), cut=config.cut, kernels=kernels, **sizes)


def _measured(primary: Proposer, is_captured: bool) -> Fallback:
    if is_captured:
        return MeasuredFallback(primary, Ngram())
    if isinstance(primary, TreeDrafter):
        return AdaptiveGrowth(primary, Ngram())
    assert isinstance(primary, ModelDrafter)
    return AdaptiveFallback(primary, Ngram())


def _fallback(config: DraftConfig, primary: Proposer, is_captured: bool) -> Fallback:
    parts: dict[str, Callable[[], Fallback]] = {
        "empty": lambda: FixedFallback(NoProposer()),
        "draft": lambda: FixedFallback(primary),
        "ngram": lambda: FixedFallback(Ngram()),
        "random": lambda: FixedFallback(RandomTokens(config.n_vocab)),
        "batch": lambda: BatchSizeFallback(primary, Ngram()),
        # a captured draft takes all its steps regardless of the requested length
        "measured": lambda: _measured(primary, is_captured),
    }
    return parts[config.fallback]()

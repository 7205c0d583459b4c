"""The runner of a target, built from numbers, so that every rank of a divided target builds the same one."""

from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import Runner, make_runner
from saguaro.target.graphed import captured_steps


@dataclass(frozen=True, kw_only=True)
class RunnerShape:
    """The sizes of a runner's KV memory and of its captured steps."""

    n_pages: int
    page_size: int
    max_length: int  # longest text that the configuration allows
    max_rows: int
    depth: int  # most tokens of a chain, most depth of a tree
    nodes: int  # most nodes of a tree
    n_known: int  # number of tokens that the target can emit


def build_runner(model: Transformer, shape: RunnerShape, kernels: Kernels | None, taps: Sequence[int] = ()) -> Runner:
    """Allocate the KV memory of the model, or of the rank's heads, and make a runner."""
    per_token = model.own_spec.kv_bytes_per_token(model.dtype)
    plan = KVPlan(shape.n_pages, shape.page_size, per_token, shape.max_length)
    cache = KVCache(plan, model.own_spec, model.device, model.dtype)
    sizes = {"max_rows": shape.max_rows, "depth": shape.depth, "nodes": shape.nodes}
    sizes |= {"n_known": shape.n_known, "longest": plan.longest}
    captured = captured_steps(kernels, cache, **sizes) if kernels else None
    return make_runner(model, cache, kernels, plan.longest, captured, taps)

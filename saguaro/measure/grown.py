"""Grown models: a small model embedded in a larger Llama shape, with the cost of the larger and the text of the small.

The source's channels, heads, neurons and layers are copied into the larger shape; the remaining parts are noise that
reads the residual stream like the real parts. Its output is scaled by epsilon: at 0 the grown model equals the source
up to rounding; a larger epsilon gives less agreement. A target with noise and a draft without noise form a pair with
the costs of the real shapes and a realistic acceptance rate on real prompts.

channels  |-- source, d --|-- zero in the embedding, written by noise only, D - d --|   norm weights * sqrt(d / D)
head      | 0 . 1 . 2 . 3 . |                 every r-th: the same rotary frequencies;  queries * sqrt(r)
neurons   |-- source --|-- noise --|
layers    | source | noise | source | source | noise ...                                spread evenly

Noise entries have the size of the source's entries in that layer, so activations have the same size. With epsilon 1
the noise of all layers together is a quarter (UNIT) of what the source's layers write, assuming independent entries,
for every shape. For SmolLM2-135M the useful range is 0.05 to 1.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saguaro.attention.native import cpu_attention
from saguaro.attention.step import Segment, make_step
from saguaro.errors import ConfigError
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.model.linear import Linear
from saguaro.model.mlp import MLP
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import Layer, Transformer
from saguaro.rng import derive_seed
from saguaro.runner.runner import Runner

CHUNK = 128  # tokens computed at once, so that logits of a large vocabulary stay small
PAGE_SIZE = 16
UNIT = 0.25  # size of the noise at epsilon 1, relative to the source
LARGEST_EPSILON = 64.0


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a model's cost."""

    name: str
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    n_vocab: int = 151_936
    is_tied: bool = False


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("32b", 5120, 64, 64, 8, 128, 25600),
        Shape("8b", 4096, 32, 32, 8, 128, 14336),
        Shape("1b", 1536, 30, 16, 8, 128, 6144),
        Shape("0.6b", 1024, 30, 16, 8, 128, 3072),
    )
}


@dataclass(frozen=True)
class Noise:
    """A slice of an output projection that is noise. Its values are a function of seed and epsilon."""

    weight: Tensor  # [rows, D], a view into the model
    beyond: Tensor  # [rows, D - d], a view of its columns for channels that the source does not have
    size: float  # standard deviation at epsilon 1
    shrink: float  # factor of `beyond`
    seed: int


class Grown:
    """A source in a larger shape, and the noise around it."""

    def __init__(self, model: Transformer, noise: Sequence[Noise]) -> None:
        self.model = model
        self.epsilon = 0.0
        self._noise = noise
        self._generator = torch.Generator(model.device)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    @torch.no_grad()
    def set_epsilon(self, value: float) -> None:
        """Rewrite the noise in place, scaled by value; equal values give equal bits."""
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"epsilon is {value}; it must be a finite number of at least 0")
        for part in self._noise:
            self._generator.manual_seed(part.seed)
            part.weight.normal_(0.0, part.size * value, generator=self._generator)
            part.beyond.mul_(part.shrink)
        self.epsilon = value


@dataclass(frozen=True)
class Place:
    """Where one key-value head of the source goes, with the query heads that use it."""

    kv: int  # key head of the source
    to: int  # key head of the grown model
    queries: list[tuple[int, int]]  # query heads (of the source, of the grown model)


@torch.no_grad()
def grow(
    source: Transformer, shape: Shape, *, epsilon: float, seed: int = 0, device: torch.device, dtype: torch.dtype
) -> Grown:
    """Embed the source in a larger shape, directly on the device; an error if it does not fit."""
    _check_source(source)
    _check_shape(source.spec, shape)
    model = Transformer(grown_spec(source.spec, shape), device, dtype)
    model.frequencies[:: shape.head_dim // source.spec.head_dim] = source.frequencies.to(device)
    draw = _Draw(device, seed)
    _fill_ends(model, source, draw)
    held = place_layers(source.spec.n_layers, shape.n_layers)
    noise: list[Noise] = []
    for index, layer in enumerate(model.layers):
        like = source.layers[max(i for i, at in enumerate(held) if at <= index)]
        assert isinstance(layer, Layer)
        assert isinstance(like, Layer)
        growth = _Growth(layer, like, model.spec, source.spec)
        growth.fill(draw)
        if index in held:
            growth.copy()
        noise += growth.noise(draw, is_real=index in held)
    grown = Grown(model, noise)
    grown.set_epsilon(epsilon)
    return grown


def agreement(target: Transformer, draft: Transformer, texts: list[list[int]], n_known: int) -> float:
    """The share of positions in these texts at which both models have the same best token among the first n_known."""
    return _share(choices(target, texts, n_known), choices(draft, texts, n_known))


def find_epsilon(
    grown: Grown, draft: Transformer, texts: list[list[int]], n_known: int, wanted: float, steps: int = 10
) -> float:
    """The epsilon, of those a bisection tries, whose agreement with the draft is nearest; grown is left there."""
    if not 0 < wanted <= 1:
        raise ConfigError(f"wanted agreement is {wanted}; it must be above 0 and at most 1")
    theirs = choices(draft, texts, n_known)
    tried: dict[float, float] = {}

    def is_above(epsilon: float) -> bool:
        grown.set_epsilon(epsilon)
        tried[epsilon] = _share(choices(grown.model, texts, n_known), theirs)
        return tried[epsilon] > wanted

    low, high = 0.0, 1.0
    while is_above(high):
        if high >= LARGEST_EPSILON:
            raise ConfigError(
                f"agreement is {tried[high]:.3f} even with epsilon {high}, not {wanted}; choose a shape with more noise"
            )
        low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_above(middle) else (low, middle)
    best = min(tried, key=lambda epsilon: abs(tried[epsilon] - wanted))
    grown.set_epsilon(best)
    return best


def choices(model: Transformer, texts: list[list[int]], n_known: int) -> Tensor:  # [all tokens] int64
    """The best of the first n_known tokens after every prefix of every text, on the CPU."""
    if not any(texts):
        raise ConfigError("there are no tokens to compare models on; give at least one text")
    return torch.cat([logits[:, :n_known].argmax(-1).cpu() for logits in forward(model, texts)])


def forward(model: Transformer, texts: list[list[int]]) -> Iterator[Tensor]:  # [n, V] float32 each
    """The logits after every token of every text, a chunk at a time."""
    n_pages = -(-max(map(len, texts)) // PAGE_SIZE)
    plan = KVPlan(n_pages, PAGE_SIZE, model.spec.kv_bytes_per_token(model.dtype), n_pages * PAGE_SIZE)
    cache = KVCache(plan, model.spec, model.device, model.dtype)
    runner = Runner(model, cache, cpu_attention(cache, model.spec))
    for text in texts:
        for start in range(0, len(text), CHUNK):
            tokens = text[start : start + CHUNK]
            segment = Segment(tokens, start, range(n_pages), n_wanted=len(tokens))
            yield runner.forward(make_step([segment], PAGE_SIZE, model.device))


def place_layers(n: int, n_grown: int) -> list[int]:
    """The indices of the source's layers: spread evenly, the first at 0.

    >>> place_layers(3, 7)
    [0, 2, 4]
    """
    return [index * n_grown // n for index in range(n)]


def place_heads(n_heads: int, n_kv: int, grown_heads: int, grown_kv: int) -> list[Place]:
    """The places of the source's heads. A group that is larger than the grown model's is split; its key head is copied.

    >>> place_heads(3, 1, 8, 4)
    [Place(kv=0, to=0, queries=[(0, 0), (1, 1)]), Place(kv=0, to=1, queries=[(2, 2)])]
    >>> place_heads(4, 2, 8, 2)
    [Place(kv=0, to=0, queries=[(0, 0), (1, 1)]), Place(kv=1, to=1, queries=[(2, 4), (3, 5)])]
    """
    group, room = n_heads // n_kv, grown_heads // grown_kv
    places: list[Place] = []
    for kv in range(n_kv):
        for first in range(0, group, room):
            to, n = len(places), min(room, group - first)
            places.append(Place(kv, to, [(kv * group + first + i, to * room + i) for i in range(n)]))
    return places


def runs(members: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open intervals.

    >>> runs([2, 3, 4, 7])
    [(2, 5), (7, 8)]
    """
    found: list[tuple[int, int]] = []
    for member in members:
        if found and found[-1][1] == member:
            found[-1] = (found[-1][0], member + 1)
        else:
            found.append((member, member + 1))
    return found


class _Draw:
    """Noise on a device; every matrix has its own seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device)
        self._seed, self._n = seed, 0

    def seed(self) -> int:
        """The next seed."""
        self._n += 1
        return derive_seed(self._seed, self._n)

    def fill(self, weight: Tensor, size: float = 1.0) -> None:
        """Overwrite a weight with normal noise of this standard deviation."""
        weight.normal_(0.0, size, generator=self._generator.manual_seed(self.seed()))


class _Growth:
    """One layer of the grown model, and the source layer that it contains or, if it is all noise, imitates."""

    def __init__(self, layer: Layer, like: Layer, spec: ModelSpec, source: ModelSpec) -> None:
        self.layer, self.like, self.spec, self.source = layer, like, spec, source
        self.places = place_heads(source.n_heads, source.n_kv_heads, spec.n_heads, spec.n_kv_heads)
        self.ratio = spec.head_dim // source.head_dim

    def fill(self, draw: _Draw) -> None:
        """Fill norms, and the weights that read the residual stream with noise."""
        _grow_norm(self.layer.attention_norm.weight.data, self.like.attention_norm.weight.data)
        _grow_norm(self.layer.mlp_norm.weight.data, self.like.mlp_norm.weight.data)
        draw.fill(self.layer.attention.qkv.matrix.data)
        draw.fill(_mlp(self.layer).gate_up.matrix.data)
        for weight, like in zip(_readers(self.layer, self.spec), _readers(self.like, self.source), strict=True):
            weight.mul_(_rms(like))

    def copy(self) -> None:
        """Copy the source's heads and neurons over the noise."""
        step, n = self.ratio, self.source.intermediate
        q, k, v, gate, up = _readers(self.layer, self.spec)
        out = self.layer.attention.out.matrix.data.unflatten(0, (self.spec.n_heads, -1))  # [H, d, D]
        like_q, like_k, like_v, like_gate, like_up = _readers(self.like, self.source)
        like_out = self.like.attention.out.matrix.data.unflatten(0, (self.source.n_heads, -1))
        for place in self.places:
            _embed(k[:, place.to], like_k[:, place.kv], (1, step))
            _embed(v[:, place.to], like_v[:, place.kv], (1, step))
            for query, to in place.queries:
                # A head that is r times wider divides its scores by another sqrt(r).
                _embed(q[:, to], like_q[:, query].float() * math.sqrt(step), (1, step))
                _embed(out[to], like_out[query], (step, 1))
        _embed(gate[:, :n], like_gate)
        _embed(up[:, :n], like_up)
        _embed(_mlp(self.layer).down.matrix.data[:n], _mlp(self.like).down.matrix.data)

    def noise(self, draw: _Draw, *, is_real: bool) -> list[Noise]:
        """The noise that writes to the residual stream: rows of whole heads, and of neurons."""
        taken = {to for place in self.places for _, to in place.queries} if is_real else set()
        heads = [head for head in range(self.spec.n_heads) if head not in taken]
        rows = [(start * self.spec.head_dim, stop * self.spec.head_dim) for start, stop in runs(heads)]
        neurons = [(self.source.intermediate if is_real else 0, self.spec.intermediate)]
        return [
            *self._writers(self.layer.attention.out, self.like.attention.out, rows, draw),
            *self._writers(_mlp(self.layer).down, _mlp(self.like).down, neurons, draw),
        ]

    def _writers(self, linear: Linear, source: Linear, rows: list[tuple[int, int]], draw: _Draw) -> Iterator[Noise]:
        """Noise for these rows of an output projection, of the same total output size as the source's rows."""
        weight, like = linear.matrix.data, source.matrix.data
        n_rows = sum(stop - start for start, stop in rows)
        if n_rows == 0:
            return
        d, n_more = like.shape[1], weight.shape[1] - like.shape[1]
        size = UNIT * _rms(like) * math.sqrt(like.shape[0] / n_rows * self.source.n_layers / self.spec.n_layers)
        # New channels together are at most as large as the source's, or they would dominate the norms of wide shapes.
        shrink = min(1.0, math.sqrt(d / max(1, n_more)))
        for start, stop in rows:
            part = weight[start:stop]
            yield Noise(part, part[:, d:], size, shrink, draw.seed())


def _fill_ends(model: Transformer, source: Transformer, draw: _Draw) -> None:
    """Embedding, head and last norm; rows of unknown tokens are noise of half the size."""
    n = source.spec.n_vocab
    _grow_norm(model.norm.weight.data, source.norm.weight.data)
    head, small = model.head.matrix.data, source.head.matrix.data
    draw.fill(head, _rms(small) / 2)
    _embed(head[:, :n], small)
    if not model.is_tied:
        draw.fill(model.embedding.data[n:], _rms(source.embedding.data) / 2)
        _embed(model.embedding.data[:n], source.embedding.data)


def _embed(weight: Tensor, small: Tensor, steps: tuple[int, int] = (1, 1)) -> None:
    """Overwrite a weight with a smaller one at every steps-th row and column from the first, and zeros."""
    weight.zero_()
    rows, columns = small.shape
    weight[:: steps[0], :: steps[1]][:rows, :columns] = small.to(weight.device)


def _grow_norm(weight: Tensor, small: Tensor) -> None:  # [D], [d]
    """Norm weights that give the source's values although the mean square is over D channels."""
    d = len(small)
    scale = math.sqrt(d / len(weight))
    weight[:d] = small.float() * scale
    weight[d:] = _rms(small) * scale


def _readers(layer: Layer, spec: ModelSpec) -> list[Tensor]:
    """Views of the weights that read the residual stream: q, k and v [D, heads, d], gate and up [D, neurons]."""
    widths = [n * spec.head_dim for n in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
    heads = [part.unflatten(1, (-1, spec.head_dim)) for part in layer.attention.qkv.matrix.data.split(widths, 1)]
    return [*heads, *_mlp(layer).gate_up.matrix.data.chunk(2, 1)]


def _mlp(layer: Layer) -> MLP:
    assert isinstance(layer.mlp, MLP)
    return layer.mlp


def _rms(weight: Tensor) -> float:
    return float(weight.float().square().mean().sqrt())


def _share(ours: Tensor, theirs: Tensor) -> float:  # [n], [n]
    return float((ours == theirs).float().mean())


def grown_spec(source: ModelSpec, shape: Shape) -> ModelSpec:
    """The spec of a source in a larger shape."""
    return replace(
        source,
        hidden=shape.hidden,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        n_vocab=shape.n_vocab,
        is_tied=shape.is_tied,
        norm_eps=source.norm_eps * source.hidden / shape.hidden,  # scaled as the mean square over more channels
    )


def _check_source(source: Transformer) -> None:
    spec = source.spec
    has_bias = spec.has_qkv_bias or spec.has_output_bias or spec.has_mlp_bias
    if has_bias or spec.has_qk_norm or source.token_map is not None:
        raise ConfigError(
            f"a {spec.architecture} with biases, norms of queries and keys or a reduced head cannot be grown; "
            "use a plain Llama model, such as the default one"
        )


def _check_shape(source: ModelSpec, shape: Shape) -> None:
    """Refuse a shape into which the source does not fit."""
    for name in ("hidden", "n_layers", "intermediate", "n_vocab"):
        found, least = getattr(shape, name), getattr(source, name)
        if found < least:
            raise ConfigError(f"shape {shape.name} has {name} {found}; the source has {least}: choose a larger shape")
    if shape.head_dim % source.head_dim:
        raise ConfigError(
            f"shape {shape.name} has head_dim {shape.head_dim}; it must be a multiple of the source's "
            f"{source.head_dim}, so that every rotary frequency is there"
        )
    if shape.n_heads % shape.n_kv_heads:
        raise ConfigError(
            f"shape {shape.name} has {shape.n_heads} heads; they must be a multiple of n_kv_heads, {shape.n_kv_heads}"
        )
    places = place_heads(source.n_heads, source.n_kv_heads, shape.n_heads, shape.n_kv_heads)
    if len(places) > shape.n_kv_heads:
        raise ConfigError(
            f"shape {shape.name} has n_kv_heads {shape.n_kv_heads} of {shape.n_heads // shape.n_kv_heads} query heads; "
            f"the source's {source.n_heads} heads need {len(places)} of them: choose more or larger groups"
        )
    if shape.is_tied and not source.is_tied:
        raise ConfigError(f"shape {shape.name} is tied and the source is not; choose is_tied=False")

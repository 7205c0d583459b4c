"""The real loop on models that are tables, with every random number enumerated.

A model here is a table: the law of the next token given the last one and its position, in float64. Everything else is
the engine's own: scheduler, verifier, round, link, draft's side, page pools, branches, cache, planners, fallbacks.

Randomness is replaced by `Chance`. The noise of a (stream, seed, position) is a number u in [0, 1) of which only an
interval is known, at first all of it. A draw from a law cuts that interval at the law's cumulative sums and goes on
with one of the pieces; the others are other paths:

    u           0 |--------------------------------------| 1
    target's p    |-- token 0 --|------- token 1 --------|
    draft's q     |------- token 1 ------|--- token 2 ---|      the same u: they agree on one piece of three
    pieces        |-------------|--------|---------------|

So noise that is shared is shared, and noise that is used a second time for something else is seen in the law.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor

from saguaro import methods
from saguaro.algo import sampling
from saguaro.algo.planning import Ahead, Planned
from saguaro.algo.sampling import Rules
from saguaro.attention.native import cpu_attention
from saguaro.config import SamplingParams
from saguaro.draft.planner import Shape as PlanShape
from saguaro.draft.planner import make_planner
from saguaro.draft.policy import learnt
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool
from saguaro.link.inline import Inline
from saguaro.link.null import NullLink
from saguaro.methods import METHODS, Method
from saguaro.model.dflash_config import DFlashSpec
from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.spec import ModelSpec, Rope
from saguaro.model.split import ALONE
from saguaro.model.transformer import Taps, Transformer
from saguaro.round import DraftSide, Round
from saguaro.runner.runner import Runner
from saguaro.target.request import Request
from saguaro.target.rules import Rejection, Rule, SharedNoise
from saguaro.target.sampler import Sampler
from saguaro.target.scheduler import Batch, Commit, Scheduler
from saguaro.target.verifier import Pending, Verifier
from saguaro.types import DraftLink, Outcome, Speculation
from tests.clock import Clock
from tests.draft.config import new_config

T = TypeVar("T")
Text = tuple[int, ...]

CPU = torch.device("cpu")
N_POSITIONS = 32
PROMPTS = ([0], [1])  # of the first row and of the second
UNLIKELY = -60.0  # logit of a token that a draft thinks impossible: a candidate, if there are no others
EPSILON = 1e-14  # a piece shorter than this is rounding
RULES: dict[str, Callable[[Sampler], Rule]] = {"shared": SharedNoise, "rejection": Rejection}


class Tabular:
    """A model that is a table; it has what Runner and TreeDrafter use of a Transformer."""

    def __init__(self, law: Tensor, least: float = -math.inf) -> None:
        """law [N_POSITIONS, V, V]: position and token before -> law of the next token. Or [2, N_POSITIONS, V, V]: which
        of two depends on all tokens before, read by attention. least: logit of what is impossible."""
        self.law, self._logits = law, law.log().clamp(min=least)
        self.spec = ModelSpec(
            architecture="LlamaForCausalLM",
            n_layers=1,
            hidden=2,
            n_heads=1,
            n_kv_heads=1,
            head_dim=2,
            intermediate=2,
            n_vocab=law.shape[-1],
            norm_eps=1e-6,
            max_length=N_POSITIONS,
            rope=Rope(theta=100.0),
            is_tied=False,
            has_qkv_bias=False,
            has_output_bias=False,
            has_mlp_bias=False,
            has_qk_norm=False,
            eos_ids=(),
        )
        self.own_spec, self.split = self.spec, ALONE
        self.device, self.dtype, self.is_plain = CPU, torch.float64, False
        self.reads: FeatureSpec | None = None

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: Any, by: Any = None, beside: Any = None
    ) -> Tensor:  # -> [T, V]
        """The hidden state after a token is its row. A token's feature is its sign."""
        if isinstance(beside, Taps):
            beside.into[:] = sign(positions, tokens)[:, None]
        if self.law.ndim == 3:
            return self._logits[positions, tokens]
        where = attention.place(0)
        memory = torch.zeros(len(tokens), 2, 2, dtype=torch.float64)  # a key and a value; all keys are alike
        memory[:, 1] = sign(positions, tokens)[:, None]
        where.memory.index_copy_(0, where.kv_index, memory)
        mean = attention.run(0, torch.zeros(len(tokens), 1, 2, dtype=torch.float64))[:, 0]
        total = mean * (positions + 1)
        assert bool(((total - total.round()).abs() < 1e-6).all()), "keys that are not those of a text"
        return self._logits[total.round().long() % 2, positions, tokens]

    def logits(self, hidden: Tensor, by: Any = None) -> Tensor:  # [L, V]
        """A copy, for whoever shapes it."""
        return hidden.clone()

    def as_model(self) -> Transformer:
        """Under the name that the engine knows."""
        return cast(Transformer, self)


class TabularBlock(Tabular):
    """A block draft that is a table: at a mask the law of a token after the last token that is known of the block."""

    def __init__(self, law: Tensor, block_size: int) -> None:
        super().__init__(law, UNLIKELY)
        self.mask = law.shape[-1]
        sizes = {"block_size": block_size, "mask_token": self.mask}
        self.reads = DFlashSpec(layers=self.spec, taps=(0,), target_hidden=2, **sizes)

    def read_features(self, features: Tensor) -> Tensor:
        """As they are."""
        return features

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: Any, by: Any = None, beside: Any = None
    ) -> Tensor:  # -> [T, V]
        """Text: its features are its keys. Blocks: their tokens see them all, and one of two laws follows from that."""
        where = attention.place(0)
        memory = torch.zeros(len(tokens), 2, 2, dtype=torch.float64)  # a key and a value; all keys are alike
        if beside is not None:
            memory[:, 1] = beside
            memory[:, 1, 1] = 1  # counts the text
            where.memory.index_copy_(0, where.kv_index, memory)
            return torch.as_tensor(beside)
        where.memory.index_copy_(0, where.kv_index, memory)
        means = attention.run(0, torch.zeros(len(tokens), 1, 2, dtype=torch.float64)).tolist()
        found, known, length = [], 0, 0
        for at, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            if token != self.mask:  # a block begins
                known = token
                length = next((n for n in range(at + 1, len(tokens)) if int(tokens[n]) != self.mask), len(tokens)) - at
            total, share = means[at]
            n_text = length * share / (1 - share)
            total *= n_text + length
            is_text = abs(n_text - round(n_text)) < 1e-6 and abs(total - round(total)) < 1e-6
            assert is_text, "keys that are not those of a text"
            law = self._logits if self.law.ndim == 3 else self._logits[round(total) % 2]
            found.append(law[position - 1, known] if token == self.mask else law[position, known])
        return torch.stack(found)


def sign(position: Tensor | int, token: Tensor | int) -> Any:
    """What a token adds to the number that chooses one of two laws."""
    return (3 * position + 5 * token + position * token) % 7


def row_of(law: Tensor, text: Sequence[int]) -> Tensor:  # [V]
    """The law of the token after a text."""
    at = len(text) - 1
    if law.ndim == 3:
        return law[at, text[-1]]
    return law[sum(sign(i, token) for i, token in enumerate(text)) % 2, at, text[-1]]


def new_law(seed: int, n_vocab: int = 3, width: int = 2) -> Tensor:  # [N_POSITIONS, V, V]
    """Laws of `width` possible tokens, different at every position and after every token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (N_POSITIONS, n_vocab, n_vocab)
    possible = torch.rand(shape, generator=generator).argsort(-1) < width
    parts = torch.randint(1, 8, shape, generator=generator) * possible
    return parts.double() / parts.sum(-1, keepdim=True)


def draft_of(target: Tensor, seed: int, n_sure: int = N_POSITIONS) -> Tensor:  # [N_POSITIONS, V, V]
    """A draft of this target: mostly the same tokens are possible, with other probabilities.

    From position n_sure on it is sure of itself: what nobody will read needs no paths.
    """
    generator = torch.Generator().manual_seed(seed)
    other = new_law(seed + 1000, target.shape[-1])
    parts = torch.randint(1, 8, target.shape, generator=generator) * (target > 0)
    is_alike = torch.rand(target.shape[:2], generator=generator) < 0.7
    law = torch.where(is_alike[..., None], parts.double() / parts.sum(-1, keepdim=True), other)
    law[n_sure:] = torch.nn.functional.one_hot(law[n_sure:].argmax(-1), target.shape[-1]).double()
    return law


def surer(law: Tensor, seed: int, share: float) -> Tensor:
    """The same law with this share of its rows all on their likeliest token: fewer paths."""
    is_sure = torch.rand(law.shape[:2], generator=torch.Generator().manual_seed(seed)) < share
    best = torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).to(law)
    return torch.where(is_sure[..., None], best, law)


Shape = Callable[[Tensor, Text], Tensor]  # a row of the table and the output before -> the law the request asks for


def text_law(
    law: Tensor, max_tokens: int, shape: Shape | None = None, stop: int = -1, prompt: Sequence[int] = PROMPTS[0]
) -> dict[Text, float]:
    """The law of the output: the product of the table's rows, up to the token that ends it."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(max_tokens):
        longer: dict[Text, float] = {}
        for text, chance in texts.items():
            if text and text[-1] == stop:
                longer[text] = chance
                continue
            full = (*prompt, *text)
            row = row_of(law, full)
            for token, p in enumerate((shape(row, text) if shape else row).tolist()):
                if p > 0:
                    longer[*text, token] = chance * p
        texts = longer
    return texts


class Chance:
    """Every random number of the engine, one path at a time (see the module)."""

    coins = "coins"  # the streams of stand(); pick(), rank() and the first of draw() share another

    def __init__(self) -> None:
        self._begin([])

    def paths(self, play: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """Play again and again until every path was taken; the probability and the result of each."""
        decisions: list[int] = []
        while True:
            self._begin(decisions)
            with self._in_charge():
                result = play()
            yield self._chance, result
            while self._trail and self._trail[-1][0] + 1 == self._trail[-1][1]:
                self._trail.pop()
            if not self._trail:
                return
            decisions = [chosen for chosen, _ in self._trail]
            decisions[-1] += 1

    def pick(self, scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """sampling.pick: a sample of softmax(scores)."""
        return torch.tensor(self._draws(scores.softmax(-1), seeds, positions))

    def stand(self, chance: Tensor, parent: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """sampling.stand: true below the chance. Coins that no walk down the tree looks at are not tossed."""
        rows = zip(
            chance.nan_to_num(nan=0.0).tolist(), parent.tolist(), seeds.tolist(), positions.tolist(), strict=True
        )
        found = torch.zeros_like(chance, dtype=torch.bool)
        for row, (chances, parents, seed, first) in enumerate(rows):
            last, depth, rank = -1, 0, 0
            for node, p in enumerate(chances):
                if parents[node] != last:
                    continue
                coin = (self.coins if rank == 0 else f"{self.coins} {rank}", seed, first + depth)
                rank += 1
                if self._draw(coin, (p, 1 - p)) == 0:
                    found[row, node] = True
                    last, depth, rank = node, depth + 1, 0
        return found

    def draw(self, q: Tensor, seeds: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """sampling.draw: one after the other, each from what is left."""
        found: list[list[int]] = []
        for law, seed, at in zip(q.tolist(), seeds.tolist(), positions.tolist(), strict=True):
            left, tokens = list(law), list[int]()
            while len(tokens) < n and sum(left) > 0:
                stream = "noise" if not tokens else f"noise {len(tokens)}"
                token = self._draw((stream, seed, at), [p / sum(left) for p in left])
                tokens.append(token)
                left[token] = 0.0
            found.append([*tokens, *[-1] * (n - len(tokens))])
        drawn = torch.tensor(found, dtype=torch.int64).view(len(found), n)
        return drawn.clamp(min=0), drawn >= 0

    def rank(self, logits: Tensor, rules: Rules, n: int, width: int = 2048) -> tuple[Tensor, Tensor]:
        """sampling.rank: the draw first, then the rest by probability; impossible ones score -inf."""
        p = sampling.probabilities(logits, rules)
        first = torch.tensor(self._draws(p, rules.seeds, rules.positions))[:, None]
        rest = p.scatter(1, first, 2.0).argsort(dim=-1, descending=True, stable=True)[:, :n]
        scores = p.log().gather(1, rest)
        scores[:, 0] = p.log().amax(-1)
        return rest, scores

    def _begin(self, decisions: Sequence[int]) -> None:
        self._decisions, self._trail = decisions, list[tuple[int, int]]()
        self._known: dict[tuple[str, int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 1.0))
        self._chance = 1.0

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        with patch.multiple(sampling, pick=self.pick, rank=self.rank, stand=self.stand, draw=self.draw):
            yield

    def _draws(self, laws: Tensor, seeds: Tensor, positions: Tensor) -> list[int]:
        rows = zip(laws.tolist(), seeds.tolist(), positions.tolist(), strict=True)
        return [self._draw(("noise", seed, at), law) for law, seed, at in rows]

    def _draw(self, noise: tuple[str, int, int], law: Sequence[float]) -> int:
        """Cut what is known of this noise at the law's cumulative sums, and take a piece."""
        low, high = self._known[noise]
        pieces, below, start = [], 0.0, low
        for token, p in enumerate(law):
            below += p
            end = high if below > high - EPSILON else below
            if p > 0 and end > start + EPSILON:
                pieces.append((token, start, end))
                start = end
        assert pieces, "a law without mass was drawn from"
        last, start, _ = pieces[-1]
        pieces[-1] = (last, start, high)  # whatever rounding left
        chosen = 0
        if len(pieces) > 1:
            at = len(self._trail)
            chosen = self._decisions[at] if at < len(self._decisions) else 0
            self._trail.append((chosen, len(pieces)))
        token, start, end = pieces[chosen]
        self._chance *= (end - start) / (high - low)
        self._known[noise] = (start, end)
        return token


@dataclass
class Everything:
    """A planner that leaves nothing out: every bonus after every number accepted."""

    n_vocab: int

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """All that can come."""
        return as_planned(ahead, all_outcomes(ahead, self.n_vocab), budget)

    def fan_out(self, shape: PlanShape) -> Tensor:
        """As many as there are."""
        return torch.full((2, shape.lookahead + 1), self.n_vocab)

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


@dataclass
class Seer:
    """A planner that knows what is coming: it plans that, or only what is not."""

    n_vocab: int
    hits: bool
    verifier: "Watched | None" = None

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """The outcome under way, or the last of those that will not come."""
        assert self.verifier is not None
        outcome = self.verifier.pending.outcome()
        facts = zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), outcome.bonus.tolist(), strict=True)
        known = {slot: (k, bonus) for slot, k, bonus in facts}
        rows = []
        for slot, possible in zip(ahead.slots.tolist(), all_outcomes(ahead, self.n_vocab), strict=True):
            others = [one for one in possible if one != known[slot]]
            rows.append([known[slot]] if self.hits else others[-budget:])
        return as_planned(ahead, rows, budget)

    def fan_out(self, shape: PlanShape) -> Tensor:
        """One."""
        return torch.ones(2, shape.lookahead + 1, dtype=torch.int64)

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


def all_outcomes(ahead: Ahead, n_vocab: int) -> list[list[tuple[int, int]]]:
    """Whatever (k, bonus) can come of each row; a token in flight is no bonus where it stands."""
    rows = []
    for tokens, length in zip(ahead.tokens.tolist(), ahead.length.tolist(), strict=True):
        taken = {(k, tokens[k]) for k in range(length)}
        rows.append([(k, t) for k in range(length + 1) for t in range(n_vocab) if (k, t) not in taken])
    return rows


def as_planned(ahead: Ahead, rows: Sequence[Sequence[tuple[int, int]]], budget: int) -> Planned:
    """Outcomes (k, token) of each row as a plan."""
    full = [[*row, *[(-1, 0)] * (budget - len(row))] for row in rows]
    both = torch.tensor(full, dtype=torch.int64).view(len(full), -1, 2)
    return Planned(ahead.slots, both[..., 0], both[..., 1])


class Watched(Verifier):
    """A verifier whose last verification can be looked at; on a CPU it is decided when it is launched."""

    pending: Pending

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """See Verifier."""
        self.pending = super().launch(batch, spec)
        return self.pending


class Needed(Inline):
    """Prepares only if somebody can use it: what nobody will read needs no paths."""

    n_steps = 10**6  # until the outcome is there

    def __init__(self, side: DraftSide, verifier: Watched) -> None:
        super().__init__(side)
        self._verifier = verifier

    def overlap(self) -> None:
        """Prepare, unless no row has more than one token to come after this round."""
        pending = self._verifier.pending
        rows = zip(pending.batch.sampling, pending.outcome().n_accepted.tolist(), strict=True)
        left = [(row.request.params.max_tokens or 0) - row.request.n_output - k - 1 for row, k in rows]
        if max(left) > 1:
            steps = iter(range(self.n_steps))
            self.side.prepare(lambda: next(steps, None) is None)


class Late(Needed):
    """The outcome is always there after the first step of a preparation."""

    n_steps = 1


@dataclass
class Setting:
    """What one enumeration is about."""

    method: Method
    target: Tensor  # [N_POSITIONS, V, V]
    draft: Tensor
    lookahead: int = 1
    width: int = 1  # R
    suffix: bool = False  # beside the model
    block: int = 0  # tokens of a block of the draft; 0: it drafts token by token
    nodes: int = 0  # N; 0: as many as the lookahead
    budget: int = 2
    n_rows: int = 1
    max_tokens: int = 3
    saguaro_c: float = 1.0
    params: dict[str, Any] = field(default_factory=dict)
    planner: Callable[[int], Any] | None = None  # takes the place of the method's; given V
    link: type[Needed] = Needed
    n_pages: int = 16
    page_size: int = 4
    seeds: Sequence[int] = (11, 12)


@dataclass
class Rig:
    """An engine without its outer layer, on tables."""

    scheduler: Scheduler
    round: Round
    side: DraftSide

    def run(self, requests: Sequence[Request]) -> list[Commit]:
        """Serve them all; every commit."""
        for request in requests:
            self.scheduler.add(request)
        commits = []
        while self.scheduler.has_work:
            commits += self.round.play()
        return commits


def new_rig(setting: Setting) -> Rig:
    """A method as the engine puts it together, but for the models."""
    method, n_vocab = setting.method, setting.target.shape[-1]
    table = TabularBlock(setting.draft, setting.block) if setting.block else Tabular(setting.draft, UNLIKELY)
    target, draft = Tabular(setting.target).as_model(), table.as_model()
    plan = KVPlan(setting.n_pages, setting.page_size, target.spec.kv_bytes_per_token(torch.float64), N_POSITIONS)
    config = new_config(
        n_vocab,
        draft="a table" if method.needs_model else None,
        growth=method.growth,
        suffix=setting.suffix,
        fallback=method.fallback,
        verification=method.verification,
        cut=method.cut,
        lookahead=setting.lookahead,
        width=setting.width,
        nodes=setting.nodes,
        budget=setting.budget,
        saguaro_c=setting.saguaro_c,
        max_rows=setting.n_rows,
        n_tokens=plan.n_tokens,
        page_size=plan.page_size,
    )
    planner = setting.planner(n_vocab) if setting.planner is not None else None
    with patch.object(methods, "make_planner", lambda *given: planner or make_planner(*given)):
        side = methods.draft_side(config, draft if method.needs_model else None)
    scheduler = Scheduler(
        PagePool(plan.n_pages, plan.page_size),
        max_length=N_POSITIONS,
        max_rows=setting.n_rows,
        max_tokens=64 * setting.n_rows,
        lookahead=config.most_nodes if method.drafts else 0,
        depth=setting.lookahead if method.drafts else 0,
    )
    cache = KVCache(plan, target.spec, CPU, torch.float64)
    runner = Runner(target, cache, cpu_attention(cache, target.spec), taps=draft.reads.taps if draft.reads else ())
    rule = RULES[method.verification](Sampler(n_vocab))
    verifier = Watched(runner, rule, n_known=n_vocab)
    if isinstance(planner, Seer):
        planner.verifier = verifier
    link: DraftLink = setting.link(side, verifier) if method.drafts else NullLink()
    return Rig(scheduler, Round(scheduler, verifier, link), side)


def new_requests(setting: Setting) -> list[Request]:
    """One request per row, each with a prompt and a seed of its own."""
    params = SamplingParams(max_tokens=setting.max_tokens, **setting.params)
    return [Request(f"r{i}", PROMPTS[i], params, setting.seeds[i]) for i in range(setting.n_rows)]


@dataclass
class Found:
    """What the paths of a setting gave."""

    law: dict[tuple[Text, ...], float] = field(default_factory=lambda: defaultdict(float))  # a text for each row
    sources: Counter[str] = field(default_factory=Counter)  # rows of rounds, by source
    lengths: Counter[int] = field(default_factory=Counter)  # speculations that were verified
    accepted: Counter[int] = field(default_factory=Counter)  # tokens accepted in a round
    n_paths: int = 0
    n_accepted: int = 0
    n_rejected: int = 0
    n_preemptions: int = 0

    @property
    def total(self) -> float:
        """Of all paths' probabilities."""
        return math.fsum(self.law.values())


def enumerate_paths(setting: Setting, chance: Chance | None = None) -> Found:
    """Every path of a setting."""
    found = Found()
    for probability, (texts, commits, n_preemptions) in (chance or Chance()).paths(lambda: play(setting)):
        found.n_paths += 1
        found.law[texts] += probability
        found.n_preemptions += n_preemptions
        for commit in commits:
            found.sources[commit.source] += 1
            found.lengths[commit.length] += 1
            found.n_accepted += commit.k
            found.accepted[commit.k] += 1
            found.n_rejected += commit.k < commit.length
    return found


def play(setting: Setting) -> tuple[tuple[Text, ...], list[Commit], int]:
    """One path: the real loop from beginning to end, with a clock that tells nothing. Output, commits, preemptions."""
    with patch.object(learnt, "clock", Clock()):
        rig, requests = new_rig(setting), new_requests(setting)
        commits = rig.run(requests)
    rig.scheduler.pool.check(rig.scheduler.tables())
    return tuple(tuple(request.output) for request in requests), commits, rig.scheduler.n_preemptions


def wanted_law(setting: Setting, shape: Shape | None = None, stop: int = -1) -> dict[tuple[Text, ...], float]:
    """The law that a setting must give: rows know nothing of each other."""
    joint: dict[tuple[Text, ...], float] = {(): 1.0}
    for prompt in PROMPTS[: setting.n_rows]:
        one = text_law(setting.target, setting.max_tokens, shape, stop, prompt)
        joint = {(*texts, text): a * b for texts, a in joint.items() for text, b in one.items()}
    return joint


def distance(a: Mapping[tuple[Text, ...], float], b: Mapping[tuple[Text, ...], float]) -> float:
    """The largest difference of two laws."""
    return max(abs(a.get(texts, 0.0) - b.get(texts, 0.0)) for texts in {*a, *b})


def under(rule: str, method: str, **changes: Any) -> Method:
    """A method under a rule, perhaps with other parts."""
    return replace(METHODS[method], verification=rule, **changes)

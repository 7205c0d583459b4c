"""The real loop on a tiny real model: whatever the draft says, however the work is cut, the tokens are the target's.

The truth is computed without any of it: the whole text anew for every token, with attention written out. Weights are
float64, so that a batch of another shape rounds differently by far less than two candidates ever differ.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.config import SamplingParams
from saguaro.draft.drafter import NoDrafter
from saguaro.draft.ngram import Ngram
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import FixedMisses
from saguaro.draft.policy.policy import Policy
from saguaro.draft.policy.prepare import AlwaysPrepare
from saguaro.draft.rows import Proposer
from saguaro.draft.scripted import Script, Scripted
from saguaro.kernels.bundle import plain_kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool
from saguaro.link.inline import Inline
from saguaro.link.null import NullLink
from saguaro.model.products import KVWrite
from saguaro.model.spec import ModelSpec, Rope
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide, Round
from saguaro.runner.runner import make_runner
from saguaro.target.graphed import captured_steps
from saguaro.target.request import Request
from saguaro.target.rules import SharedNoise
from saguaro.target.sampler import Sampler
from saguaro.target.scheduler import Commit, Scheduler
from saguaro.target.verifier import Verifier
from saguaro.types import DraftLink, Joined, Outcome, Speculation

CPU = torch.device("cpu")
N_KNOWN = 45  # the head has a few rows more
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    n_layers=2,
    hidden=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    intermediate=48,
    n_vocab=48,
    norm_eps=1e-6,
    max_length=128,
    rope=Rope(theta=100.0),
    is_tied=False,
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    eos_ids=(),
)
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "limited": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "restricted": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 2.0}},
    "stopping": {"temperature": 1.0, "stop_token_ids": tuple(range(4)), "min_tokens": 6},
}


class Written:
    """Attention over one whole text, written out."""

    def __init__(self, n_tokens: int) -> None:
        self._memory = torch.empty(n_tokens, 2 * SPEC.n_kv_heads, SPEC.head_dim, dtype=torch.float64)

    def place(self, layer: int) -> KVWrite:
        return KVWrite(self._memory, torch.arange(len(self._memory)))

    def run(self, layer: int, q: Tensor) -> Tensor:
        n, n_heads, d = q.shape
        keys, values = (half.repeat_interleave(n_heads // half.shape[1], 1) for half in self._memory.chunk(2, 1))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(d)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(n, n_heads * d)


def new_model(seed: int) -> Transformer:
    """Random weights, large enough that every token of the text matters and candidates lie well apart."""
    model = Transformer(SPEC, CPU, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            gain = {"embedding": math.sqrt(SPEC.hidden), "head.weight": 3.0}.get(name, 2.0)
            weight.normal_(std=gain / math.sqrt(SPEC.hidden), generator=generator)
    return model


def scripted(script: Script, lookahead: int) -> Inline:
    """A link to a draft that reads from a script."""
    return proposing(Scripted(script), lookahead)


def proposing(proposer: Proposer, lookahead: int) -> Inline:
    """A link to a draft that prepares nothing."""
    policy = Policy(Learnt(), FixedMisses(proposer), AlwaysPrepare())
    return Inline(DraftSide(NoDrafter(), policy, lookahead=lookahead, n_vocab=N_KNOWN))


@torch.inference_mode()
def true_logits(model: Transformer, text: Sequence[int]) -> Tensor:  # [V] float32
    """The logits after a text, computed from nothing."""
    hidden = model(torch.tensor(text), torch.arange(len(text)), Written(len(text)))
    return model.logits(hidden[-1:])[0]


def true_output(model: Transformer, request: Request) -> list[int]:
    """What a request must get: the whole text anew for every token."""
    twin = Request("twin", request.prompt, request.params, request.seed, request.eos_ids)
    while twin.n_output < (request.params.max_tokens or 0):
        logits = true_logits(model, twin.tokens)[None]
        with torch.inference_mode():
            twin.tokens.append(int(Sampler(N_KNOWN)(logits, [(twin, ())])))
        if twin.tokens[-1] in twin.stop_ids:
            break
    return twin.output


@dataclass
class Rig:
    """An engine without its outer layer."""

    scheduler: Scheduler
    round: Round
    n_rounds: int = 0

    def play(self) -> list[Commit]:
        commits = self.round.play()
        self.scheduler.pool.check(self.scheduler.tables())
        self.n_rounds += 1
        return commits

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve them all; their outputs, as the commits told them."""
        told: dict[Request, list[int]] = {request: [] for request in requests}
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            for commit in self.play():
                told[commit.request] += commit.tokens
        assert all(request.output == told[request] for request in requests)
        return list(told.values())

    def drain(self) -> None:
        """Play until nothing is left."""
        while self.scheduler.has_work:
            self.play()


def new_rig(
    model: Transformer,
    link: DraftLink | None = None,
    *,
    lookahead: int = 0,
    n_pages: int = 300,
    page_size: int = 4,
    max_rows: int = 16,
    max_tokens: int = 400,
    caching: bool = True,
    captured: tuple[int, int] | None = None,  # depth and nodes of trees: as on a GPU, but that nothing is captured
    taps: Sequence[int] = (),
) -> Rig:
    plan = KVPlan(n_pages, page_size, SPEC.kv_bytes_per_token(torch.float64), SPEC.max_length)
    cache = KVCache(plan, SPEC, CPU, torch.float64)
    for memory in (*cache.keys, *cache.values):
        memory.fill_(math.nan)  # whoever reads what was never written shall know
    scheduler = Scheduler(
        PagePool(n_pages, page_size, caching),
        max_length=SPEC.max_length,
        max_rows=max_rows,
        max_tokens=max_tokens,
        lookahead=lookahead,
        depth=min(captured[0], lookahead) if captured else None,
    )
    rule = SharedNoise(Sampler(N_KNOWN))
    kernels = plain_kernels() if captured else None
    steps = None
    if captured and kernels:
        sizes = {"longest": SPEC.max_length, "max_rows": max_rows, "depth": captured[0], "nodes": captured[1]}
        steps = captured_steps(kernels, cache, n_known=N_KNOWN, **sizes)
    verifier = Verifier(make_runner(model, cache, kernels, SPEC.max_length, steps, taps), rule, n_known=N_KNOWN)
    return Rig(scheduler, Round(scheduler, verifier, link or NullLink()))


def new_requests(styles: Sequence[str] = tuple(STYLES), n: int = 16, max_tokens: int = 16) -> list[Request]:
    """Prompts of 2 to 19 tokens that begin alike two by two; no one is the beginning of another."""
    chance = random.Random(5)
    requests = []
    for i in range(n):
        common = [random.Random(i // 2).randrange(N_KNOWN) for _ in range(i // 2 * 2)]
        own = [i, *(chance.randrange(N_KNOWN) for _ in range(1 + i % 4))]
        params = SamplingParams(max_tokens=max_tokens, **STYLES[styles[i % len(styles)]])
        requests.append(Request(f"r{i}", [*common, *own], params, seed=1000 + i))
    return requests


def rest(texts: Sequence[list[int]], text: Sequence[int], n: int) -> list[int]:
    """The true next n tokens of a text, which must be the beginning of a true one."""
    known = [full for full in texts if full[: len(text)] == list(text)]
    assert len(known) == 1, "the draft believes in a text that is nobody's"
    return known[0][len(text) : len(text) + n]


def oracle(texts: Sequence[list[int]]) -> Script:
    return lambda text, k: rest(texts, text, k)


def wrong(texts: Sequence[list[int]]) -> Script:
    return lambda text, k: [(token + 1) % N_KNOWN for token in rest(texts, text, k)]


def chance(texts: Sequence[list[int]]) -> Script:
    dice = random.Random(1)

    def script(text: Sequence[int], k: int) -> list[int]:
        return [t if dice.random() < 0.6 else dice.randrange(SPEC.n_vocab) for t in rest(texts, text, k)]

    return script


def right_then_wrong(texts: Sequence[list[int]]) -> Script:
    def script(text: Sequence[int], k: int) -> list[int]:
        n_right = len(text) % (k + 1)
        tokens = rest(texts, text, k)
        return [*tokens[:n_right], *((t + 1) % N_KNOWN for t in tokens[n_right:])]

    return script


def short(texts: Sequence[list[int]]) -> Script:
    return lambda text, k: rest(texts, text, len(text) % (k + 1))


def too_long(texts: Sequence[list[int]]) -> Script:
    return lambda text, k: [*rest(texts, text, k), 0, 1, 2, 3, 4, 5]


def mute(texts: Sequence[list[int]]) -> Script:
    return lambda text, k: rest(texts, text, 0)


SCRIPTS: list[Callable[[Sequence[list[int]]], Script]] = [
    oracle,
    wrong,
    chance,
    right_then_wrong,
    short,
    too_long,
    mute,
]


def test_the_tiny_model_reads_its_whole_text(model: Transformer) -> None:
    """Or the tests below could not fail."""
    for request in new_requests():
        logits = true_logits(model, request.prompt)
        for at in (0, len(request.prompt) // 2):
            other = [(t + 1) % N_KNOWN if i == at else t for i, t in enumerate(request.prompt)]
            assert float((true_logits(model, other) - logits).abs().max()) > 0.05
        best = logits.topk(2).values
        assert float(best[0] - best[1]) > 1e-3


def test_the_truth_is_varied(truth: list[list[int]]) -> None:
    assert len({tuple(output[:6]) for output in truth}) == 16
    assert all(len(set(output)) > 3 for output in truth)
    lengths = {len(output) for output in truth}
    assert max(lengths) == 16
    assert len(lengths) > 1, "nobody met a stop token"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decoding_alone_gives_the_truth(model: Transformer, truth: list[list[int]], page_size: int) -> None:
    assert new_rig(model, page_size=page_size).run(new_requests()) == truth


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_speculation_changes_a_token(
    model: Transformer,
    truth: list[list[int]],
    texts: list[list[int]],
    script: Callable[[Sequence[list[int]]], Script],
    lookahead: int,
) -> None:
    rig = new_rig(model, scripted(script(texts), lookahead), lookahead=lookahead)
    assert rig.run(new_requests()) == truth


def test_a_link_that_offers_more_than_there_is_room_for_is_cut(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = scripted(oracle(texts), lookahead=6)
    respond = link.side.respond
    monkeypatch.setattr(link.side, "respond", lambda outcome, slots, room: respond(outcome, slots, [6] * len(slots)))
    rig = new_rig(model, link, lookahead=2)
    assert rig.run(new_requests()) == truth


@pytest.mark.parametrize("style", STYLES)
def test_the_oracle_saves_rounds(model: Transformer, style: str) -> None:
    (request,) = new_requests([style], n=1, max_tokens=31)
    output = true_output(model, request)
    alone = new_rig(model)
    assert alone.run(new_requests([style], n=1, max_tokens=31)) == [output]
    with_oracle = new_rig(model, scripted(oracle([[*request.prompt, *output]]), 4), lookahead=4)
    assert with_oracle.run([request]) == [output]
    assert alone.n_rounds == len(output)
    assert with_oracle.n_rounds == 1 + math.ceil((len(output) - 1) / 5)


def test_a_wrong_draft_costs_no_round(model: Transformer, truth: list[list[int]], texts: list[list[int]]) -> None:
    rig = new_rig(model, scripted(wrong(texts), 4), lookahead=4)
    assert rig.run(new_requests()) == truth
    assert rig.n_rounds == max(len(output) for output in truth)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_company_changes_nothing(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], lookahead: int
) -> None:
    """One at a time, with nothing cached, as with fifteen others."""
    for request, output in zip(new_requests(), truth, strict=True):
        rig = new_rig(model, scripted(chance(texts), lookahead), lookahead=lookahead)
        assert rig.run([request]) == [output]


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 1), (2, 3), (4, 7), (16, 16)])
def test_prompts_computed_in_chunks_give_the_same(
    model: Transformer,
    truth: list[list[int]],
    texts: list[list[int]],
    lookahead: int,
    max_rows: int,
    max_tokens: int,
) -> None:
    link = scripted(chance(texts), lookahead)
    rig = new_rig(model, link, lookahead=lookahead, max_rows=max_rows, max_tokens=max_tokens, caching=False)
    assert rig.run(new_requests()) == truth


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("script", [oracle, chance, mute])
def test_preemption_gives_the_same(
    model: Transformer,
    truth: list[list[int]],
    texts: list[list[int]],
    script: Callable[[Sequence[list[int]]], Script],
    caching: bool,
) -> None:
    rig = new_rig(model, scripted(script(texts), 3), lookahead=3, n_pages=16, max_tokens=64, caching=caching)
    assert rig.run(new_requests()) == truth
    assert rig.scheduler.n_preemptions > 0


@pytest.mark.parametrize("n_pages", [300, 110])  # 110: some of what was cached is gone by then
def test_a_second_run_finds_its_prompts_and_gives_the_same(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], n_pages: int
) -> None:
    rig = new_rig(model, scripted(chance(texts), 3), lookahead=3, n_pages=n_pages)
    first, second = new_requests(), new_requests()
    assert rig.run(first) == truth
    n_cached = [request.n_cached for request in first]
    assert rig.run(second) == truth
    assert sum(request.n_cached for request in second) > sum(n_cached)
    assert all(request.n_cached < len(request.prompt) for request in second)


def test_a_text_that_is_continued_finds_what_was_generated(model: Transformer) -> None:
    """A second turn of a conversation: its prompt holds the first turn's output."""
    rig = new_rig(model)
    (first,) = new_requests(n=1)
    rig.run([first])
    prompt = [*first.tokens, 7, 8, 9]
    second = Request("second", prompt, SamplingParams(max_tokens=10), seed=3)
    assert rig.run([second]) == [true_output(model, second)]
    assert second.n_cached >= len(first.tokens) - 4


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("n_more", range(4))
def test_a_continued_text_is_the_same_wherever_its_first_part_ended(
    model: Transformer, lookahead: int, n_more: int
) -> None:
    """Also on a page boundary: the last token of an output is not computed, so its page must not be reused."""
    (first,) = new_requests(n=1, max_tokens=18 + n_more)
    texts = [[*first.prompt, *true_output(model, first)]]
    rig = new_rig(model, scripted(chance(texts), lookahead), lookahead=lookahead)
    rig.run([first])
    second = Request("second", [*first.tokens, 7, 8, 9], SamplingParams(max_tokens=6, speculation=False), seed=3)
    assert rig.run([second]) == [true_output(model, second)]
    assert second.n_cached == (len(first.tokens) - 1) // 4 * 4


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupt(*_: object) -> None:
    raise Interrupt


def test_a_row_that_left_in_a_round_that_broke_off_is_forgotten(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is never told that the first request ended, and the third takes its slot."""
    first, second, third = new_requests(n=3)
    link = scripted(chance(texts), 3)
    rig = new_rig(model, link, lookahead=3, max_rows=2)
    rig.scheduler.add(first)
    rig.scheduler.add(second)
    rig.play()
    rig.scheduler.abort(first)
    with monkeypatch.context() as patch:
        patch.setattr(link, "retire", interrupt)
        with pytest.raises(Interrupt):
            rig.play()
    rig.scheduler.add(third)
    rig.drain()
    assert [second.output, third.output] == truth[1:3]


@pytest.mark.parametrize("when", ["before its outcome", "after its outcome"])
def test_a_round_that_breaks_off_while_it_lands_is_played_again(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The draft has seen the outcome of the round before, and must not append its tokens a second time."""
    rig, requests = new_rig(model, scripted(chance(texts), 3), lookahead=3), new_requests()
    for request in requests:
        rig.scheduler.add(request)
    for _ in range(3):
        rig.play()
    with monkeypatch.context() as patch:
        if when == "before its outcome":
            pending = SimpleNamespace(outcome=interrupt)
            patch.setattr(rig.round.verifier, "launch", lambda *_: pending)
        else:
            patch.setattr(rig.scheduler, "took", interrupt)
        with pytest.raises(Interrupt):
            rig.play()
    rig.drain()
    assert [request.output for request in requests] == truth


@pytest.mark.parametrize("lookahead", [0, 3])
def test_requests_that_come_and_go_keep_their_texts_apart(
    model: Transformer, truth: list[list[int]], texts: list[list[int]], lookahead: int
) -> None:
    """Three rows for sixteen requests, one new every other round, every fourth aborted early: slots are reused."""
    requests = new_requests()
    asked: list[list[int]] = []

    def script(text: Sequence[int], k: int) -> list[int]:
        assert list(text) in [request.tokens for request in rig.scheduler.running], "the draft lost the thread"
        asked.append(list(text))
        return [*rest(texts, text, 2), 0][:k]

    rig = new_rig(model, scripted(script, lookahead), lookahead=lookahead, max_rows=3, max_tokens=12)
    aborted = requests[3::4]
    for n_round in range(1000):
        if n_round % 2 == 0 and n_round // 2 < len(requests):
            rig.scheduler.add(requests[n_round // 2])
        before = len(asked)
        commits = rig.play()
        assert len(asked) - before <= len(commits), "a row was asked for twice"
        for request in aborted:
            if request.n_output >= 3:
                rig.scheduler.abort(request)
        if n_round > 2 * len(requests) and not rig.scheduler.has_work:
            break
    assert not rig.scheduler.has_work
    assert bool(asked) == bool(lookahead)
    for request, output in zip(requests, truth, strict=True):
        if request in aborted:
            assert request.output == output[: request.n_output]
            assert request.finish_reason in ("abort", "stop", "length")
        else:
            assert request.output == output


class AbortsInMidStep:
    """A link that lets a request be aborted while the target computes, as another thread's client may."""

    def __init__(self, link: DraftLink, during: Callable[[], None]) -> None:
        self._link, self._during = link, during

    def is_fresh(self) -> bool:
        return self._link.is_fresh()

    def admit(self, rows: Sequence[Joined]) -> None:
        self._link.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        self._link.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        return self._link.speculate(outcome, slots, room)

    def overlap(self) -> None:
        self._during()

    def close(self) -> None:
        self._link.close()


def test_a_request_aborted_in_mid_step_disturbs_nobody(
    model: Transformer, truth: list[list[int]], texts: list[list[int]]
) -> None:
    requests = new_requests()

    def during() -> None:
        for request in requests[::3]:
            if request.n_output >= 4:
                rig.scheduler.abort(request)

    link = AbortsInMidStep(scripted(chance(texts), 3), during)
    rig = new_rig(model, link, lookahead=3, max_rows=5, max_tokens=64)
    rig.run(requests)
    for i, (request, output) in enumerate(zip(requests, truth, strict=True)):
        assert request.output == (output[: request.n_output] if i % 3 == 0 else output)
    assert any(request.finish_reason == "abort" for request in requests)


def test_two_models_in_one_process_do_not_meet(model: Transformer, truth: list[list[int]]) -> None:
    other = new_model(seed=1)
    other_truth = [true_output(other, request) for request in new_requests()]
    assert not any(a == b for a, b in zip(truth, other_truth, strict=True))
    pairs = [
        (new_rig(model, n_pages=60), new_requests(), truth),
        (new_rig(other, max_rows=3, page_size=3), new_requests(), other_truth),
    ]
    for rig, requests, _ in pairs:
        for request in requests:
            rig.scheduler.add(request)
    while any(rig.scheduler.has_work for rig, _, _ in pairs):
        for rig, _, _ in pairs:
            rig.play()
    for _, requests, outputs in pairs:
        assert [request.output for request in requests] == outputs


@pytest.mark.parametrize("lookahead", [0, 4])
def test_logprobs_are_the_models_own_with_and_without_speculation(model: Transformer, lookahead: int) -> None:
    """Also where a style changes what is chosen, and beside a request that wants none."""
    requests = new_requests(n=6, max_tokens=10)
    outputs = [true_output(model, request) for request in requests]
    texts = [[*request.prompt, *output] for request, output in zip(requests, outputs, strict=True)]
    for request in requests[1:]:
        object.__setattr__(request.params, "logprobs", 3)
    rig = new_rig(model, scripted(chance(texts), lookahead), lookahead=lookahead)
    assert rig.run(requests) == outputs
    assert requests[0].logprobs == []
    for request in requests[1:]:
        assert [one.token for one in request.logprobs] == request.output
        for n, one in enumerate(request.logprobs):
            law = true_logits(model, request.tokens[: len(request.prompt) + n])[:N_KNOWN].log_softmax(-1)
            assert one.logprob == pytest.approx(float(law[one.token]), abs=1e-4)
            assert [token for token, _ in one.top] == law.topk(3).indices.tolist()


def test_nothing_to_do_is_an_empty_round(model: Transformer) -> None:
    rig = new_rig(model)
    assert rig.play() == []
    rig.run(new_requests(n=1))
    assert rig.play() == []


@pytest.mark.parametrize("lookahead", [1, 4])
def test_ngram_drafting_gives_the_same_tokens(model: Transformer, truth: list[list[int]], lookahead: int) -> None:
    rig = new_rig(model, proposing(Ngram(longest=2, shortest=1), lookahead), lookahead=lookahead, n_pages=24)
    assert rig.run(new_requests()) == truth

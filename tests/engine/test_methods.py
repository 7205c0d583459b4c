"""Every method through the public API on tiny models: whatever is drafted, the tokens are those of ar."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.config import EngineConfig
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.policy.prepare import AlwaysPrepare, NeverPrepare
from saguaro.draft.texts import DraftTexts
from saguaro.engine.assembly import choose_method
from saguaro.engine.engine import Engine
from saguaro.engine.results import Completion, Delta, Result
from saguaro.errors import ConfigError, ModelNotFound, SaguaroError, TokenizerMismatch
from saguaro.kv.pages import PageTable
from saguaro.link.inline import Inline
from saguaro.methods import METHODS
from saguaro.model.tiny import write_tiny
from saguaro.types import RoundEvent
from tests.engine.driver import run

SHARED = [name for name, method in METHODS.items() if method.drafts and method.verification == "shared"]
PREPARING = [name for name in SHARED if METHODS[name].prepares]
SIZES: dict[str, Any] = {"link": "inline", "lookahead": 3, "budget": 4, "prepare": "always"}
PROMPTS: list[str | list[int]] = ["the end", "in an other", [104, 105], "an"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of another family that agrees with the target by accident only."""
    return write_tiny(tmp_path_factory.mktemp("stranger"), "qwen3", seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB")


def sample(max_tokens: int | None = 15, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": max_tokens, "ignore_eos": True, **params})


GREEDY = sample(temperature=0.0)
EACH: list[SamplingParams] = [
    GREEDY,
    sample(),
    sample(seed=8, n=2),
    sample(temperature=1.3, top_k=20),
    sample(temperature=0.8, top_p=0.8),
    sample(min_p=0.05),
    sample(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    sample(logit_bias={101: 4.0, 32: -3.0}),
    sample(speculation=False),
    sample(logprobs=2),
    sample(min_tokens=10, ignore_eos=False, stop_token_ids=(101, 110)),
    sample(max_tokens=1),
    sample(max_tokens=3, temperature=0.0),
    sample(logit_bias={101: 100.0, 110: 100.0}),  # repeats itself
]


def outputs(results: Sequence[Result]) -> list[Completion]:
    return [output for result in results for output in result.outputs]


def assert_same(found: Sequence[Result], expected: Sequence[Result]) -> None:
    """The same tokens, text, ends and log-probabilities."""
    for ours, theirs in zip(outputs(found), outputs(expected), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason, ours.stop_reason, ours.seed) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
            theirs.seed,
        )
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Result]:
    """What ar says to every kind of request, one at a time."""
    return [run(llm.engine, [prompt], params)[0] for prompt, params in each()]


def each() -> list[tuple[str | list[int], SamplingParams]]:
    return [(PROMPTS[at % len(PROMPTS)], params) for at, params in enumerate(EACH)]


def watch(llm: LLM) -> dict[str, int]:
    """How many row-rounds each source served from now on."""
    counts: dict[str, int] = {}

    def count(event: RoundEvent) -> None:
        for row in event.rows:
            counts[row.source] = counts.get(row.source, 0) + 1

    llm.engine.round.observers.append(count)
    return counts


def drafter_of(llm: LLM) -> TreeDrafter:
    link = llm.engine.round.draft
    assert isinstance(link, Inline)
    assert isinstance(link.side.drafter, TreeDrafter)
    return link.side.drafter


# The same tokens


@pytest.mark.parametrize(
    ("method", "draft"),
    [(name, "drop:2") for name in (*SHARED, "saguaro")] + [(name, "stranger") for name in (*PREPARING, "sd")],
)
def test_every_method_gives_the_tokens_of_ar(
    llm: LLM, stranger: Path, expected: list[Result], method: str, draft: str
) -> None:
    """All kinds of requests in one batch: sampled and greedy, restricted, penalised, biased, not speculated."""
    name = draft if draft.startswith("drop:") else str(stranger)
    drafted = llm.sibling(method=method, draft=name, verification="shared", **SIZES)
    counts = watch(drafted)
    prompts, params = zip(*each(), strict=True)
    found = run(drafted.engine, prompts, params)
    assert_same(found, expected)
    kind, sources = METHODS[method], set(counts)
    assert ("cache" in sources) <= (kind.prepares)
    assert ("draft" in sources) <= kind.needs_model
    assert ("ngram" in sources) <= (kind.fallback in ("ngram", "measured", "batch"))
    assert ("ngram" in sources) >= (method == "ngram")
    if draft == "drop:2" and method != "ngram":
        fewer = [a.n_rounds < b.n_rounds for a, b in zip(outputs(found), outputs(expected), strict=True)]
        assert sum(fewer) >= 4, "hardly anything was accepted"
        assert ("cache" in sources) or method in ("sd", "amusd")
    _assert_nothing_left(drafted)


def _assert_nothing_left(llm: LLM) -> None:
    """Neither side holds a page, or knows a row."""
    engine = llm.engine
    assert engine.pool.n_free == engine.pool.n_pages
    run(engine, ["x"], sample(max_tokens=1))  # retirements travel with the next round
    link = engine.round.draft
    assert isinstance(link, Inline)
    assert len(list(link.side.rows)) <= 1
    if isinstance(link.side.drafter, DraftTexts):
        pool = link.side.drafter.pool
        pool.check([trunk.table for trunk in link.side.drafter.trunks.values()])
        assert len(link.side.drafter.trunks) <= 1


@pytest.mark.parametrize("fallback", ["draft", "ngram", "random", "empty", "batch", "measured", "suffix"])
def test_any_fallback_may_stand_in(llm: LLM, expected: list[Result], fallback: str) -> None:
    drafted = llm.sibling(method="ssd", draft="drop:1", fallback=fallback, **SIZES)
    counts = watch(drafted)
    found = run(drafted.engine, [prompt for prompt, _ in each()[:3]], EACH[:3])
    assert_same(found, expected[:3])
    assert counts["cache"] > 0
    allowed = {"batch": {"draft", "ngram"}, "measured": {"draft", "ngram"}, "empty": set()}.get(fallback, {fallback})
    assert set(counts) <= {"cache", "empty", *allowed}
    if fallback in ("draft", "random"):
        assert counts[fallback] > 0


def test_a_draft_with_fewer_rows_of_padding_than_the_target(llm: LLM, tmp_path: Path) -> None:
    """The target has 288 rows for 264 tokens: requests may name the others, and the draft does not have them."""
    draft = write_tiny(tmp_path, "llama", seed=1, vocab_size=264)
    drafted = llm.sibling(method="ssd-uniform", draft=str(draft), **SIZES)
    prompts: list[str | list[int]] = ["the end", [104, 270, 105], "an"]
    params = [
        sample(logit_bias={287: 2.0, 101: 1.0}),
        sample(),
        sample(stop_token_ids=(280,), min_tokens=5),
    ]
    counts = watch(drafted)
    assert_same(
        run(drafted.engine, [*prompts, "the"], [*params, sample()]),
        run(llm.engine, [*prompts, "the"], [*params, sample()]),
    )
    assert counts["draft"] > 0


@pytest.mark.parametrize("method", PREPARING)
@pytest.mark.parametrize("n_prompt", [2, 9, 30, 65, 130])
def test_the_first_speculation_is_prepared_while_the_prompt_is_read(
    llm: LLM, folder: Path, method: str, n_prompt: int
) -> None:
    """The draft is the target itself, so it knows the target's first token."""
    prompt = [(7 * at) % 250 for at in range(n_prompt)]
    drafted = llm.sibling(method=method, draft=str(folder), **SIZES)
    deltas = list(drafted.stream(prompt, sample(max_tokens=9)))
    assert [delta.source for delta in deltas[:2]] == ["empty", "cache"]
    assert [token for delta in deltas for token in delta.token_ids] == llm.generate([prompt], sample(max_tokens=9))[
        0
    ].token_ids


# Ends inside a speculation


@pytest.mark.parametrize("method", ["sd", "pearl", "ssd"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_stop_token_inside_a_speculation(llm: LLM, folder: Path, method: str, at: int) -> None:
    """All four tokens of the second round are right; the one at `at` ends the output."""
    tokens = llm.generate("the end", sample())[0].token_ids
    assert tokens.index(tokens[at]) == at
    params = sample(stop_token_ids=(tokens[at],), logprobs=1)
    drafted = llm.sibling(method=method, draft=str(folder), **SIZES)
    deltas = list(drafted.stream("the end", params))
    assert [len(delta.token_ids) for delta in deltas] == [1, at]
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", tokens[at])
    assert last.n_accepted == min(at, 3)
    assert len(last.logprobs) == at
    assert_same(drafted.generate("the end", params), llm.generate("the end", params))
    _assert_nothing_left(drafted)


@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_a_stop_string_inside_a_speculation(llm: LLM, folder: Path, method: str) -> None:
    """Wherever it ends: the tokens after it are not part of the output, and neither is the string."""
    biased = dict.fromkeys(range(97, 123), 100.0)  # letters only
    whole = llm.generate("the end", sample(logit_bias=biased, max_tokens=16))[0]
    drafted = llm.sibling(method=method, draft=str(folder), **SIZES)
    assert len(whole.text) == 16
    for start in range(0, 10, 2):
        for length in (1, 3):
            params = sample(logit_bias=biased, max_tokens=16, stop=(whole.text[start : start + length],), logprobs=0)
            result = drafted.generate("the end", params)
            assert_same(result, llm.generate("the end", params))
            assert result[0].text == whole.text[: whole.text.index(params.stop[0])]
            assert len(result[0].token_ids) == len(result[0].text) + length
    _assert_nothing_left(drafted)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_inside_a_speculation(llm: LLM, folder: Path, max_tokens: int) -> None:
    drafted = llm.sibling(method="ssd", draft=str(folder), **SIZES)
    params = sample(max_tokens=max_tokens)
    assert_same(drafted.generate("the end", params), llm.generate("the end", params))
    assert len(drafted.generate("the end", params)[0].token_ids) == max_tokens


def test_a_full_context_inside_a_speculation(folder: Path) -> None:
    plain = LLM(folder, device="cpu", kv_memory="2MiB", max_model_len=30)
    drafted = plain.sibling(method="ssd-uniform", draft="drop:2", **SIZES)
    params = sample(max_tokens=None)
    assert_same(run(drafted.engine, PROMPTS, params), run(plain.engine, PROMPTS, params))


# Coming and going


def interleaved(engine: Engine, arrivals: dict[int, tuple[str | list[int], SamplingParams]]) -> list[Result]:
    """Requests that join at certain steps, in the order of their arrival."""
    names, step = [], 0
    while engine.has_work or step <= max(arrivals):
        if step in arrivals:
            names.append(engine.add(*arrivals[step]))
        engine.step()
        engine.pool.check(engine.scheduler.tables())
        step += 1
    return [engine.result(name) for name in names]


@pytest.mark.parametrize("method", ["sd", "pearl", "ssd"])
def test_requests_join_and_leave_in_mid_flight(llm: LLM, expected: list[Result], method: str) -> None:
    """Three rows for fourteen requests: slots are used again and again."""
    drafted = llm.sibling(method=method, draft="drop:2", max_batch_rows=3, **SIZES)
    arrivals = {2 * at: one for at, one in enumerate(each())}
    assert_same(interleaved(drafted.engine, arrivals), expected)


@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_nothing_of_a_request_is_left_for_the_next_in_its_slot(llm: LLM, folder: Path, method: str) -> None:
    """The draft is the target itself and right about every token, unless it took another's outcome for its own."""
    drafted = llm.sibling(method=method, draft=str(folder), max_batch_rows=1, **SIZES)
    results = run(drafted.engine, PROMPTS[:3], sample(max_tokens=15))
    assert [output.n_rounds for output in outputs(results)] == [5, 5, 5]  # 1 + 4 + 4 + 4 + 2


@pytest.mark.parametrize("method", ["sd", "pearl", "ssd-uniform", "ssd"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption(llm: LLM, method: str, prefix_caching: bool) -> None:
    """Four requests in memory for two."""
    params = [
        sample(max_tokens=30),
        sample(max_tokens=30, temperature=0.0),
        sample(max_tokens=25),
        sample(max_tokens=30),
    ]
    settings = {**SIZES, "kv_memory": "80KiB", "prefix_caching": prefix_caching, "page_size": 4, "max_model_len": 80}
    drafted = llm.sibling(method=method, draft="drop:2", **settings)
    found = run(drafted.engine, PROMPTS, params)
    assert drafted.engine.scheduler.n_preemptions > 0
    assert_same(found, run(llm.engine, PROMPTS, params))


def test_streams_that_are_closed_midway_disturb_nobody(llm: LLM) -> None:
    drafted = llm.sibling(method="ssd", draft="drop:2", **SIZES)
    params = sample(max_tokens=24)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in ("the end", "an")]
    kept = drafted.stream("the end", params)
    found = list(next(kept).token_ids)
    for n_read in range(4):
        closed, dropped = drafted.stream("in", params), drafted.stream("other", params)
        for _ in range(n_read):
            next(closed)
            next(dropped)
        closed.close()
        del dropped
        gc.collect()
    found += [token for delta in kept for token in delta.token_ids]
    assert found == expected[0]
    assert drafted.generate("an", params)[0].token_ids == expected[1]
    _assert_nothing_left(drafted)


def test_a_round_that_breaks_off_is_made_good(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = llm.sibling(method="ssd-uniform", draft="drop:2", **SIZES)
    expected = llm.generate("the end", sample(max_tokens=30))[0].token_ids
    stream = drafted.stream("the end", sample(max_tokens=30))
    found = [token for _ in range(3) for token in next(stream).token_ids]
    launch = drafted.engine.round.verifier.launch

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        monkeypatch.setattr(drafted.engine.round.verifier, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        monkeypatch.setattr(drafted.engine.round.verifier, "launch", launch)
        found += next(stream).token_ids
    assert found + [token for delta in stream for token in delta.token_ids] == expected


# What the draft cannot follow


@pytest.mark.parametrize("method", ["sd", "ssd", "ssd-uniform"])
def test_a_text_longer_than_the_draft_knows(llm: LLM, tmp_path: Path, method: str) -> None:
    """One prompt is too long from the start, another grows too long, and a third stays within."""
    draft = write_tiny(tmp_path, "llama", num_hidden_layers=4, max_position_embeddings=40)
    prompts: list[str | list[int]] = [list(range(60)), list(range(100, 120)), "an"]
    drafted = llm.sibling(method=method, draft=str(draft), fallback="draft", **SIZES)
    events: list[RoundEvent] = []
    drafted.engine.round.observers.append(events.append)
    params = [sample(max_tokens=25), sample(max_tokens=25), sample(max_tokens=15)]
    found = run(drafted.engine, prompts, params)
    assert_same(found, run(llm.engine, prompts, params))
    served = {
        result.request_id: [
            row.source for event in events for row in event.rows if row.request.startswith(f"{result.request_id}/")
        ]
        for result in found
    }
    long, growing, short = served.values()
    assert not {"cache", "draft"} & set(long)
    assert {"cache", "draft"} & set(growing[:4])
    assert not {"cache", "draft"} & set(growing[-2:])
    assert {"cache", "draft"} & set(short[-2:])


def test_the_drafts_memory_is_full_for_a_while(llm: LLM) -> None:
    drafted = llm.sibling(method="ssd-uniform", draft="drop:2", **SIZES)
    pool, hoard, counts = drafter_of(drafted).pool, PageTable(), watch(drafted)
    params = sample(max_tokens=60)
    stream = drafted.stream("the end", params)
    found = [token for _ in range(4) for token in next(stream).token_ids]
    before = counts["cache"] + counts["draft"]
    assert before > 0
    assert pool.reserve(hoard, pool.n_free * pool.page_size)
    while counts.get("empty", 0) < 5:  # until the pages it has are used up, and then some
        found += next(stream).token_ids
    pool.release(hoard)
    middle = counts["cache"] + counts["draft"]
    found += [token for delta in stream for token in delta.token_ids]
    assert counts["cache"] + counts["draft"] > middle
    assert found == llm.generate("the end", params)[0].token_ids


# What is reported


@pytest.mark.parametrize("method", [*SHARED, "saguaro"])
def test_deltas_and_completions_agree(llm: LLM, method: str) -> None:
    drafted = llm.sibling(method=method, draft="drop:2", **SIZES)
    engine, params = drafted.engine, sample(max_tokens=25)
    name = engine.add("the end", params)
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    output = engine.result(name).outputs[0]
    assert output.n_rounds == len(deltas)
    assert output.n_rounds < 25 or method == "ngram"
    for delta in deltas[:-1]:
        assert len(delta.token_ids) == delta.n_accepted + 1
    assert all((delta.n_accepted == 0) or delta.source != "empty" for delta in deltas)
    last = deltas[-1]
    assert 0 <= len(last.token_ids) - last.n_accepted <= 1
    assert sum(delta.n_accepted for delta in deltas) + output.n_rounds - 25 in (0, 1)
    assert deltas[0].source == "empty"


def test_only_requests_that_want_it_are_speculated(llm: LLM, folder: Path) -> None:
    drafted = llm.sibling(method="ssd-uniform", draft=str(folder), **SIZES)
    params = [sample(speculation=at % 2 == 0) for at in range(4)]
    for result, own in zip(drafted.generate(PROMPTS, params), params, strict=True):
        assert (result.outputs[0].n_rounds == 15) == (not own.speculation)
    link = drafted.engine.round.draft
    assert isinstance(link, Inline)
    drafted.stream("an", sample(speculation=False)).pump()
    assert list(link.side.rows) == []


# What cannot be


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "ar"),
        ({"draft": "drop:1"}, "ssd"),
        ({"draft": "drop:1", "method": "ar"}, "ar"),
        ({"method": "ngram"}, "ngram"),
        ({"method": "sd", "fallback": "ngram"}, "sd"),
        ({"method": "sd", "fallback": "empty"}, "sd"),
        ({"draft": "suffix"}, "sd"),
        ({"draft": "suffix", "method": "ssd"}, "ssd"),
        ({"draft": "suffix+drop:1"}, "ssd"),
        ({"draft": "suffix+drop:1", "method": "pearl"}, "pearl"),
        ({"method": "sd", "fallback": "suffix"}, "sd"),
    ],
)
def test_the_method_of_a_config(llm: LLM, settings: dict[str, str], method: str) -> None:
    chosen = choose_method(EngineConfig(**settings))  # type: ignore[arg-type]
    assert chosen.name == method
    made = llm.sibling(**{**SIZES, "prepare": "auto", **settings})
    assert made.engine.method == chosen
    assert made.engine.scheduler.depth == (3 if chosen.drafts else 0)
    assert made.engine.scheduler.lookahead == (3 if chosen.drafts else 0)  # on a CPU, chains
    assert made.generate("the", GREEDY)[0].token_ids == llm.generate("the", GREEDY)[0].token_ids


@pytest.mark.parametrize(("prepare", "policy"), [("auto", NeverPrepare), ("always", AlwaysPrepare)])
def test_in_the_targets_own_thread_ssd_prepares_only_if_told(llm: LLM, prepare: str, policy: type) -> None:
    for method in PREPARING:
        made = llm.sibling(method=method, draft="drop:2", **{**SIZES, "prepare": prepare})
        link = made.engine.round.draft
        assert isinstance(link, Inline)
        assert type(link.side.policy.prepare) is (policy if method == "ssd" else AlwaysPrepare)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "sdd"}, ConfigError, "method is 'sdd'; did you mean 'sd'?"),
        ({"method": "best"}, ConfigError, "method is 'best'; known methods: ar, sd, ngram"),
        ({"method": "ssd"}, ConfigError, "method ssd needs a draft model and none is given; pass draft (--draft)"),
        ({"method": "ngram", "fallback": "measured"}, ConfigError, "method ngram needs a draft model"),
        ({"fallback": "luck"}, ConfigError, "fallback is 'luck'; it must be one of auto, draft, ngram, random"),
        ({"prepare": "never"}, ConfigError, "prepare is 'never'; it must be one of auto, always"),
        ({"verification": "trust"}, ConfigError, "verification is 'trust'; it must be one of auto, shared, rejection"),
        ({"link": "tcp"}, ConfigError, "link is 'tcp'; it must be one of auto, inline, process"),
        ({"draft_device": "gpu"}, ConfigError, "draft_device is 'gpu'; it must be auto, cpu, cuda or cuda:N"),
        ({"budget": 0}, ConfigError, "budget is 0; it must be between 1 and 256"),
        ({"budget": 257}, ConfigError, "budget is 257; it must be between 1 and 256"),
        ({"lookahead": 0}, ConfigError, "lookahead is 0; it must be between 1 and 64"),
        ({"saguaro_c": 1.01}, ConfigError, "saguaro_c is 1.01; it must be between 0 and 1 (off)"),
        ({"draft_timeout": 0}, ConfigError, "draft_timeout is 0; it must be more than 0"),
        ({"draft_threads": 0}, ConfigError, "draft_threads is 0; it must be between 1 and 1024"),
        ({"draft": "/no/such/draft"}, ModelNotFound, "'/no/such/draft' is no folder, no .gguf file and no Hub id"),
        ({"draft": "drop:9"}, ConfigError, "draft is 'drop:9'; the target has layers 0 to 3, and one must be left"),
        (
            {"draft": "suffix", "method": "pearl"},
            ConfigError,
            "method pearl prepares with a draft model, and the draft",
        ),
        ({"draft": "suffix+"}, ConfigError, "draft is 'suffix+'; it must be suffix, or suffix+ and one draft model"),
        ({"draft": "suffix+suffix"}, ConfigError, "draft is 'suffix+suffix'; it must be suffix, or suffix+ and one"),
        ({"draft": "suffix+/no/such"}, ModelNotFound, "'/no/such' is no folder, no .gguf file and no Hub id"),
        ({"draft": "suffix+default"}, ConfigError, "draft is 'suffix+default', and"),
        (
            {"draft": "suffix", "suffix_store": 5},
            ConfigError,
            "suffix_store is 5; it must be 0 (none), or between 1024",
        ),
        ({"draft": "drop:1", "suffix_store": 4096}, ConfigError, "suffix_store is 4096, and the draft is 'drop:1'"),
        ({"draft": "drop:x"}, ConfigError, "draft is 'drop:x'; write drop: and layers, such as drop:20"),
    ],
)
def test_settings_that_cannot_be(llm: LLM, settings: dict[str, Any], error: type[SaguaroError], message: str) -> None:
    with pytest.raises(error) as e:
        llm.sibling(**{"link": "inline", **settings})
    assert str(e.value).startswith(message)


def test_a_draft_that_speaks_otherwise(llm: LLM, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path, "llama", vocab_size=200)
    with pytest.raises(TokenizerMismatch, match=r"knows 200 tokens, the target .* says 264; a draft must have"):
        llm.sibling(draft=str(draft), link="inline")


def test_a_method_without_a_model_does_not_load_the_draft(llm: LLM) -> None:
    made = llm.sibling(method="ngram", draft="/no/such/draft", link="inline")
    assert made.generate("the", GREEDY)[0].token_ids == llm.generate("the", GREEDY)[0].token_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_draft_device_that_is_not_there_is_named(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="draft_device is 'cuda'; this machine has 0 CUDA devices"):
        llm.sibling(method="sd", draft="drop:1", draft_device="cuda", link="inline")

"""Whole engines with a draft service: the tokens are those of `ar`, for several targets at once, whatever breaks."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM
from saguaro.config import DraftConfig
from saguaro.draft.policy.ask import AlwaysAsk
from saguaro.engine.results import Result
from saguaro.errors import ConfigError, DraftError
from saguaro.link.address import Address
from saguaro.link.answer import Side
from saguaro.link.apart import Apart, Timeouts
from saguaro.link.served import ServedModel, Source, load_served
from saguaro.link.service import Service
from saguaro.link.several import Several
from saguaro.method import METHODS
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_eagle import LAYOUTS, write_tiny_eagle
from saguaro.round import DraftSide
from tests.engine.driver import link_of, run, sample, watch
from tests.link.service import KEY, Relay, key_file, served, serving
from tests.link.target import until

PROMPTS: list[str | list[int]] = ["the end", "in an other", [104, 105], "an"]
SETTINGS: dict[str, Any] = {"lookahead": 3, "budget": 4, "draft_timeout": 60.0}
CPU = torch.device("cpu")


PARAMS = [sample(), sample(temperature=0.0), sample(n=2, top_p=0.9), sample(logit_bias={101: 2.0}, min_p=0.01)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return key_file(tmp_path_factory.mktemp("key"))


class Host:
    """A service of a model, and the draft sides that it has built."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.sides = model, list["weakref.ref[DraftSide]"]()
        self.service: Service
        self.address: Address

    def build(self, config: DraftConfig) -> tuple[Side, int]:
        """As the model does; remembered."""
        side, n_tokens = self.model.build(config)
        assert isinstance(side, DraftSide)
        self.sides.append(weakref.ref(side))
        return side, n_tokens

    def rest(self) -> None:
        """Wait until the preparation is complete."""
        time.sleep(0.01)  # the reply is sent before the preparation begins
        until(lambda: self.service.is_idle)

    @property
    def living(self) -> list[DraftSide]:
        """Sides that were not freed."""
        gc.collect()
        return [side for each in self.sides if (side := each()) is not None]


@contextlib.contextmanager
def hosting(model: ServedModel, **others: Any) -> Iterator[Host]:
    """A service of this model, in threads of this process."""
    host = Host(model)
    with serving(served(offer=model.offer, build=host.build, **others)) as (host.service, host.address):
        yield host


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    """A part of the target, so that some of what it says is right."""
    source = Source(draft="drop:2", target=folder, device=CPU, dtype="int8")
    return load_served(source, max_rows=32, max_tokens=2**20)


@pytest.fixture(scope="module")
def host(model: ServedModel) -> Iterator[Host]:
    with hosting(model) as one:
        yield one


def tokens(results: list[Result]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(run(plain.engine, PROMPTS, PARAMS))


@contextlib.contextmanager
def drafted(plain: LLM, key: str, address: Address, draft: str = "", **settings: Any) -> Iterator[LLM]:
    """A target with a draft that is served there."""
    chosen = {"draft": f"{draft}tcp://{address}", "draft_key_file": key, **SETTINGS, **settings}
    with plain.sibling(**chosen) as llm:
        link_of(llm).patience = Timeouts(pauses=(0.0,))
        yield llm


# In step


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.needs_model])
def test_every_method_gives_the_tokens_of_ar(
    method: str, plain: LLM, key: str, host: Host, expected: list[list[int]]
) -> None:
    verification = {"verification": "shared"} if METHODS[method].verification == "rejection" else {}
    with drafted(plain, key, host.address, method=method, prepare="always", **verification) as llm:
        summary, link = watch(llm), link_of(llm)
        llm.engine.round.observers.append(lambda _: host.rest())  # a draft this slow is late in most rounds
        assert tokens(run(llm.engine, PROMPTS, PARAMS)) == expected
        assert (link.n_starts, link.n_deaths, link.n_late) == (1, 0, 0), link.failure
        assert sum(n for source, n in summary.by_source.items() if source != "empty") > 0
        assert llm.engine.placed.placement.is_service
    until(lambda: not host.service.sessions)
    assert host.living == [], "all that a session held is freed"


def test_rejection_and_what_followed_earlier(plain: LLM, key: str, host: Host) -> None:
    greedy = sample(temperature=0.0)
    alone = plain.generate("the end", greedy)[0].token_ids
    for draft, settings in (("", {"method": "saguaro"}), ("suffix+", {}), ("", {"nodes": 8, "width": 2})):
        with drafted(plain, key, host.address, draft, **settings) as llm:
            assert llm.generate("the end", greedy)[0].token_ids == alone
            assert link_of(llm).n_deaths == 0, link_of(llm).failure


def test_a_grammar_is_followed_by_the_draft_too(plain: LLM, key: str, host: Host) -> None:
    params = sample(structured={"regex": "[a-d]{30}"}, ignore_eos=False, max_tokens=64)
    with drafted(plain, key, host.address, method="sd") as llm:
        summary = watch(llm)
        assert llm.generate("x", params)[0].token_ids == plain.generate("x", params)[0].token_ids
        assert link_of(llm).n_deaths == 0, link_of(llm).failure
        assert summary.acceptance is not None
        assert summary.acceptance > 0.5


def test_methods_without_a_model_do_not_connect(plain: LLM, key: str) -> None:
    with plain.sibling(draft="tcp://127.0.0.1:1", draft_key_file=key, method="ngram") as llm:
        assert not isinstance(llm.engine.round.draft, Apart)


# Several targets


def test_two_targets_at_once_and_one_that_leaves(plain: LLM, key: str, folder: Path, host: Host) -> None:
    """Another target of the same shape with weights of its own, in a thread of its own."""
    other = LLM(folder, device="cpu", kv_memory="2MiB", threads=1, max_batch_rows=3)
    params = [replace(params, seed=seed) for seed, params in enumerate(PARAMS)]
    expected = tokens(run(plain.engine, PROMPTS, params))
    with drafted(plain, key, host.address, method="swiftspec") as one, contextlib.ExitStack() as stack:
        two = stack.enter_context(drafted(other, key, host.address, method="ssd-uniform"))
        found: dict[str, list[list[list[int]]]] = {"one": [], "two": []}

        def work(name: str, llm: LLM) -> None:
            found[name] += [tokens(run(llm.engine, PROMPTS, params)) for _ in range(3)]

        threads = [threading.Thread(target=work, args=each) for each in (("one", one), ("two", two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"one": [expected] * 3, "two": [expected] * 3}
        assert len(host.service.sessions) == len(host.living) == 2
        stack.close()
        until(lambda: len(host.service.sessions) == 1)
        assert len(host.living) == 1, "pages and trees of the other are given back"
        assert tokens(run(one.engine, PROMPTS, params)) == expected
        assert all(link_of(llm).n_deaths == 0 for llm in (one,))
    other.close()


# Out of step


def test_a_link_that_is_cut_again_and_again(plain: LLM, key: str, host: Host, expected: list[list[int]]) -> None:
    with contextlib.closing(Relay(host.address)) as between, drafted(plain, key, between.address, method="sd") as llm:
        link = link_of(llm)
        for attempt in range(3):
            summary = watch(llm)
            ids = [llm.engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
            for step in range(10**6):
                if not llm.engine.has_work:
                    break
                if step == 2 + 3 * attempt:
                    between.cut()
                llm.engine.step()
            assert tokens([llm.engine.result(name) for name in ids]) == expected
            until(lambda s=summary: bool(llm.generate("the", sample(12))) and s.by_source["draft"] > 12)  # type: ignore[misc]
            assert link.n_deaths == attempt + 1


def test_two_services_share_the_rows(plain: LLM, key: str, host: Host, model: ServedModel) -> None:
    """One of them is cut off while the target decodes; the other takes its rows."""
    params = [replace(params, seed=seed) for seed, params in enumerate(PARAMS)]
    expected = tokens(run(plain.engine, PROMPTS, params))
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(hosting(model))
        between = stack.enter_context(contextlib.closing(Relay(other.address)))
        names = {"draft": f"tcp://{host.address},tcp://{between.address}", "draft_key_file": key}
        for method in ("sd", "ssd", "swiftspec"):
            llm = stack.enter_context(plain.sibling(**names, **SETTINGS, method=method, nodes=6, width=2))
            link = llm.engine.round.draft
            assert isinstance(link, Several)
            assert tokens(run(llm.engine, PROMPTS, params)) == expected
            assert [len(each.service.sessions) for each in (host, other)] == [1, 1]
            assert all(each.service.sessions[0].counts.n_requests > 0 for each in (host, other))
            ids = [llm.engine.add(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
            for _ in range(3):
                llm.engine.step()
            between.cut()
            while llm.engine.has_work:
                llm.engine.step()
            assert tokens([llm.engine.result(name) for name in ids]) == expected
            assert (link.links[0].n_deaths, link.links[1].n_deaths) == (0, 1)
            llm.close()
            until(lambda: not host.service.sessions + other.service.sessions)


def test_the_time_on_the_way_is_a_part_of_a_round_to_the_policy(plain: LLM, key: str, host: Host) -> None:
    """It counts what a round takes from its reply to the next outcome, both ways of the link included."""
    with contextlib.ExitStack() as stack:
        between = stack.enter_context(contextlib.closing(Relay(host.address, delay_s=0.02)))
        llm = stack.enter_context(drafted(plain, key, between.address, method="sd"))
        llm.generate("the end", sample(24))
        (side,) = host.living
        assert side.policy.learnt.alone.n > 4
        assert side.policy.learnt.alone.at(1) > 0.04
        assert link_of(llm).n_late == 0
        del side
    until(lambda: not host.service.sessions)


def test_a_draft_far_away_is_asked_no_more(plain: LLM, key: str, host: Host) -> None:
    """The target's rounds take a fraction of the way there and back. After a reconnect the draft is asked at once."""
    expected = plain.generate("the end", sample(40))[0].token_ids
    with contextlib.closing(Relay(host.address, delay_s=0.04)) as between, drafted(plain, key, between.address) as llm:
        asks, link = llm.engine.round.asks, link_of(llm)

        def is_same() -> bool:
            return llm.generate("the end", sample(40))[0].token_ids == expected

        until(lambda: is_same() and not asks.is_asking)
        summary = watch(llm)
        assert is_same()
        assert summary.by_source["empty"] == summary.n_tokens == 40
        assert summary.asked.n == 0
        assert "The draft is not asked: " in (llm.engine.explain(is_any_prepared=False) or "")
        assert (link.n_deaths, link.n_late) == (0, 0)
        between.cut()
        until(lambda: is_same() and summary.asked.n > 0)
        until(lambda: is_same() and not asks.is_asking)
        assert link.n_deaths == 1


@pytest.mark.parametrize("settings", [{"method": "sd"}, {"prepare": "always"}, {"fallback": "draft"}])
def test_a_draft_that_is_chosen_is_always_asked(settings: dict[str, Any], plain: LLM, key: str, host: Host) -> None:
    with drafted(plain, key, host.address, **settings) as llm:
        assert isinstance(llm.engine.round.asks, AlwaysAsk)


# Not at all


def test_another_target_and_limits(plain: LLM, key: str, host: Host, tmp_path: Path, model: ServedModel) -> None:
    small = LLM(write_tiny(tmp_path, "llama", num_hidden_layers=3), device="cpu", kv_memory="2MiB", threads=1)
    with pytest.raises(DraftError, match=r"is made from a target of 4 layers of \d+ .*, and this target has 3 layers"):
        small.sibling(draft=f"tcp://{host.address}", draft_key_file=key)
    few = ServedModel(model.own, model.model, model.tokenizer, replace(model.terms, max_rows=4, max_tokens=99))
    with hosting(few) as other:
        for settings, said in (({}, "at most 4 rows"), ({"max_batch_rows": 4}, "a session has at most 99; lower kv")):
            with pytest.raises(DraftError, match=said):
                plain.sibling(draft=f"tcp://{other.address}", draft_key_file=key, **settings)


def test_what_is_served_without_its_target(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the draft drop:1 uses weights of its target; pass .* --target"):
        load_served(Source(draft="drop:1", device=CPU, dtype="int8"), max_rows=1, max_tokens=1)
    eagle = write_tiny_eagle(tmp_path, next(iter(LAYOUTS)), folder)
    with pytest.raises(ConfigError, match="is a draft of kind EAGLE-3: it reads features of its target"):
        load_served(Source(draft=str(eagle), target=folder, device=CPU, dtype="int8"), max_rows=1, max_tokens=1)


def test_a_draft_of_its_own_is_offered_with_its_vocabulary(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "small", "qwen3", seed=5)
    found = load_served(Source(draft=str(path), device=CPU, dtype="int8"), max_rows=1, max_tokens=1)
    assert (found.terms.model, found.terms.target) == ("small", None)
    assert found.tokenizer is not None
    assert (found.offer.sums != 0).sum() == len(found.tokenizer.spelling)
    assert KEY not in found.offer.sums.tobytes()

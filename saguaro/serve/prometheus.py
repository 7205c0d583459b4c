"""The server's metrics for Prometheus: vLLM's names where they exist, and our own.

Rounds are counted once, by measure.metrics.Summary, and read on every scrape. The engine's thread reports requests
as they happen. Each server has its own registry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from saguaro.engine.engine import Engine
from saguaro.engine.results import Completion
from saguaro.link.apart import Apart
from saguaro.link.several import Several
from saguaro.measure.metrics import NumberedRates, Rate, Summary

# vLLM's, in seconds.
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

LABELS = ("model_name", "engine")


class Metrics:
    """Counts a server's requests. Implements saguaro.serve.front.Watcher."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry, self.summary = CollectorRegistry(), Summary()
        self._names = {"model_name": model, "engine": "0"}
        engine.round.observers.append(self.summary.add)
        ProcessCollector(registry=self.registry)
        self._make_gauges(engine)
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated")
        about = "Outputs that ended, by reason"
        self._ended = Counter("vllm:request_success", about, (*LABELS, "finished_reason"), registry=self.registry)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", FIRST)
        about = "Between two rounds that gave an output tokens"
        self._next = self._histogram("vllm:inter_token_latency_seconds", about, NEXT)
        self._next_old = self._histogram("vllm:time_per_output_token_seconds", f"{about} (former name)", NEXT)
        about = "Mean time of an output's tokens after the first"
        self._each = self._histogram("vllm:request_time_per_output_token_seconds", about, NEXT)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", WHOLE)
        self.registry.register(RoundCollector(engine, self.summary, self._names))

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def labelled(self, engine: str) -> list[Metric]:
        """All metrics as plain values, with this value of the label `engine` on each."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [one._replace(labels={**one.labels, "engine": engine}) for one in family.samples]
        return families

    def joined(self, n_prompt: int) -> None:
        """A prompt with this many tokens was queued."""
        self._prompt.inc(n_prompt)

    def grew(self, n_tokens: int, since: float, is_first: bool) -> None:
        """An output got tokens. since: time since its last tokens, or since arrival for the first."""
        self._generated.inc(n_tokens)
        for histogram in (self._first,) if is_first else (self._next, self._next_old):
            histogram.observe(since)

    def ended(self, reason: str, seconds: float, output: Completion | None) -> None:
        """An output ended, this long after the request arrived; None: it was discarded."""
        self._ended.labels(**self._names, finished_reason=reason).inc()
        self._whole.observe(seconds)
        if output is not None and output.timings.decode_tok_s > 0:
            self._each.observe(1 / output.timings.decode_tok_s)

    def _make_gauges(self, engine: Engine) -> None:
        scheduler, pool = engine.scheduler, engine.pool
        gauges = {
            "vllm:num_requests_running": ("Outputs being decoded", lambda: len(scheduler.running)),
            "vllm:num_requests_waiting": ("Outputs waiting to be", lambda: len(scheduler.waiting)),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV memory in use, 1 is all",
                lambda: 1 - pool.n_free / pool.n_pages,
            ),
        }
        for name, (about, read) in gauges.items():
            Gauge(name, about, LABELS, registry=self.registry).labels(**self._names).set_function(read)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, LABELS, registry=self.registry).labels(**self._names)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, LABELS, buckets=buckets, registry=self.registry).labels(**self._names)


class RoundCollector(Collector):
    """Metrics of rounds, read from their summary."""

    def __init__(self, engine: Engine, summary: Summary, names: Mapping[str, str]) -> None:
        self._engine, self._summary, self._names = engine, summary, names

    def describe(self) -> list[Metric]:
        """Nothing to describe in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        rounds, link = self._summary, self._engine.round.draft
        sources = dict(rounds.by_source)
        n_drafts = sum(n for name, n in sources.items() if name != "empty")
        spec = "vllm:spec_decode_num"
        yield self._one(f"{spec}_drafts", "Speculations that were verified", n_drafts)
        yield self._one(f"{spec}_draft_tokens", "Tokens that were speculated", rounds.accepted.of)
        yield self._one(f"{spec}_accepted_tokens", "Tokens that were speculated and accepted", rounds.accepted.n)
        each = {str(at): float(rate.n) for at, rate in enumerate(list(rounds.by_position))}
        about = "Tokens that were accepted, by their place in the speculation"
        yield self._many(f"{spec}_accepted_tokens_per_pos", about, "position", each)
        yield from self._nodes("depth", "depth in the tree, 1: the first after the text", rounds.by_depth)
        yield from self._nodes("rank", "rank among its siblings, 1: the first", rounds.by_rank)
        yield self._one(
            "vllm:num_preemptions", "Times a request gave up its pages", self._engine.scheduler.n_preemptions
        )
        yield self._one("saguaro:rounds", "Rounds played", rounds.n_rounds)
        after = {"primary": rounds.hits_after_primary, "backup": rounds.hits_after_backup}
        about = "after a speculation that was itself prepared (primary) or not (backup)"
        yield self._many("saguaro:cache_hits", f"Outcomes that were prepared, {about}", "after", _hits(after))
        yield self._many("saguaro:cache_misses", f"Outcomes that were not prepared, {about}", "after", _misses(after))
        fallbacks = {name: float(n) for name, n in sources.items() if name != "cache"}
        about = "Rounds of an output without a hit, by source of the speculation (empty: none)"
        yield self._many("saguaro:fallbacks", about, "source", fallbacks)
        about = "Rounds in which a draft elsewhere was not asked, because rounds without it were faster"
        yield self._one("saguaro:rounds_unasked", about, rounds.asked.of - rounds.asked.n)
        yield self._one("saguaro:draft_busy_seconds", "The draft's working time", rounds.busy_s)
        about = "The draft's working time during which the target did not verify"
        yield self._one("saguaro:draft_exposed_seconds", about, rounds.exposed_s)
        n_restarts = max(0, link.n_starts - 1) if isinstance(link, Apart | Several) else 0
        yield self._one(
            "saguaro:draft_restarts", "Times the draft was started, or its service reached, again", n_restarts
        )

    def _nodes(self, label: str, about: str, rates: NumberedRates) -> Iterator[Metric]:
        """Nodes of trees verified and accepted, by depth or rank. A chain is a tree with one child per node."""
        named = rates.named()
        verified = {name: float(rate.of) for name, rate in named.items()}
        yield self._many(f"saguaro:nodes_verified_by_{label}", f"Tokens speculated, by {about}", label, verified)
        yield self._many(f"saguaro:nodes_accepted_by_{label}", f"Tokens accepted, by {about}", label, _hits(named))

    def _one(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=list(self._names))
        family.add_metric(list(self._names.values()), value)
        return family

    def _many(self, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, about, labels=[*self._names, label])
        for of, value in values.items():
            family.add_metric([*self._names.values(), of], value)
        return family


class Merged(Collector):
    """The metrics of several engines, with one header for those of the same name."""

    def __init__(self, engines: Iterable[Sequence[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for families in engines:
            for family in families:
                known = self._families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples

    def describe(self) -> list[Metric]:
        """Nothing to describe in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._families.values()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _hits(rates: Mapping[str, Rate]) -> dict[str, float]:
    return {name: float(rate.n) for name, rate in rates.items()}


def _misses(rates: Mapping[str, Rate]) -> dict[str, float]:
    return {name: float(rate.of - rate.n) for name, rate in rates.items()}

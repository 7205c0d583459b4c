"""Builds the parts of an engine from a config: draft, KV memory, scheduler, verifier and link.

On a GPU the memory is planned before allocation: weights are loaded, the workspace is estimated, and the keys and
values of target and draft share the rest.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from saguaro import __version__
from saguaro.algo.tree import most_positions
from saguaro.config import DraftConfig, EngineConfig, format_bytes
from saguaro.device.affinity import Affinity, rank_affinities, split_cores, usable_cores
from saguaro.device.graphs import bucket, captured_sizes, guard
from saguaro.device.machine import device_model
from saguaro.draft.block_pass import MOST_TOKENS
from saguaro.draft.load import features_read, load_draft
from saguaro.draft.policy.ask import MeasuredAsk
from saguaro.draft.policy.kept import KeptFile, file_name
from saguaro.engine.placement import Placed, Placement, Rates, choose_placement, rates_of
from saguaro.engine.preparation import Preparation, choose_preparation
from saguaro.errors import CapacityError, ConfigError
from saguaro.kernels.best import ranker_for
from saguaro.kernels.bundle import kernels_for
from saguaro.kernels.formats import fastest
from saguaro.kv.memory import KVPlan, plan_kv
from saguaro.kv.pages import PagePool
from saguaro.link.address import ServiceName
from saguaro.link.apart import Apart
from saguaro.link.connection import draft_service
from saguaro.link.handshake import read_key
from saguaro.link.inline import Inline
from saguaro.link.null import NullLink
from saguaro.link.offer import Expected, TargetShape
from saguaro.link.process import draft_process
from saguaro.link.several import Several
from saguaro.method import METHODS, MODEL_FALLBACKS, Method, find_method
from saguaro.methods import draft_shape, draft_side
from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.grammar import Grammars
from saguaro.model.load import Loaded, locate
from saguaro.model.split import largest_share
from saguaro.model.tokenizer import Tokenizer
from saguaro.model.transformer import Transformer
from saguaro.parallel.lead import LeadRunner
from saguaro.parallel.ranks import Ranks
from saguaro.round import Round, Verifies
from saguaro.target.pinned import Pins
from saguaro.target.rules import Rejection, SharedNoise
from saguaro.target.sampler import Sampler
from saguaro.target.scheduler import Scheduler
from saguaro.target.shape import RunnerShape, build_runner
from saguaro.target.step_cost import LatencyBudget
from saguaro.target.tables import table_bytes
from saguaro.target.verifier import Runs, Verifier
from saguaro.types import DraftLink, Progress

log = logging.getLogger(__name__)

NODES = {"cpu": 1, "cuda": 31}  # default of nodes, at least the lookahead; on a CPU every verified token takes time
NODES_PER_WIDTH = 4  # default of width, relative to nodes
START_SECONDS = 600.0  # time limit for loading a draft
INTER_TOKEN_S = {"cpu": 0.2, "cuda": 0.05}  # default of max_inter_token_ms, in seconds
INTER_TOKEN_ROUNDS = 2.0  # or this many plain rounds, if they are longer: prompts must make progress
INTER_TOKEN_MOST_S = {"cpu": 0.25, "cuda": 0.1}  # but never longer than this, in seconds
# Settings of the draft side for any of which what was learnt holds.
FREE = ("n_tokens", "n_features", "n_step", "read_s", "generation", "tokenizer", "learnt", "learnt_facts")
READ_SHARE = 0.25  # the draft's share of that time, for reading texts


@dataclass
class Parts:
    """The parts of an engine."""

    method: Method
    n_known: int  # number of tokens that the target can emit
    eos_ids: frozenset[int]
    grammars: Grammars
    kv: KVPlan
    pool: PagePool
    scheduler: Scheduler
    round: Round
    preparation: Preparation
    placed: Placed
    lead: LeadRunner | None
    learnt: KeptFile | None
    tuned: KeptFile | None
    memory: dict[str, int]  # bytes
    seconds: dict[str, float]


@dataclass
class Assembly:
    """Builds an engine around a target."""

    target: Loaded
    tokenizer: Tokenizer
    config: EngineConfig
    given: Transformer | None = None  # a draft in this process, instead of the configured one
    verifier: Verifies | None = None  # instead of the target's own: its weights are not used, its KV not allocated
    ranks: Ranks | None = None  # that hold the other parts of the target; None: it is whole
    method: Method = field(init=False)

    def __post_init__(self) -> None:
        self.method = choose_method(self.config)
        self.nodes, self.width = tree_shape(self.config, self.method, self.target.model.device)
        self.n_known = min(self.tokenizer.n_vocab, self.target.model.spec.n_vocab)
        spec, eos = self.target.model.spec, self.tokenizer.eos_id
        every = (*spec.eos_ids, *([eos] if eos is not None else []))
        self.eos_ids = frozenset(token for token in every if 0 <= token < spec.n_vocab)
        self.grammars = Grammars(lambda: self.tokenizer, self.n_known, self.eos_ids)
        self.lead: LeadRunner | None = None
        self.memory: dict[str, int] = {"weights": self.target.weight_bytes}
        self.seconds: dict[str, float] = {}

    def build(self, progress: Progress) -> Parts:
        """Build all parts. If memory runs out, the error names the settings to lower."""
        config, model = self.config, self.target.model
        with self._timed("draft"):
            draft = self._draft_model(progress)
        kv = self._plan(draft)
        pool = PagePool(kv.n_pages, kv.page_size, config.prefix_caching)
        scheduler = Scheduler(
            pool,
            max_length=kv.max_length,
            max_rows=config.max_batch_rows,
            max_tokens=config.max_batch_tokens,
            lookahead=self.nodes if self.method.drafts else 0,
            depth=config.lookahead if self.method.drafts else 0,
            patience=self._patience(),
        )
        try:
            with self._timed("memory"):
                with guard(model.device):
                    verifier = self.verifier if self.verifier is not None else self._verifier(kv, scheduler)
                link = self._link(kv, draft)
            with self._timed("graphs"):
                self._warm(verifier, link, progress)
        except torch.OutOfMemoryError as e:
            raise CapacityError(
                f"the memory of {model.device} is full: {self._taken()} ({str(e).splitlines()[0]}); lower kv_memory, "
                "max_model_len, max_batch_rows, budget or max_batch_tokens"
            ) from e
        asks = MeasuredAsk(link) if isinstance(link, Apart | Several) and self.method.is_measured else None
        round_ = Round(scheduler, verifier, link, asks)
        return Parts(
            method=self.method,
            n_known=self.n_known,
            eos_ids=self.eos_ids,
            grammars=self.grammars,
            kv=kv,
            pool=pool,
            scheduler=scheduler,
            round=round_,
            preparation=self._preparation(),
            placed=self.placed,
            lead=self.lead,
            learnt=self._learnt_file(),
            tuned=self._tuned_file(),
            memory=self.memory,
            seconds=self.seconds,
        )

    def _draft_model(self, progress: Progress) -> Transformer | None:
        """Load the draft model, if the draft runs in this process."""
        if not self.method.needs_model:
            return None
        config = self._draft_config(n_tokens=0)
        if self.placed.placement.is_apart:
            return None
        progress("loading the draft", 0, 1)
        whole = self.target.model if self.ranks is None else None  # that a draft can share weights with
        draft = self.given if self.given is not None else load_draft(config, whole)
        progress("loading the draft", 1, 1)
        shared = {p.data_ptr() for p in self.target.model.parameters()}
        own = [p for p in draft.parameters() if p.data_ptr() not in shared]
        theirs = {id(weight) for weight in self.target.model.packed}
        packed = [weight for weight in draft.packed if id(weight) not in theirs]
        plain_bytes = sum(p.numel() * p.element_size() for p in own)
        self.memory["draft weights"] = plain_bytes + sum(weight.n_bytes for weight in packed)
        return draft

    def _plan(self, draft: Transformer | None) -> KVPlan:
        """Plan the target's KV memory, leaving room for the draft's on a shared device."""
        model = self.target.model
        beside = 0
        if draft is not None and draft.device == model.device:
            beside = draft.spec.kv_bytes_per_token(draft.dtype)
        workspace = self._workspace(draft) if model.device.type == "cuda" else 0
        n_ranks = model.split.size
        share = largest_share(model.spec, n_ranks)
        kv = plan_kv(self.config, share, model.device, model.dtype, beside, workspace, n_ranks)
        self.memory |= {"keys and values": kv.n_bytes, "draft keys and values": kv.n_tokens * beside}
        return kv

    def _workspace(self, draft: Transformer | None) -> int:
        """Upper estimate of the bytes that steps need in addition to weights, keys and values."""
        config, spec = self.config, self.target.model.spec
        rows = bucket(config.max_batch_rows)
        most = most_positions(rows, self.nodes, config.lookahead)
        logits = 2 * 4 * most * spec.n_vocab
        per_token = 4 * (2 * spec.intermediate + 4 * spec.hidden + 4 * spec.n_heads * spec.head_dim)
        n_bytes = logits + (config.max_batch_tokens + most) * per_token + table_bytes(rows, most, self.n_known)
        if draft is not None:
            shape = draft_shape(self._draft_config(0))
            n_places = (rows + 1) * (shape.places + 1)
            n_bytes += n_places * draft.spec.kv_bytes_per_token(draft.dtype)
            n_bytes += 2 * 4 * rows * max(shape.width, shape.budget) * draft.spec.n_vocab
            if self.method.verification == "rejection":
                n_bytes += 4 * n_places * draft.spec.n_vocab
        if self.reads is not None:
            n_bytes += self._of_features(self.reads, draft, most, rows)
        return n_bytes + 2**30  # kept by CUDA, libraries and captured graphs

    def _of_features(self, reads: FeatureSpec, draft: Transformer | None, most: int, rows: int) -> int:
        """Bytes of features: of a captured step's tokens and the accepted ones of every batch size, of an eager step's
        tokens, and those that the draft keeps, with its own states; and of the logits of blocks."""
        config, itemsize = self.config, self.target.model.dtype.itemsize
        n_bytes = reads.n_features * itemsize * (4 * most + 3 * config.max_batch_tokens)
        if draft is not None:
            shape = draft_shape(self._draft_config(0))
            kept = (shape.most_text + 1) * reads.n_features + (shape.places + 1) * draft.spec.hidden
            n_bytes += (rows + 1) * kept * draft.dtype.itemsize + 2 * 4 * MOST_TOKENS * draft.spec.n_vocab
        return n_bytes

    def _verifier(self, kv: KVPlan, scheduler: Scheduler) -> Verifier:
        model = self.target.model
        kernels = kernels_for(model.device)
        chosen_by = (kernels.rank, kernels.limits) if kernels else (ranker_for(model.device),)
        sampler = Sampler(self.n_known, *chosen_by)
        rule = SharedNoise(sampler) if self.method.verification == "shared" else Rejection(sampler)
        shape = RunnerShape(
            n_pages=kv.n_pages,
            page_size=kv.page_size,
            max_length=kv.max_length,
            max_rows=scheduler.max_rows,
            depth=scheduler.depth,
            nodes=scheduler.lookahead,
            n_known=self.n_known,
        )
        own = build_runner(model, shape, kernels, self.reads.taps if self.reads else ())
        if self.ranks is not None:
            self.lead = LeadRunner(own, self.ranks, self.ranks.open(shape, self._affinities()))
        runner: Runs = own if self.lead is None else self.lead
        return Verifier(runner, rule, n_known=self.n_known, pins=self._pins())

    def _affinities(self) -> list[Affinity]:
        """The cores and threads of every rank of the target; on a GPU any cores."""
        n_ranks, cores = self.target.model.split.size, usable_cores()
        if self.target.model.device.type != "cpu":
            return [Affinity(None, max(1, len(cores) // n_ranks))] * n_ranks
        ours = cores
        if self.placed.placement.takes_cores and self.method.prepares:  # a draft that is idle while the target works
            ours = sorted(split_cores(cores, self.placed.placement.threads)[0])
        return rank_affinities(ours, self.config.threads, n_ranks)

    def _link(self, kv: KVPlan, draft: Transformer | None) -> DraftLink:
        if not self.method.drafts:
            return NullLink()
        config = replace(self._draft_config(kv.n_tokens), prepare=self._preparation().when)
        file = self._learnt_file()
        if file is not None:
            config = replace(config, learnt=str(file.path), learnt_facts=json.dumps(file.facts))
        if not self.placed.placement.is_apart:
            device = torch.device(config.device)
            with guard(device):
                reads_prompts = not self._delays_first_tokens(config, draft)
                kernels, start = kernels_for(device), self.grammars.start
                side = draft_side(config, draft, kernels, start, reads_prompts=reads_prompts)
            return Inline(side, device)
        link = self._service(config) if self.placed.placement.is_service else self._process(config)
        try:
            link.wait_ready(START_SECONDS)
        except BaseException:
            link.close()
            raise
        return link

    def _delays_first_tokens(self, config: DraftConfig, draft: Transformer | None) -> bool:
        """Whether a draft in this process delays first tokens if it reads prompts before them: it shares the target's
        cores, and prepares nothing for these tokens. Features are read as they come, or those of whole prompts would
        have to be held."""
        prepares = self.method.prepares and config.prepare != "never"
        return config.device == "cpu" and draft is not None and self.reads is None and not prepares

    def _process(self, config: DraftConfig) -> Apart:
        """A draft in a process of its own."""
        threads = self.placed.placement.threads
        _, theirs = split_cores(usable_cores(), threads)
        return draft_process(config, threads=threads, cores=theirs, timeout=self.config.draft_timeout)

    def _service(self, config: DraftConfig) -> Apart | Several:
        """A draft that a service serves, or several services that share the rows."""
        spec, key = self.target.model.spec, read_key(self.config.draft_key_file)
        shape = TargetShape(spec.n_layers, spec.hidden, spec.n_vocab)
        names = [ServiceName.of(each) for each in self.config.services]
        links = [
            draft_service(
                config,
                at,
                key,
                Expected(at.model, self.n_known, shape, self.tokenizer.spelling),
                timeout=self.config.draft_timeout,
            )
            for at in names
        ]
        return links[0] if len(links) == 1 else Several(links)

    def _preparation(self) -> Preparation:
        """Whether outcomes are prepared, and why. In the target's own thread preparation could not overlap."""
        on_cpu = self.target.model.device.type == "cpu"
        return choose_preparation(self.method, self.placed, on_cpu=on_cpu, n_cores=len(usable_cores()))

    @cached_property
    def placed(self) -> Placed:
        """Where the draft runs, and why."""
        if not self.method.drafts:
            return Placed(Placement(), "only")
        return choose_placement(
            self.config,
            self.method,
            self._tuned(),
            draft_on=torch.device(self._draft_config(0).device).type,
            target_on=self.target.model.device.type,
            n_cores=len(usable_cores()),
        )

    @cached_property
    def reads(self) -> FeatureSpec | None:
        """What the draft reads of the target; None: tokens only."""
        if not self.method.needs_model:
            return None
        config, model = self.config, self.target.model
        if config.is_served:
            return None
        reads = self.given.reads if self.given is not None else features_read(self._draft_name(), model.spec)
        if reads is None:
            return None
        if self.verifier is not None:
            raise ConfigError(f"the draft {config.draft} reads features of its target; a replayed target has none")
        if reads.most_drafted is not None and config.lookahead > reads.most_drafted:
            raise ConfigError(
                f"lookahead is {config.lookahead}, and the draft {config.draft} drafts at most {reads.most_drafted} "
                f"tokens in a block; lower lookahead to {reads.most_drafted}"
            )
        return reads

    def _tuned(self) -> Rates:
        """What `saguaro tune` has measured here; empty if nothing."""
        file = self._tuned_file()
        state = file.read() if file is not None else None
        try:
            return rates_of(state) if file is not None and state is not None else {}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            log.warning("%s is ignored, it is damaged: %r", file and file.path, e)
            return {}

    def _pins(self) -> Pins | None:
        """A CPU target's own cores, for a draft or other ranks in other processes."""
        if self.ranks is not None:
            own = self._affinities()[0]
            return Pins(beside=own, everywhere=own) if self.target.model.device.type == "cpu" else None
        is_alone = not self.method.drafts or self.target.model.device.type != "cpu"
        if is_alone or not self.placed.placement.takes_cores:
            return None
        cores, threads = usable_cores(), self.config.threads
        ours, _ = split_cores(cores, self.placed.placement.threads)
        if not self.method.prepares:  # the draft is idle while the target works
            ours = frozenset(cores)
        everywhere = Affinity(frozenset(cores), threads or len(cores))
        return Pins(beside=Affinity(ours, threads or len(ours)), everywhere=everywhere)

    def _warm(self, verifier: Verifies, link: DraftLink, progress: Progress) -> None:
        """Capture the graphs for every batch size. A verifier that was given warms itself."""
        if not isinstance(verifier, Verifier) or not verifier.runs_ahead:
            return
        before = torch.cuda.mem_get_info(self.target.model.device)[0]
        sizes = captured_sizes(self.config.max_batch_rows)
        for done, size in enumerate(sizes):
            progress("capturing", done, len(sizes))
            verifier.warm(size)
            if isinstance(link, Inline):
                link.warm(size)
        progress("capturing", len(sizes), len(sizes))
        self.memory["graphs and workspace"] = max(0, before - torch.cuda.mem_get_info(self.target.model.device)[0])

    def _draft_config(self, n_tokens: int) -> DraftConfig:
        """The settings of the draft side."""
        config, method, model = self.config, self.method, self.target.model
        device = model.device if config.draft_device == "auto" else find_device("draft_device", config.draft_device)
        dtype = model.format if device.type == model.device.type else fastest(device)
        return DraftConfig(
            draft=self._draft_name() if method.needs_model else None,
            suffix=config.has_suffix and method.needs_model,
            suffix_store=config.suffix_store,
            target=str(self.target.path),
            tokenizer=self.tokenizer.name,
            growth=method.growth,
            fan_out=config.fan_outs,
            fallback=method.fallback,
            verification=method.verification,
            prepare=method.prepare,
            cut=method.cut,
            lookahead=config.lookahead,
            nodes=self.nodes,
            width=self.width,
            budget=config.budget,
            saguaro_c=config.saguaro_c,
            n_vocab=self.n_known,
            n_text=model.spec.n_vocab,
            ends=tuple(sorted(self.eos_ids)),
            max_rows=config.max_batch_rows,
            read_s=READ_SHARE * self._patience().limit,
            n_tokens=n_tokens,
            n_features=self.reads.n_features if self.reads else 0,
            n_step=config.max_batch_tokens,
            page_size=config.page_size,
            device=str(device),
            dtype=dtype,
        )

    def _learnt_file(self) -> KeptFile | None:
        """The file of what the draft's side learns."""
        if not self.method.drafts or self.placed.placement.is_service:
            return None
        place = self.placed.placement
        own = {"prepare": self._preparation().when, "link": place.link, "draft_threads": place.threads}
        return self._kept({"what": "learnt", **own})

    def _tuned_file(self) -> KeptFile | None:
        """The file of what `saguaro tune` measures."""
        is_open = self.method.needs_model and not self.config.is_served
        return self._kept({"what": "placements"}) if is_open else None

    def _kept(self, own: Mapping[str, Any]) -> KeptFile | None:
        """The file for these circumstances; None: nothing is kept."""
        folder = self.config.learnt_dir
        if folder in ("auto", "none"):  # an engine by itself knows no folder
            return None
        config = self._draft_config(0)
        facts = {name: value for name, value in asdict(config).items() if name not in FREE}
        facts |= {
            "saguaro": __version__,
            "cores": len(usable_cores()),
            "threads": torch.get_num_threads(),
            "target_on": device_model(self.target.model.device),
            "target_dtype": self.target.model.format,
            "draft_on": device_model(torch.device(config.device)),
            **own,
        }
        if self.ranks is not None:
            facts["ranks"] = self.ranks.size
        facts = json.loads(json.dumps(facts))
        return KeptFile(Path(folder) / file_name(facts), facts)

    def _patience(self) -> LatencyBudget:
        """How long prompts may delay decoding rows."""
        if self.config.max_inter_token_ms is not None:
            return LatencyBudget(self.config.max_inter_token_ms / 1e3)
        kind = self.target.model.device.type
        return LatencyBudget(INTER_TOKEN_S[kind], INTER_TOKEN_ROUNDS, INTER_TOKEN_MOST_S[kind])

    def _draft_name(self) -> str | None:
        """The path of the draft. drop: and a given model have none."""
        name = self.config.draft_model
        if name is None or self.given is not None or name.startswith("drop:") or self.config.is_served:
            return name
        return str(locate(name))

    def _taken(self) -> str:
        return ", ".join(f"{name} {format_bytes(n)}" for name, n in self.memory.items() if n)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def choose_method(config: EngineConfig) -> Method:
    """The method of a config, with the parts that the config replaces.

    >>> choose_method(EngineConfig()).name, choose_method(EngineConfig(draft="drop:3")).name
    ('ar', 'ssd')
    >>> choose_method(EngineConfig(draft="suffix")).name, choose_method(EngineConfig(draft="suffix+drop:3")).name
    ('sd', 'ssd')
    """
    usual = "ssd" if config.draft_model is not None else "sd" if config.has_suffix else "ar"
    method = find_method(usual if config.method == "auto" else config.method)
    if method.drafts and config.fallback != "auto":
        method = replace(method, fallback=config.fallback)
    if config.has_suffix and config.draft_model is None:
        method = _without_model(method)
    if config.prepare != "auto":
        method = replace(method, prepare=config.prepare)
    if config.verification != "auto":
        method = replace(method, verification=config.verification)
    if config.fan_out != "auto":
        if not method.has_fan_out:
            known = ", ".join(name for name, each in METHODS.items() if each.has_fan_out)
            raise ConfigError(
                f"fan_out is {config.fan_out!r}, and {method.name} has no fan-out; leave fan_out out, or use a method "
                f"that has one: {known}"
            )
        method = replace(method, growth="list" if config.fan_outs else config.fan_out)
    if config.saguaro_c != 1 and method.verification != "rejection":
        raise ConfigError(
            f"saguaro_c is {config.saguaro_c}, and {method.name} verifies by {method.verification} noise, without it; "
            "leave saguaro_c out, or use saguaro, or verification rejection"
        )
    if method.needs_model and config.draft_model is None:
        raise ConfigError(
            f"method {method.name} needs a draft model and none is given; pass draft (--draft): a smaller model with "
            "the target's vocabulary, or drop:I,J,... for the target without some layers; or use ar or ngram"
        )
    return method


def _without_model(method: Method) -> Method:
    """The method with a suffix draft alone, which takes next to no time, so that nothing is prepared."""
    if method.prepares and not method.trees:
        usable = ", ".join(each.name for each in METHODS.values() if each.trees)
        raise ConfigError(
            f"method {method.name} prepares with a draft model, and the draft is 'suffix', which is none; pass "
            f"suffix+DRAFT, or use a method that does without: {usable}"
        )
    fallback = "suffix" if method.fallback in MODEL_FALLBACKS else method.fallback
    return replace(method, growth="nothing", fallback=fallback, prepare="always")


def tree_shape(config: EngineConfig, method: Method, device: torch.device) -> tuple[int, int]:
    """Nodes verified per row at most, and nodes expanded per draft step; 1 for chains."""
    if not method.trees:
        known = [each.name for each in METHODS.values() if each.trees]
        for name in ("nodes", "width"):
            given = getattr(config, name)
            if given is not None:
                raise ConfigError(
                    f"{name} is {given}, and {method.name} speculates chains; leave {name} out, or use a method that "
                    f"speculates trees: {', '.join(known)}"
                )
        return config.lookahead, 1
    is_asked = config.nodes is not None or config.width is not None
    usual = NODES[device.type] if is_asked or method.verification == "shared" else 1  # rejection: trees if asked for
    nodes = config.nodes or max(config.lookahead, usual)
    usual = nodes // NODES_PER_WIDTH if nodes > config.lookahead else 1
    return nodes, config.width or max(1, usual)


def find_device(name: str, wanted: str) -> torch.device:
    """The device for a setting, with its index; auto: a GPU if there is one."""
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if n_devices else "cpu") if wanted == "auto" else wanted)
    if device.type != "cuda":
        return device
    if (device.index or 0) >= n_devices:
        there = ", ".join(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(n_devices))
        raise ConfigError(
            f"{name} is {wanted!r}; this machine has {n_devices} CUDA devices{': ' * bool(there)}{there}; use "
            f"{'one of them or ' * bool(there)}cpu"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

"""`saguaro bench` over HTTP: our methods, each served by a `saguaro serve` of its own, beside servers given by URL.

Every server gets the same requests (prompts, seeds, all parameters stated) at the same concurrency, by one client.
Groups of requests are interleaved in a rotating order, so that other load on the machine affects all servers alike. Our
methods must give the text of `ar`, except those that verify by rejection at a temperature above 0.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from saguaro.cli import commands
from saguaro.cli.bench import machine, versions, write_report
from saguaro.cli.candidates import WARM_UP, config_for, method_names, settings_by_name
from saguaro.cli.own_server import OwnServer, flags_of
from saguaro.cli.progress import progress_bar
from saguaro.client.asking import chat_body, check_params, completion_body, pick_model, sampling_body
from saguaro.client.client import Client, Stream
from saguaro.config import SamplingParams
from saguaro.engine.assembly import choose_method
from saguaro.errors import ConfigError
from saguaro.measure.candidate import placement
from saguaro.measure.interleaved import seeded
from saguaro.measure.metrics import OutputFile
from saguaro.measure.peer_url import PeerURL, is_peer_url, parse_peer_url
from saguaro.measure.prompts import read_prompts
from saguaro.measure.served import ServedEntry, figures
from saguaro.measure.served_table import served_table
from saguaro.types import Progress

NONE = "none"  # as --methods: only the peers
WARM, WARM_TOKENS = -1, 8  # the number of a request that is not measured, and its length
GROUPS = 4  # requests of a group, in times of the concurrency


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The requests."""

    texts: Sequence[str]
    params: Sequence[SamplingParams]
    chat: bool

    @property
    def _short(self) -> SamplingParams:
        return replace(self.params[0], max_tokens=min(WARM_TOKENS, self.params[0].max_tokens or WARM_TOKENS))

    def send(self, client: Client, model: str, number: int) -> Stream:
        """Send the request of this number, or WARM."""
        text, params = (WARM_UP, self._short) if number == WARM else (self.texts[number], self.params[number])
        sampling = sampling_body(params, states_all=True)
        if self.chat:
            return client.chat(chat_body(model, [{"role": "user", "content": text}], sampling))
        return client.complete(completion_body(model, text, sampling))


def is_served(command: commands.Bench) -> bool:
    """Whether a comparison runs over HTTP."""
    return bool(command.concurrency) or any(is_peer_url(peer) for peer in command.peer)


def bench_served(command: commands.Bench) -> int:
    """Measure, print the tables and write the JSON. Returns 1 if a server failed or a text differs that must not."""
    names, peers = _checked(command)
    texts = read_prompts([path for group in command.prompts for path in group], command.num_prompts)
    levels = _levels(command)
    _check_levels(command, levels, len(texts), has_own=bool(names))
    if command.json:
        OutputFile(command.json, keep=True).close()
    params = command.sampling.params()
    asked = Asked(texts=texts, params=seeded(params, len(texts)), chat=command.chat)
    with ExitStack() as stack, progress_bar() as progress:
        entries = [_peer(peer, asked, params) for peer in peers]
        started = list(_own(command, names, asked, params, stack, progress))
        entries = [entry for _, entry in started] + entries
        for entry in entries:
            entry.read(WARM)  # a failure now ends the comparison
        for level in levels:
            _run_level(entries, len(texts), level, progress)
    rows = [figures(entry, level, entries[0]) for level in levels for entry in entries]
    served = {entry.name: " ".join(server.command) for server, entry in started}
    status = _tell(command, entries, rows, served)
    for server, entry in started:
        if entry.failure is not None:
            print(f"the last words of {entry.name}:\n{server.last_words}")
    return status


def _levels(command: commands.Bench) -> tuple[int, ...]:
    return tuple(dict.fromkeys(command.concurrency)) or (1,)


def _checked(command: commands.Bench) -> tuple[list[str], list[PeerURL]]:
    """The methods and peers. Everything that can be refused is refused before a server is started."""
    check_params(command.sampling.params())
    others = [peer for peer in command.peer if not is_peer_url(peer)]
    if others:
        raise ConfigError(
            f"peer is {others[0]!r}, which is not measured over HTTP; leave it out, or --concurrency and peers by URL"
        )
    if command.batch != 1:
        raise ConfigError(f"batch is {command.batch}; over HTTP requests are batched by the servers: use --concurrency")
    if command.num_prompts < 1:
        raise ConfigError(f"num_prompts is {command.num_prompts}; it must be at least 1")
    if command.sampling.params().max_tokens is None:
        raise ConfigError("max_tokens is None; outputs of limited length are measured")
    peers = [parse_peer_url(peer, os.environ) for peer in command.peer]
    names = [] if command.methods == NONE else method_names(command.methods, config_for(command.which, command.engine))
    if not names and not peers:
        raise ConfigError("methods is none and there is no peer; give --peer openai=http://HOST:PORT/v1")
    labels = [*names, *(peer.name for peer in peers)]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two entries are called {label!r}; give one another name: --peer openai=URL,name=LABEL")
    return names, peers


def _check_levels(command: commands.Bench, levels: Sequence[int], n_prompts: int, *, has_own: bool) -> None:
    for level in levels:
        if level < 1:
            raise ConfigError(f"concurrency is {level}; it must be at least 1")
        if level > n_prompts:
            raise ConfigError(f"concurrency is {level}, and there are {n_prompts} prompts; raise --num-prompts")
        if has_own and level > command.engine.max_batch_rows:
            limit = command.engine.max_batch_rows
            raise ConfigError(f"concurrency is {level}; at most max_batch_rows, {limit}: raise --max-batch-rows")


def _own(
    command: commands.Bench,
    names: Sequence[str],
    asked: Asked,
    params: SamplingParams,
    stack: ExitStack,
    progress: Progress,
) -> Iterator[tuple[OwnServer, ServedEntry]]:
    """Start a server for each of our methods."""
    config = config_for(command.which, command.engine)
    for n_done, name in enumerate(names):
        progress("starting servers", n_done, len(names))
        own = settings_by_name([name])[name]
        method = choose_method(replace(config, **own))
        with placement(name):  # inherited by the process
            server = stack.enter_context(OwnServer(flags_of(command.which, replace(command.engine, **own))))
        is_comparable = params.temperature == 0 or not method.drafts or method.verification == "shared"
        yield server, _entry(name, Client(server.endpoint), None, asked, is_comparable, is_ours=True)
    if names:
        progress("starting servers", len(names), len(names))


def _peer(peer: PeerURL, asked: Asked, params: SamplingParams) -> ServedEntry:
    client = Client(peer.endpoint)
    return _entry(peer.name, client, peer.model, asked, params.temperature == 0, is_ours=False)


def _entry(
    name: str, client: Client, model: str | None, asked: Asked, is_comparable: bool, *, is_ours: bool
) -> ServedEntry:
    model = pick_model(client.models(), model)

    def send(number: int) -> Stream:
        return asked.send(client, model, number)

    return ServedEntry(name, send, client.abort, is_comparable=is_comparable, is_ours=is_ours)


def _run_level(entries: Sequence[ServedEntry], n: int, level: int, progress: Progress) -> None:
    """Run all requests at a concurrency, group by group."""
    for entry in entries:
        entry.warm([WARM] * level, level)
    size = GROUPS * level
    starts, stage = range(0, n, size), f"concurrency {level}"
    for turn, at in enumerate(starts):
        progress(stage, turn, len(starts))
        first = turn % len(entries)
        for entry in [*entries[first:], *entries[:first]]:
            entry.measure(range(at, min(n, at + size)), level)
    progress(stage, len(starts), len(starts))


def _tell(
    command: commands.Bench, entries: Sequence[ServedEntry], rows: Sequence[dict[str, Any]], served: dict[str, str]
) -> int:
    console = Console()
    for level in dict.fromkeys(row["concurrency"] for row in rows):
        console.print(served_table(level, [row for row in rows if row["concurrency"] == level]))
    if command.json:
        write_report(command.json, {"results": rows, **_circumstances(command, served)})
    status = 0
    for note, is_bad in notes(entries, rows):
        status |= is_bad
        print(note)
    return status


def notes(entries: Sequence[ServedEntry], rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """What must be known beside the table, and whether it is an error."""
    reference = entries[0]
    for entry in entries:
        own = [row for row in rows if row["entry"] == entry.name]
        if entry.failure is not None:
            yield f"FAILED: {entry.name}: {entry.failure}", True
        if any(row["tokens_counted_by"] == "events" for row in own if row["requests"]):
            yield f"note: {entry.name} reports no usage; its tokens are events with text, a lower bound", False
        differ = sum(row["compared"] - row["same_text"] for row in own if row["compared"] is not None)
        if entry.is_ours and differ:
            yield f"OUTPUT DIFFERS: {entry.name} is not {reference.name} in {differ} texts{_HINT}", True
        yield from ((note, False) for note in _prompt_notes(own, rows, reference))
    ours = [entry for entry in entries if entry.is_ours and entry.is_comparable and entry.failure is None]
    if ours and all(row["compared"] == row["same_text"] for row in rows if row["entry"] in {one.name for one in ours}):
        yield f"identical text: {', '.join(entry.name for entry in ours)}", False


_HINT = "; below float32 near ties can fall either way: compare with --dtype float32"


def _prompt_notes(
    own: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], reference: ServedEntry
) -> Iterator[str]:
    """A note if a server reads other prompts than the reference does, by the number of their tokens."""
    for row in own[:1]:
        other = next(one for one in rows if (one["entry"], one["concurrency"]) == (reference.name, row["concurrency"]))
        a, b = row["prompt_tokens"], other["prompt_tokens"]
        if None not in (a, b) and row["requests"] == other["requests"] and a != b:
            where = f"{a} tokens at {row['entry']} and {b} at {reference.name}"
            yield f"note: the prompts have {where}: another template or tokenizer"


def _circumstances(command: commands.Bench, served: dict[str, str]) -> dict[str, Any]:
    """Everything the results depend on."""
    asked = {**asdict(command.which), **asdict(command.engine), **asdict(command.sampling)}
    own = {
        "prompts": [str(path) for group in command.prompts for path in group],
        "num_prompts": command.num_prompts,
        "concurrency": list(_levels(command)),
        "chat": command.chat,
        "peer": list(command.peer),
    }
    return {"settings": {**asked, **own}, "served": served, "versions": versions(), "machine": machine()}

"""A target and its draft service on two machines, by the delay between them: tokens per second, hit rate, and whether
the tokens are those of `ar`.

    sudo python -m bench.remote --delays 0 1 10 --methods sd,ssd,swiftspec
    sudo python -m bench.remote --delays 0 --cut 4            the link is down for 4 s while the target decodes

The machines are two network namespaces with a veth pair between them, which needs root. The delay, each way, is made by
tc netem; where the kernel has none, by a relay in the service's namespace that holds every byte for that long. Without
root both ends are on the loopback interface, and the delay is the relay's.
"""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.services import address_of, started_service
from saguaro import LLM, SamplingParams
from saguaro.cli.candidates import encoder
from saguaro.errors import SaguaroError
from saguaro.link.apart import Apart
from saguaro.measure.metrics import Summary
from saguaro.measure.prompts import read_prompts

OURS, THEIRS = "saguaro-target", "saguaro-draft"  # network namespaces
PORT, RELAY_PORT = 7117, 7118
AFTER_S = 20.0  # seconds that the target decodes on after the link is up again


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Measure a draft service by the delay of the link to it."""

    delays: tuple[float, ...] = (0.0, 1.0, 10.0)
    """Milliseconds each way."""
    methods: str = "sd,ssd,swiftspec"
    """Comma-separated."""
    model: str | None = None
    """The target; without one, the default model."""
    draft: str | None = None
    """Its draft; without one, the default model's."""
    num_prompts: int = 4
    """Prompts."""
    max_tokens: int = 96
    """Tokens of each output."""
    temperature: float = 0.0
    """Of sampling."""
    lookahead: int = 4
    """Most tokens speculated."""
    threads: int = 1
    """CPU threads of target and service each."""
    cut: float = 0.0
    """Seconds for which the link is down while the target decodes; 0: it is not cut."""
    json: Path | None = None
    """Write the results to this file."""
    at: str | None = None
    """Of the target's process: the address of the service."""
    key_file: str | None = None
    """Of the target's process: the key."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method at a delay."""

    delay_ms: float
    method: str
    tok_s: float
    tokens_per_round: float
    hit_rate: float | None
    wait_ms: float  # for the draft, a round
    round_ms: float
    n_late: int
    n_lost: int
    is_same: bool  # the tokens are those of ar


def main() -> None:
    """Measure, and print a table."""
    command = tyro.cli(Remote)
    if command.at is not None:
        _target(command, command.at)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "key").write_text(os.urandom(32).hex())
        is_apart = stack.enter_context(_machines())
        at = "10.77.0.2" if is_apart else "127.0.0.1"
        stack.enter_context(_service(command, f"{at}:{PORT}", folder / "key", is_apart))
        print(f"two {'namespaces' if is_apart else 'ends of the loopback interface'}", file=sys.stderr)
        for delay in command.delays:
            with _delayed(delay, at, is_apart) as address:
                rows += _measure(command, delay, address, folder / "key", is_apart)
    _print(rows)
    if command.json is not None:
        command.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    sys.exit(0 if all(row.is_same for row in rows) else 1)


def _print(rows: Sequence[Row]) -> None:
    print(
        f"{'delay':>8} {'method':10} {'tok/s':>7} {'tok/round':>9} {'hits':>5} {'wait ms':>8} {'round ms':>8} late lost"
    )
    for row in rows:
        hits = "-" if row.hit_rate is None else f"{row.hit_rate:.2f}"
        numbers = f"{row.tok_s:7.1f} {row.tokens_per_round:9.2f} {hits:>5} {row.wait_ms:8.1f} {row.round_ms:8.1f}"
        told = "" if row.is_same else "  OTHER TOKENS THAN ar"
        print(f"{row.delay_ms:5g} ms {row.method:10} {numbers} {row.n_late:4} {row.n_lost:4}{told}")


# The machines


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _in(namespace: str, is_apart: bool) -> list[str]:
    return ["ip", "netns", "exec", namespace] if is_apart else []


@contextmanager
def _machines() -> Iterator[bool]:
    """Two namespaces with a link between them. Yields False, and makes none, without root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield False
        return
    for name in (OURS, THEIRS):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        _ip("netns", "add", name)
    try:
        _ip("link", "add", "veth-target", "netns", OURS, "type", "veth", "peer", "name", "veth-draft", "netns", THEIRS)
        for name, device, own in ((OURS, "veth-target", "10.77.0.1"), (THEIRS, "veth-draft", "10.77.0.2")):
            _ip("-n", name, "addr", "add", f"{own}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield True
    finally:
        for name in (OURS, THEIRS):
            _ip("netns", "del", name)


@contextmanager
def _service(command: Remote, at: str, key: Path, is_apart: bool) -> Iterator[None]:
    """`saguaro draft` in its namespace."""
    flags = ["--listen", at, "--key-file", str(key), "--threads", str(command.threads), "--device", "cpu"]
    named = [] if command.draft is None else [command.draft]
    named += [] if command.model is None else ["--target", command.model]
    start = [*_in(THEIRS, is_apart), sys.executable, "-m", "saguaro", "draft", *named, *flags]
    with started_service(start) as service:
        try:
            address_of(service)
        except SaguaroError as e:
            sys.exit(str(e))
        yield


@contextmanager
def _delayed(delay_ms: float, at: str, is_apart: bool) -> Iterator[str]:
    """Yields the address at which the service is so far away."""
    if delay_ms == 0:
        yield f"{at}:{PORT}"
        return
    devices = ((OURS, "veth-target"), (THEIRS, "veth-draft"))
    netem = ["root", "netem", "delay", f"{delay_ms}ms"]
    if is_apart and all(
        _has(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, *netem]) for name, device in devices
    ):
        try:
            yield f"{at}:{PORT}"
        finally:
            for name, device in devices:
                subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", device, "root"], check=True)
        return
    print(f"the kernel has no netem: a relay holds every byte for {delay_ms:g} ms", file=sys.stderr)
    script = f"from bench.remote import relay; relay({at!r}, {RELAY_PORT}, {PORT}, {delay_ms / 1e3})"
    popen = subprocess.Popen([*_in(THEIRS, is_apart), sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert popen.stdout is not None
    popen.stdout.readline()
    try:
        yield f"{at}:{RELAY_PORT}"
    finally:
        popen.kill()
        popen.wait()


def _has(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def relay(host: str, own: int, port: int, delay_s: float) -> None:
    """Pass on what arrives, so much later, for ever."""
    place = socket.create_server((host, own))
    print("ready", flush=True)
    while True:
        ours = place.accept()[0]
        theirs = socket.create_connection((host, port))
        for one, other in ((ours, theirs), (theirs, ours)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=_hold, args=(one, held, delay_s), daemon=True).start()
            threading.Thread(target=_release, args=(other, held), daemon=True).start()


def _hold(sock: socket.socket, held: "queue.SimpleQueue[tuple[float, bytes]]", delay_s: float) -> None:
    while True:
        try:
            data = sock.recv(2**18)
        except OSError:
            data = b""
        held.put((time.monotonic() + delay_s, data))
        if not data:
            return


def _release(sock: socket.socket, held: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    while True:
        due, data = held.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not data:
                sock.shutdown(socket.SHUT_WR)
                return
            sock.sendall(data)
        except OSError:
            return


# The target


def _measure(command: Remote, delay: float, address: str, key: Path, is_apart: bool) -> list[Row]:
    """Run the target's process in its namespace."""
    flags = [
        "--at",
        address,
        "--key-file",
        str(key),
        "--methods",
        command.methods,
        "--lookahead",
        str(command.lookahead),
    ]
    flags += ["--num-prompts", str(command.num_prompts), "--max-tokens", str(command.max_tokens)]
    flags += ["--temperature", str(command.temperature), "--threads", str(command.threads), "--cut", str(command.cut)]
    flags += ["--delays", str(delay), *([] if command.model is None else ["--model", command.model])]
    start = [*_in(OURS, is_apart), sys.executable, "-m", "bench.remote", *flags]
    popen = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    rows = []
    for line in popen.stdout:
        if line.startswith("{"):
            rows.append(Row(**json.loads(line)))
        elif re.match("decoding", line) and command.cut and is_apart:
            _ip("-n", OURS, "link", "set", "veth-target", "down")
            time.sleep(command.cut)
            _ip("-n", OURS, "link", "set", "veth-target", "up")
    if popen.wait() != 0:
        sys.exit("the target's process failed")
    return rows


def _target(command: Remote, at: str) -> None:
    """The target's process: `ar` and every method in turn, prompt by prompt, after two prompts to warm up."""
    params = SamplingParams(temperature=command.temperature, max_tokens=command.max_tokens, seed=0, ignore_eos=True)
    with ExitStack() as stack:
        settings: dict[str, Any] = {"device": "cpu", "threads": command.threads, "learnt_dir": "none"}
        plain = stack.enter_context(LLM(command.model, method="ar", **settings))
        prompts = encoder(read_prompts((), command.num_prompts), True)(plain.engine.tokenizer)
        every = {"ar": Candidate(plain)}
        for method in command.methods.split(","):
            own = {"draft": f"tcp://{at}", "draft_key_file": command.key_file, "lookahead": command.lookahead}
            every[method] = Candidate(stack.enter_context(plain.sibling(method=method, **own)))
        for one in every.values():
            one.run(prompts[:2], params)
            one.begin()
        began = time.perf_counter()
        if command.cut:
            print("decoding", flush=True)
        while True:
            for prompt in prompts:
                for one in every.values():
                    one.run([prompt], params)
            if not command.cut or time.perf_counter() - began > command.cut + AFTER_S:
                break
        for name, one in every.items():
            print(json.dumps(asdict(one.row(command.delays[0], name, every["ar"].tokens))), flush=True)


class Candidate:
    """An engine, and what it has done."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self.tokens, self._seconds = llm, list[list[int]](), 0.0
        self._summary = Summary()

    def begin(self) -> None:
        """Forget what was done to warm up."""
        self.tokens, self._seconds = [], 0.0
        self._llm.engine.round.observers.append(self._summary.add)

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """One after the other."""
        began = time.perf_counter()
        self.tokens += [self._llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        self._seconds += time.perf_counter() - began

    def row(self, delay_ms: float, method: str, expected: Sequence[list[int]]) -> Row:
        """The figures. expected: the tokens of ar."""
        summary, link = self._summary, self._llm.engine.round.draft
        n = max(1, summary.n_rounds)
        return Row(
            delay_ms=delay_ms,
            method=method,
            tok_s=summary.n_tokens / self._seconds,
            tokens_per_round=summary.tokens_per_round or 0.0,
            hit_rate=summary.hit_rate,
            wait_ms=1e3 * summary.wait_s / n,
            round_ms=1e3 * (summary.wait_s + summary.verify_s + summary.overlap_s + summary.rest_s) / n,
            n_late=link.n_late if isinstance(link, Apart) else 0,
            n_lost=link.n_deaths if isinstance(link, Apart) else 0,
            is_same=self.tokens == expected,
        )


if __name__ == "__main__":
    main()

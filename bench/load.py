"""Soak test of the server: many clients, disconnects, invalid requests, and a draft that is killed repeatedly.

python -m bench.load --seconds 600                         # SmolLM2-135M-Instruct
python -m bench.load --seconds 60 --model tiny             # a tiny random model: thousands of requests
python -m bench.load --seconds 3600 --attacks bodies grammars headers   # with attacks of bench.attack

One request in six has a constraint (schema, regular expression, choice, grammar), and its text is checked. The server
runs in this process, so that its state can be inspected; clients, attackers and the /health monitor run in separate
processes. The test fails if a request ends without a last event, an output violates its constraint, a page leaks,
memory grows, or /health takes longer than a second.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tyro

from bench.attack import Args as AttackArgs
from bench.attack import finish, start_attack
from saguaro import LLM
from saguaro.link.apart import Apart
from saguaro.model.tiny import write_tiny
from saguaro.serve.address import bind
from saguaro.serve.http.app import create_app
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.service import Service
from saguaro.serve.server import Server, uvicorn_config

FORMS: list[tuple[dict[str, Any], str]] = [  # constraint, and a pattern that the whole text must match
    ({"regex": "(yes|no), [a-z]{3,8}\\."}, r"(yes|no), [a-z]{3,8}\."),
    ({"choice": ["saguaro", "cholla", "ocotillo"]}, r"saguaro|cholla|ocotillo"),
    ({"json": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}}, r"\{.*"),
    ({"grammar": 'start: "<" ("a" | "b")+ ">"'}, r"<[ab]+>"),
]
GROWTH = 1.05  # most memory in the last quarter, relative to the first half
WORDS = ("saguaro", "cactus", "desert", "water", "night", "the", "of", "and", "bloom", "owl", "ribs", "spine", "rain")
NONSENSE: list[Any] = [
    {},
    [],
    {"prompt": []},
    {"prompt": "the", "max_tokens": -1},
    {"prompt": "the", "temperature": "hot"},
    {"prompt": [10**9]},
    {"prompt": "the", "tools": [1]},
    {"prompt": "the", "model": "none"},
    {"prompt": "word " * 100_000},
]


@dataclass(frozen=True)
class Args:
    """What to do."""

    seconds: float = 60.0
    clients: int = 64
    model: str | None = None
    """A model, or tiny."""
    draft: str | None = None
    method: str = "ssd"
    prepare: str = "always"
    rows: int = 16
    kv_memory: str = "96MiB"
    """So little that all of it is soon in use, for memory counts when it is first written."""
    kill_every: float = 20.0
    """Seconds between two deaths of the draft."""
    max_tokens: int = 48
    seed: int = 0
    attacks: tuple[str, ...] = ()
    """Attacks of bench.attack to go on meanwhile."""
    role: str = "server"
    """server; or, for a process that this one starts, clients or health."""
    url: str = ""


def main(args: Args) -> int:
    """Run this process's role."""
    if args.role == "clients":
        print(json.dumps(asyncio.run(crowd(args))))
        return 0
    if args.role == "health":
        print(json.dumps(watch_health(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return serve(args, Path(folder))


# The clients.


async def crowd(args: Args) -> dict[str, int]:
    """Run clients until the time is over; count the results."""
    ended: Counter[str] = Counter()
    until = time.monotonic() + args.seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits) as http:
        chances = [random.Random(args.seed * 1000 + number) for number in range(args.clients)]
        await asyncio.gather(*(_client(http, chance, until, ended, args) for chance in chances))
    return dict(ended)


async def _client(
    http: httpx.AsyncClient, chance: random.Random, until: float, ended: Counter[str], args: Args
) -> None:
    while time.monotonic() < until:
        try:
            if chance.random() < 0.1:
                answer = await http.post("/v1/completions", json=chance.choice(NONSENSE))
                ended["nonsense refused" if 400 <= answer.status_code < 500 else f"nonsense {answer.status_code}"] += 1
            else:
                ended[await _stream(http, chance, args)] += 1
        except Exception as e:
            ended[f"FAILED {type(e).__name__}: {e}"[:200]] += 1


async def _stream(http: httpx.AsyncClient, chance: random.Random, args: Args) -> str:
    """One request; return its result."""
    body = {
        "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 30))),
        "max_tokens": chance.randint(1, args.max_tokens),
        "n": chance.choice([1, 1, 1, 2]),
        "temperature": chance.choice([0, 0.7, 1]),
        "speculation": chance.random() < 0.8,
        "prepare": chance.random() < 0.8,
        "return_speculation": chance.random() < 0.2,
        "ignore_eos": True,
        "stream": True,
    }
    form, pattern = chance.choice(FORMS) if chance.random() < 1 / 6 else (None, "")
    if form is not None:
        body |= {"structured_outputs": form, "ignore_eos": False, "max_tokens": 64}
    leaves_after = chance.randint(0, 20) if chance.random() < 1 / 3 else None
    n_ends = n_events = 0
    last = ""
    texts: dict[int, str] = {}  # output index -> text
    stopped: set[int] = set()  # outputs that ended with "stop", so their constraint is complete
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            await answer.aread()
            await asyncio.sleep(float(answer.headers["retry-after"]) * chance.random())
            return "told to come again (429)"
        if answer.status_code != 200:
            return f"FAILED status {answer.status_code}: {(await answer.aread())[:150]!r}"
        async for line in answer.aiter_lines():
            if not line:
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                event = json.loads(last)
                if "error" in event:
                    return f"FAILED {event['error']['message']}"
                for choice in event["choices"]:
                    n_ends += choice["finish_reason"] is not None
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    if choice["finish_reason"] == "stop":
                        stopped.add(choice["index"])
            n_events += 1
            if leaves_after is not None and n_events > leaves_after:
                return "left"
    if last != "[DONE]" or n_ends != body["n"]:
        return f"FAILED {n_ends} ends, then {last[:50]!r}"
    return _verdict(form, pattern, [texts[at] for at in stopped])


def _verdict(form: dict[str, Any] | None, pattern: str, texts: Sequence[str]) -> str:
    """Whether complete texts satisfy their constraint."""
    if form is None:
        return "finished"
    broken = [text for text in texts if not re.fullmatch(pattern, text, re.DOTALL)]
    return f"FAILED {broken[0]!r} is not {form}" if broken else "finished, in its form"


def watch_health(args: Args) -> list[float]:
    """Poll /health; return the seconds of each response."""
    taken, until = [], time.monotonic() + args.seconds
    with httpx.Client(base_url=args.url, timeout=60) as http:
        while time.monotonic() < until:
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            taken.append(time.monotonic() - began)
            time.sleep(0.2)
    return taken


# The server.


def serve(args: Args, folder: Path) -> int:
    """Serve the clients; 1 if a check failed."""
    model = write_tiny(folder, "llama", num_hidden_layers=4) if args.model == "tiny" else args.model
    draft = "drop:2" if args.model == "tiny" else args.draft
    settings: dict[str, Any] = {"method": args.method, "prepare": args.prepare, "max_batch_rows": args.rows}
    llm = LLM(
        model,
        draft=draft,
        kv_memory="1MiB" if args.model == "tiny" else args.kv_memory,
        link="process",
        device="cpu",
        threads=1,
        **settings,
    )
    service = Service(llm.engine, ["model"], ServerLimits(max_waiting=args.clients))
    place = bind("127.0.0.1", 0)
    server = Server(uvicorn_config(create_app(service), service, log_level="error"), service)
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    parts = {role: _start(args, role, url) for role in ("clients", "health")}
    attackers = start_attack(AttackArgs(seconds=args.seconds, only=args.attacks), url) if args.attacks else None
    memory = _watch(args, llm, service, parts["clients"])
    ended: dict[str, int] = json.loads(parts["clients"].communicate()[0])
    health: list[float] = json.loads(parts["health"].communicate()[0])
    for how, n in sorted(finish(attackers).items() if attackers else ()):
        print(f"{n:8}  {how}")
    server.handle_exit(signal.SIGTERM, None)
    thread.join()
    return report(llm, service, ended, health, memory)


def _start(args: Args, role: str, url: str) -> "subprocess.Popen[str]":
    given = {"seconds": args.seconds, "clients": args.clients, "max-tokens": args.max_tokens, "seed": args.seed}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bench.load", "--role", role, "--url", url, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _watch(args: Args, llm: LLM, service: Service, clients: "subprocess.Popen[str]") -> list[int]:
    """Kill the draft periodically and print the state until the clients are done; return resident bytes over time."""
    link, pool, began = llm.engine.round.draft, llm.engine.pool, time.monotonic()
    assert isinstance(link, Apart)
    memory: list[int] = []
    next_kill, next_line = began + args.kill_every, began
    while clients.poll() is None:
        now = time.monotonic()
        if now >= next_kill:
            next_kill = now + args.kill_every
            if link.pid is not None:
                os.kill(link.pid, signal.SIGKILL)
        memory.append(_resident())
        if now >= next_line:
            next_line = now + max(5.0, args.seconds / 20)
            held = f"{pool.n_pages - pool.n_free} of {pool.n_pages} pages held"
            rows = f"{service.front.n_rows} outputs in the making"
            drafts = f"draft started {link.n_starts} times"
            print(f"{now - began:6.1f} s  {memory[-1] / 2**20:.1f} MiB, {rows}, {held}, {drafts}", flush=True)
        time.sleep(0.25)
    return memory


def report(llm: LLM, service: Service, ended: dict[str, int], health: list[float], memory: list[int]) -> int:
    """Print the results; 1 if a check failed."""
    pool, link = llm.engine.pool, llm.engine.round.draft
    assert isinstance(link, Apart)
    for how, n in sorted(ended.items(), key=lambda item: -item[1]):
        print(f"{n:8}  {how}")
    quarter = len(memory) // 4
    before, after = max(memory[: 2 * quarter]), max(memory[-quarter:])
    problems = [
        how for how in ended if how.startswith("FAILED") or (how.startswith("nonsense") and "refused" not in how)
    ]
    slowest = ", ".join(f"{seconds * 1e3:.0f}" for seconds in sorted(health)[-5:])
    if max(health) > 1:
        problems.append("/health took longer than a second")
    if after > GROWTH * before:
        problems.append(f"memory grew from {before / 2**20:.1f} MiB to {after / 2**20:.1f} MiB")
    pool.check(llm.engine.scheduler.tables())
    if pool.n_free != pool.n_pages or service.front.n_rows or llm.engine.has_work:
        problems.append(f"{pool.n_pages - pool.n_free} pages are held, {service.front.n_rows} outputs left")
    grew = f"{before / 2**20:.1f} MiB in the first half, {after / 2**20:.1f} MiB in the last quarter"
    print(f"memory at most {grew}")
    print(f"/health: {len(health)} answers, the slowest after {slowest} ms; the draft died {link.n_deaths} times")
    print(f"pages: all {pool.n_pages} given back" if pool.n_free == pool.n_pages else "pages are missing")
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "everything held")
    return 1 if problems else 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

"""Robustness of a server: all known attacks at once, while ordinary clients stream, on a real server process.

python -m bench.attack --seconds 300                       # the default model and settings
python -m bench.attack --seconds 60 --only bodies grammars # some attacks
python -m bench.attack --seconds 60 --only none            # baseline without attacks
python -m bench.attack --cores 2                           # server on two cores, clients on the others

One ordinary client streams short chats in sequence; another requests one token of /v1/completions, and a third
/health, every 100 ms. The benchmark fails if a stream pauses longer than --max-gap, /health takes longer than
--max-health, the server's processes grow by more than --max-growth, descriptors or processes leak, an ordinary request
ends with an error, or the server does not exit in time after SIGTERM under attack.

The server's chat template loops for messages that contain a certain word, and is an ordinary one for the others.
"""

import asyncio
import contextlib
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Literal

import httpx
import tyro

DRAIN_SECONDS = 3.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 2**20


@dataclass(frozen=True)
class Args:
    """What to do."""

    seconds: float = 60.0
    only: tuple[str, ...] = ()
    """Kinds of attack; without any, all of them; none: no attack."""
    max_gap: float = 1.0
    """Seconds that an ordinary stream may pause."""
    max_health: float = 0.25
    """Seconds that /health may take."""
    max_growth: float = 300.0
    """MiB that the server's processes may grow by."""
    model: str | None = None
    cores: int | None = None
    """Cores of the server; its clients get the others. None: all share all."""
    role: Literal["all", "attack"] = "all"
    """all; or, for a process that this one starts, attack."""
    url: str = ""


# The attacks. Each is repeated by its own clients.


def filled(size: int, before: str, item: str, after: str) -> bytes:
    """A body of about this size that repeats an item."""
    return (before + ",".join([item] * (size // (len(item) + 1))) + after).encode()


BODIES: list[tuple[str, bytes]] = [
    (TEXT, filled(4 * MIB - 99, '{"prompt":[', "{}", "]}")),
    (TEXT, filled(4 * MIB - 99, '{"prompt":[', "[[]]", "]}")),
    (CHAT, filled(4 * MIB - 99, '{"messages":[', "0", "]}")),
    (CHAT, filled(4 * MIB - 99, '{"messages":[{"role":"user","content":[', "0", "]}]}")),
    (TEXT, filled(4 * MIB - 99, '{"prompt":"a","stop":[', "0", "]}")),
    (TEXT, filled(4 * MIB - 99, '{"prompt":"a","stop_token_ids":[', '"a"', "]}")),
    ("/detokenize", filled(4 * MIB - 99, '{"tokens":[', "{}", "]}")),
    ("/detokenize", filled(4 * MIB - 99, '{"tokens":[', "7", "]}")),
    ("/tokenize", b'{"prompt":"' + b"a b " * 900_000 + b'"}'),
    (TEXT, b'{"prompt":"a","logit_bias":{' + b",".join(b'"x%d":1' % i for i in range(380_000)) + b"}}"),
    (TEXT, b'{"prompt":"a","nested":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}"),
    (TEXT, b'{"prompt":"a",' + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}"),
]
# Anchored: patterns that are not are refused early. The error is found only after all others are compiled.
_PATTERN = {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"}
_MANY = {f"p{i}": _PATTERN for i in range(190)} | {"bad": {"type": "strin"}}
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": _MANY}},
    {"regex": "(((a{100}){100}){100}){100}"},
    {"regex": "((((([a-z]?){20}){20}){20}){20}){20}"},
    {"regex": "(.*a){30}"},
    {"grammar": 'start: start start start start | "a" |'},
    {"grammar": "start: " + " ".join(["X"] * 400) + "\nX: /[a-z]*[a-z]*[a-z]*/"},
]
WORD = "xyzzy"
_LOOP = "{% for i in range(99999) %}"
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    f"{{% if '{WORD}' in m.content %}}{_LOOP * 3}{'{% endfor %}' * 3}{{% endif %}}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


async def bodies(http: httpx.AsyncClient, _: random.Random) -> str:
    """A large invalid body."""
    path, body = random.choice(BODIES)
    answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    return f"{answer.status_code}, {'short' if len(answer.content) < 2000 else 'LONG'} answer"


async def grammars(http: httpx.AsyncClient, chance: random.Random) -> str:
    """A grammar that is slow to compile, or whose masks are slow."""
    length = {"max_tokens": 400, "min_tokens": 400, "ignore_eos": True}  # ambiguity costs more with every token
    body = {"prompt": "a", "structured_outputs": chance.choice(GRAMMARS), "seed": 1, **length}
    return str((await http.post(TEXT, json=body)).status_code)


async def templates(http: httpx.AsyncClient, chance: random.Random) -> str:
    """A conversation for which the chat template loops."""
    body = {"messages": [{"role": "user", "content": f"{WORD} {chance.random()}"}], "max_tokens": 4}
    return str((await http.post(CHAT, json=body)).status_code)


async def prompts(http: httpx.AsyncClient, chance: random.Random) -> str:
    """A prompt that fills the context."""
    tokens = [chance.randrange(1000, 30_000) for _ in range(8000)]
    return str((await http.post(TEXT, json={"prompt": tokens, "max_tokens": 4})).status_code)


async def headers(http: httpx.AsyncClient, _: random.Random) -> str:
    """An incomplete request on 20 connections, each held until the server closes it."""
    held = await asyncio.gather(*(_half(http, b"GET /health HTTP/1.1\r\nHost: ") for _ in range(20)))
    return f"{sum(held)} of 20 cut"


async def slow_bodies(http: httpx.AsyncClient, _: random.Random) -> str:
    """A body that is sent byte by byte."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"
    )
    held = await asyncio.gather(*(_half(http, head + b"\r\n{", b" ") for _ in range(10)))
    return f"{sum(held)} of 10 cut"


async def _half(http: httpx.AsyncClient, sent: bytes, more: bytes = b"") -> bool:
    """Whether the server closes a connection with an endless request within two minutes."""
    try:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    except OSError:
        return True
    try:
        writer.write(sent)
        for _ in range(120):
            with contextlib.suppress(TimeoutError):
                if not await asyncio.wait_for(reader.read(4096), 1.0):
                    return True
            writer.write(more)
        return False
    except OSError:
        return True
    finally:
        writer.close()


async def readers(http: httpx.AsyncClient, _: random.Random) -> str:
    """A stream that is requested and not read."""
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2, "return_speculation": True}
    async with http.stream("POST", TEXT, json=body) as answer:
        await asyncio.sleep(5)
        return str(answer.status_code)


async def leavers(http: httpx.AsyncClient, chance: random.Random) -> str:
    """A client that disconnects early."""
    body = {"prompt": "a b c", "max_tokens": 200, "ignore_eos": True}
    with contextlib.suppress(httpx.TimeoutException):
        await http.post(TEXT, json=body, timeout=chance.random() / 2)
    return "left"


Attack = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]
ATTACKS: dict[str, tuple[Attack, int]] = {  # with the number of clients
    "bodies": (bodies, 3),
    "grammars": (grammars, 4),
    "templates": (templates, 12),
    "prompts": (prompts, 6),
    "headers": (headers, 7),
    "slow_bodies": (slow_bodies, 2),
    "readers": (readers, 3),
    "leavers": (leavers, 2),
}


async def attack(args: Args) -> dict[str, int]:
    """Run all attacks until the time is over; count the results."""
    ended: Counter[str] = Counter()
    until = time.monotonic() + args.seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=args.url, timeout=120, limits=limits) as http:

        async def again(name: str, try_it: Attack, chance: random.Random) -> None:
            while time.monotonic() < until:
                try:
                    how = await try_it(http, chance)
                except httpx.HTTPError as e:
                    how = type(e).__name__
                    await asyncio.sleep(0.2)
                ended[f"{name}: {how}"] += 1

        chosen = {name: pair for name, pair in ATTACKS.items() if not args.only or name in args.only}
        clients = [(name, try_it, at) for name, (try_it, n) in chosen.items() for at in range(n)]
        tasks = [again(name, try_it, random.Random(f"{name}{at}")) for name, try_it, at in clients]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks), args.seconds + 5)
    return dict(ended)


# The ordinary clients, and the measurements.


@dataclass
class Seen:
    """Measurements of ordinary clients, in seconds; sizes in bytes."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    chats: Counter[str] = field(default_factory=Counter)


def stream(url: str, seen: Seen, is_over: threading.Event) -> None:
    """Stream chats in sequence."""
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "temperature": 0}
    with httpx.Client(base_url=url, timeout=120) as http:
        while not is_over.is_set():
            try:
                seen.chats[_chat(http, {**body, "stream": True}, seen)] += 1
            except httpx.HTTPError as e:
                if not is_over.is_set():
                    seen.chats[f"FAILED {type(e).__name__}"] += 1


def _chat(http: httpx.Client, body: dict[str, Any], seen: Seen) -> str:
    """One chat; its text, or the failure."""
    text, last = "", time.monotonic()
    with http.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            return f"FAILED {answer.status_code} {answer.read().decode()[:200]}"
        for line in answer.iter_lines():
            now, data = time.monotonic(), line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                return f"FAILED {event['error']['message'][:200]}"
            delta = event["choices"][0]["delta"].get("content") or ""
            if delta:
                (seen.gaps if text else seen.first).append(now - last)
                last = now
            text += delta
    return text


def complete(url: str, seen: Seen, is_over: threading.Event) -> None:
    """Request one token, which needs no chat template."""
    with httpx.Client(base_url=url, timeout=120) as http:
        while not is_over.wait(0.1):
            began = time.monotonic()
            try:
                is_well = http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
            except httpx.HTTPError:
                is_well = False
            seen.completions.append(time.monotonic() - began if is_well else float("inf"))


def ask_health(url: str, seen: Seen, is_over: threading.Event) -> None:
    """Request /health ten times per second, on a new connection each time."""
    while not is_over.wait(0.1):
        began = time.monotonic()
        line = HTTPConnection(url.removeprefix("http://"), timeout=60)
        try:
            line.request("GET", "/health")
            is_well = line.getresponse().status == 200
        except OSError:
            is_well = False
        finally:
            line.close()
        seen.health.append(time.monotonic() - began if is_well else float("inf"))


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(each for child in children for each in family(child))]


def size(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    total = 0
    for each in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def descriptors(pid: int) -> int:
    """Files and sockets that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main(args: Args) -> int:
    """Attack a server; 1 if a limit was exceeded."""
    if args.role == "attack":
        print(json.dumps(asyncio.run(attack(args))))
        return 0
    unknown = set(args.only) - set(ATTACKS) - {"none"}
    if unknown:
        raise SystemExit(f"no such attack: {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            (template := Path(folder) / "template.jinja").write_text(TEMPLATE)
            flags = [*([args.model] if args.model else []), "--port", "0", "--drain-seconds", str(DRAIN_SECONDS)]
            flags += ["--chat-template", str(template)]
            command = [*on_cores(args.cores), sys.executable, "-m", "saguaro", "serve", *flags]
            server = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            return measure(args, server, log)
        finally:
            server.kill()
            server.wait()


def on_cores(n: int | None) -> list[str]:
    """A command prefix that pins the server to the first n cores; this process and its other children use the rest."""
    if n is None:
        return []
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < n < len(cores):
        raise SystemExit(f"cores is {n}; this machine has {len(cores)}, and clients need one: give fewer")
    os.sched_setaffinity(0, cores[n:])
    return ["taskset", "-c", ",".join(map(str, cores[:n]))]


def measure(args: Args, server: "subprocess.Popen[bytes]", log: Path) -> int:
    """Run ordinary clients and attackers until the time is over, then send SIGTERM."""
    while "saguaro: serving" not in log.read_text():
        if server.poll() is not None:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)
    found = re.search(r" on (http://[\d.:]+)", log.read_text())
    assert found is not None
    url, seen, is_over = found[1], Seen(), threading.Event()
    with httpx.Client(base_url=url, timeout=600) as http:
        fill_memory(http)
        alone = _chat(http, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}, Seen())
        assert not alone.startswith("FAILED"), alone
    before, open_before, processes = size(server.pid), descriptors(server.pid), len(family(server.pid))
    clients = [threading.Thread(target=each, args=(url, seen, is_over)) for each in (stream, complete, ask_health)]
    for client in clients:
        client.start()
    attackers = start_attack(args, url)
    until = time.monotonic() + args.seconds
    while time.monotonic() < until and server.poll() is None:
        seen.sizes.append(size(server.pid))
        time.sleep(0.25)
    ended = finish(attackers)
    is_over.set()
    for client in clients:
        client.join()
    left = settle(server.pid, open_before, processes)
    second = start_attack(Args(seconds=20, only=args.only), url)
    time.sleep(3)
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    try:
        status: int | None = server.wait(60)
    except subprocess.TimeoutExpired:
        status = None
    took = time.monotonic() - began
    finish(second, kill=True)
    return report(args, seen, ended, before, left, (status, took), log)


def fill_memory(http: httpx.Client) -> None:
    """Touch all KV memory: it is allocated at the start, and becomes resident when first written."""
    (card,) = http.get("/v1/models").json()["data"]
    longest = card["max_model_len"]
    for at in range(2):  # the default KV memory holds two contexts
        prompt = [(at * longest + i) % 30_000 for i in range(longest - 8)]
        assert http.post(TEXT, json={"prompt": prompt, "max_tokens": 1}).status_code == 200


def start_attack(args: Args, url: str) -> "subprocess.Popen[str]":
    """Start the attackers in a separate process."""
    words = ["--role", "attack", "--url", url, "--seconds", str(args.seconds)]
    if args.only:
        words += ["--only", *args.only]
    return subprocess.Popen([sys.executable, "-m", "bench.attack", *words], stdout=subprocess.PIPE, text=True)


def finish(attackers: "subprocess.Popen[str]", kill: bool = False) -> dict[str, int]:
    """Wait for the attackers, or kill them; the counts of results."""
    if kill:
        attackers.kill()
    out = attackers.communicate()[0]
    return {} if kill else dict(json.loads(out))


def settle(pid: int, n_descriptors: int, n_processes: int) -> str:
    """Leaked descriptors and processes, at most 30 s after the last client left; empty if there are none."""
    until = time.monotonic() + 30
    while True:
        found = descriptors(pid) - n_descriptors, len(family(pid)) - n_processes
        # The worker started for the first grammar stays, with its pipes.
        if (found[0] <= 16 and found[1] <= 4) or time.monotonic() > until:
            return "" if found[0] <= 16 and found[1] <= 4 else f"{found[0]} descriptors and {found[1]} processes more"
        time.sleep(0.5)


def report(
    args: Args,
    seen: Seen,
    ended: dict[str, int],
    before: int,
    left: str,
    end: tuple[int | None, float],
    log: Path,
) -> int:
    """Print the results; 1 if a limit was exceeded."""
    for how, n in sorted(ended.items()):
        print(f"{n:8}  {how}")
    failed = {how: n for how, n in seen.chats.items() if how.startswith("FAILED")}
    texts = {how for how in seen.chats if not how.startswith("FAILED")}
    grown = (max(seen.sizes) - before) / MIB
    held = [
        ("largest gap of a stream, s", max(seen.gaps, default=float("inf")), args.max_gap),
        ("slowest /health, s", max(seen.health, default=float("inf")), args.max_health),
        ("growth of memory, MiB", grown, args.max_growth),
        ("SIGTERM to exit, s", end[1], DRAIN_SECONDS + 7),
        ("ordinary chats that failed", sum(failed.values()), 0),
        ("ordinary completions that failed", seen.completions.count(float("inf")), 0),
        ("texts of the same chat", len(texts), 1),
        ("log, MiB", log.stat().st_size / MIB, 5),
    ]
    first, gaps, completed = sorted(seen.first), sorted(seen.gaps), sorted(seen.completions)
    print(f"{sum(seen.chats.values())} ordinary chats, {len(seen.health)} times /health")
    print(f"first piece after {first[len(first) // 2]:.2f} s (median), {first[-1]:.2f} s at most")
    print(f"completions {completed[len(completed) // 2]:.2f} s (median), {completed[-1]:.2f} s at most")
    print(f"gaps {gaps[len(gaps) // 2] * 1e3:.0f} ms (median), {gaps[-1 - len(gaps) // 100] * 1e3:.0f} ms (99 %)")
    problems = [f"{how} x {n}" for how, n in failed.items()]
    for name, value, limit in held:
        print(f"{name:32} {value:8.3f}  at most {limit:g}")
        if not value <= limit:
            problems.append(f"{name}: {value:.3f}, at most {limit:g}")
    if left:
        problems.append(f"left after the attack: {left}")
    if end[0] != 0:
        problems.append(f"the server's exit status is {end[0]}")
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "everything held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

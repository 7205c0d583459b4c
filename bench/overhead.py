"""Overhead of HTTP: one stream through `saguaro serve` against LLM.generate with the same settings, in the same run.

python -m bench.overhead                                   # ar
python -m bench.overhead --method ssd

The server is a separate process, as in production, and the client reads every event. The variants run in turn, and the
first turn is warm-up. The exit status is 1 if the server is slower than --least times LLM.generate.
"""

import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tyro

from saguaro import LLM, SamplingParams

PROMPT = "Explain in a few sentences how a saguaro cactus survives in the desert."


@dataclass(frozen=True)
class Args:
    """What to measure."""

    model: str | None = None
    draft: str | None = None
    method: str = "auto"
    lookahead: int = 4
    budget: int = 8
    prepare: str = "auto"
    threads: int = 1
    max_tokens: int = 128
    repeats: int = 5
    least: float = 0.95


def main(args: Args) -> int:
    """Print tok/s of each variant; 1 if the server is too slow."""
    settings: dict[str, Any] = {"method": args.method, "lookahead": args.lookahead, "budget": args.budget}
    settings |= {"prepare": args.prepare, "threads": args.threads}
    settings |= {"draft": args.draft} if args.draft else {}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with LLM(args.model, **settings) as llm, serving([args.model] if args.model else [], flags) as port:
        tokens = llm.engine.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.max_tokens)
        body = {"prompt": tokens, "temperature": 0, "ignore_eos": True, "max_tokens": args.max_tokens}
        texts: dict[str, set[str]] = {}
        ways: dict[str, Callable[[], str]] = {
            "LLM.generate": lambda: llm.generate([tokens], params)[0].text,
            "server, whole": lambda: whole(port, body),
            "server, streamed": lambda: streamed(port, body),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(args.repeats + 1):
            for name, ask in ways.items():
                began = time.perf_counter()
                texts.setdefault(name, set()).add(ask())
                if repeat:
                    seconds[name].append(time.perf_counter() - began)
    assert len(set.union(*texts.values())) == 1, f"the texts differ: {texts}"
    base, ratios = seconds["LLM.generate"], dict[str, float]()
    for name, each in seconds.items():
        ratios[name] = statistics.median(b / mine for b, mine in zip(base, each, strict=True))
        speed = args.max_tokens / statistics.median(each)
        print(f"{name:20} {speed:8.1f} tok/s   {ratios[name]:.3f} of LLM.generate (median of {args.repeats} pairs)")
    return 0 if min(ratios.values()) >= args.least else 1


@contextmanager
def serving(model: list[str], flags: list[str]) -> Iterator[int]:
    """Context that runs `saguaro serve` and yields its port."""
    command = [sys.executable, "-m", "saguaro", "serve", *model, "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"saguaro: serving .*:(\d+)$", line)
            if found:
                yield int(found[1])
                break
            print(line, end="", file=sys.stderr)
    finally:
        process.terminate()
        process.wait()


def whole(port: int, body: dict[str, Any]) -> str:
    """The text of a non-streamed response."""
    return str(json.loads(_post(port, body).read())["choices"][0]["text"])


def streamed(port: int, body: dict[str, Any]) -> str:
    """The text of a streamed response."""
    pieces = []
    for line in _post(port, {**body, "stream": True}):
        if line.startswith(b"data: {"):
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(pieces)


def _post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = line.getresponse()
    assert answer.status == 200, answer.read()
    return answer


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

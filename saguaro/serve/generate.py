"""`saguaro generate`: prompts from the command line or a file, outputs as text or JSON lines."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro.config import SamplingParams
from saguaro.errors import ConfigError, SaguaroError
from saguaro.serve import cli
from saguaro.serve.llm import LLM
from saguaro.serve.meter import Meter
from saguaro.serve.results import Completion


@dataclass(frozen=True)
class Asked:
    """A prompt and the name its answer goes under."""

    id: Any
    prompt: str


def generate(command: cli.Generate) -> int:
    """Carry out the command; 1 if some prompt could not be served."""
    asked, params = read_prompts(command), command.sampling.params()
    imported = time.perf_counter()
    llm = cli.load(command.which, command.engine)
    loaded = time.perf_counter()
    n_failed, speed = 0, ""
    if len(asked) == 1 and not command.json and params.n == 1:
        speed = str(_stream(llm, asked[0], params, command))
    else:
        n_failed, speed = _batch(llm, asked, params, command)
    if command.metrics:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in llm.engine.startup.items())
        start = f"imports {imported - cli.STARTED:.2f} s, load {loaded - imported:.2f} s ({parts})"
        print(f"{start}; method {llm.engine.method.name}: {speed}", file=sys.stderr)
    return 1 if n_failed else 0


def read_prompts(command: cli.Generate) -> list[Asked]:
    """The prompts of a command, from --prompt or --prompts."""
    if (command.prompt is None) == (command.prompts is None):
        raise ConfigError("give either --prompt TEXT or --prompts FILE; see `saguaro generate --help`")
    if command.prompt is not None:
        return [Asked("0", command.prompt)]
    assert command.prompts is not None
    return read_prompt_file(command.prompts)


def read_prompt_file(path: Path) -> list[Asked]:
    """The prompts of a file: JSON lines with `prompt` and perhaps `id`, or one plain text per line."""
    try:
        lines = [(n, line) for n, line in enumerate(path.read_text(encoding="utf-8").split("\n")) if line.strip()]
    except OSError as e:
        raise ConfigError(f"cannot read prompts from {path}: {e.strerror}; give a JSONL or text file") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text ({e}); give a JSONL or text file") from e
    if not lines:
        raise ConfigError(f"{path} holds no prompts; write one per line")
    if path.suffix in (".jsonl", ".json"):
        return [_parse_line(path, number, line) for number, line in lines]
    return [Asked(str(number), line) for number, line in lines]


def _parse_line(path: Path, number: int, line: str) -> Asked:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise ConfigError(f'{path} line {number + 1} is not JSON ({e.msg}); write {{"prompt": ...}}') from e
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigError(f'{path} line {number + 1} has no text under "prompt"; write {{"id": ..., "prompt": ...}}')
    return Asked(entry.get("id", str(number)), entry["prompt"])


def _tokens(llm: LLM, text: str, command: cli.Generate) -> list[int]:
    tokenizer = llm.engine.tokenizer
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if command.chat else tokenizer.encode(text)


def _stream(llm: LLM, asked: Asked, params: SamplingParams, command: cli.Generate) -> Meter:
    """Print one output as it grows; its speed."""
    meter = Meter()
    for delta in llm.stream(_tokens(llm, asked.prompt, command), params):
        meter.add(delta)
        print(delta.text, end="", flush=True)
    print()
    return meter


def _batch(llm: LLM, asked: list[Asked], params: SamplingParams, command: cli.Generate) -> tuple[int, str]:
    """Run all prompts together and print results in order; how many failed, and the speed of all together."""
    lines: dict[int, list[dict[str, Any]]] = {}
    served: list[int] = []
    tokens: list[list[int]] = []
    for index, one in enumerate(asked):
        try:
            found = _tokens(llm, one.prompt, command)
            llm.engine.check(found, params)
            served.append(index)
            tokens.append(found)
        except SaguaroError as e:
            lines[index] = [{"id": one.id, "error": str(e)}]
    n_failed, n_tokens, n_rounds, began = len(lines), 0, 0, time.perf_counter()
    printed = _print_ready(lines, 0, command.json)
    for place, result in llm.as_finished(tokens, [params] * len(tokens)):
        index = served[place]
        lines[index] = [_line(asked[index].id, output, params.n) for output in result.outputs]
        n_tokens += sum(len(output.token_ids) for output in result.outputs)
        n_rounds += sum(output.n_rounds for output in result.outputs)
        printed = _print_ready(lines, printed, command.json)
    speed = n_tokens / (time.perf_counter() - began)
    return n_failed, f"{n_tokens} tokens, {n_tokens / max(n_rounds, 1):.2f} per round, {speed:.1f} tok/s together"


def _line(name: Any, output: Completion, n: int) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": name,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "n_tokens": len(output.token_ids),
        "ttft_ms": round(output.timings.ttft_ms, 2),
        "decode_tok_s": round(output.timings.decode_tok_s, 2),
    }
    if n > 1:
        line["index"] = output.index
    if output.logprobs is not None:
        line["logprobs"] = [
            {"token": token.token, "logprob": token.logprob, "top": dict(token.top)} for token in output.logprobs
        ]
    return line


def _print_ready(lines: dict[int, list[dict[str, Any]]], printed: int, as_json: bool) -> int:
    """Print what comes next in order, as far as it is there; how many prompts are printed now."""
    while printed in lines:
        for line in lines[printed]:
            if as_json:
                print(json.dumps(line, ensure_ascii=False), flush=True)
            elif "error" in line:
                print(f"saguaro: prompt {line['id']}: {line['error']}", file=sys.stderr)
            else:
                print(f"== {line['id']}\n{line['text']}\n", flush=True)
        printed += 1
    return printed

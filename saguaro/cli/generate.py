"""`saguaro generate`: prompts from the command line or a file, outputs as text or JSON lines."""

import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from saguaro.cli import commands
from saguaro.cli.meter import Meter
from saguaro.cli.paint import Painter, wants_color
from saguaro.config import SamplingParams
from saguaro.engine.results import Completion, failure_of
from saguaro.errors import ConfigError, SaguaroError
from saguaro.llm import LLM
from saguaro.measure.metrics import Recorder, Summary
from saguaro.measure.prompts import Asked, read_prompt_file
from saguaro.measure.trace import Trace
from saguaro.serve.http.logprobs import LEAST
from saguaro.types import Observer, TokenLogprobs


def generate(command: commands.Generate) -> int:
    """Run the command. Returns 1 if a prompt failed."""
    asked = read_prompts(command)
    params = replace(command.sampling.params(), structured=command.shape.structured())
    with ExitStack() as files:
        observers: list[Observer] = []
        if command.record:
            observers.append(files.enter_context(Recorder(command.record)))
        if command.trace:
            observers.append(files.enter_context(Trace(command.trace)))
        imported = time.perf_counter()
        with commands.load(command.which, command.engine) as llm:
            loaded = time.perf_counter()
            summary = Summary()
            llm.engine.round.observers += [*observers, summary.add]
            if len(asked) == 1 and not command.json and params.n == 1:
                n_failed, speed = _stream(llm, asked[0], params, command)
            else:
                n_failed, speed = _batch(llm, asked, params, command)
            if command.metrics:
                parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in llm.engine.startup.items())
                start = f"imports {imported - commands.STARTED:.2f} s, load {loaded - imported:.2f} s ({parts})"
                print(f"{start}; method {llm.engine.method.name}: {speed}\n{summary}", file=sys.stderr)
                if (why := llm.engine.explain(summary.prepared.n > 0)) is not None:
                    print(why, file=sys.stderr)
    return 1 if n_failed else 0


def read_prompts(command: commands.Generate) -> list[Asked]:
    """The prompts of a command, from --prompt or --prompts."""
    if (command.prompt is None) == (command.prompts is None):
        raise ConfigError("give either --prompt TEXT or --prompts FILE; see `saguaro generate --help`")
    if command.prompt is not None:
        return [Asked("0", command.prompt)]
    assert command.prompts is not None
    return read_prompt_file(command.prompts)


def _tokens(llm: LLM, text: str, command: commands.Generate) -> list[int]:
    tokenizer = llm.engine.tokenizer
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if command.chat else tokenizer.encode(text)


def _stream(llm: LLM, asked: Asked, params: SamplingParams, command: commands.Generate) -> tuple[int, str]:
    """Print one output as it grows. Returns the number of failures and the speed."""
    tokens, meter, failure = _tokens(llm, asked.prompt, command), Meter(), None
    painter = Painter(llm.engine.tokenizer, tokens) if wants_color(command.color) else None
    for delta in llm.stream(tokens, params):
        meter.add(delta)
        failure = failure_of(delta)
        print(painter.paint(delta) if painter else delta.text, end="", flush=True)
    print()
    if painter and llm.engine.method.drafts:
        print(painter.legend(), file=sys.stderr)
    if failure is not None:
        print(f"saguaro: {failure}", file=sys.stderr)
    return int(failure is not None), str(meter)


def _batch(llm: LLM, asked: list[Asked], params: SamplingParams, command: commands.Generate) -> tuple[int, str]:
    """Run all prompts together and print results in order. Returns the number of failures and the total speed."""
    lines: dict[int, list[dict[str, Any]]] = {}
    served: list[int] = []
    tokens: list[list[int]] = []
    for index, one in enumerate(asked):
        try:
            found = llm.engine.truncate(_tokens(llm, one.prompt, command), params)
            llm.engine.check(found, params)
            served.append(index)
            tokens.append(found)
        except SaguaroError as e:
            lines[index] = [{"id": one.id, "error": str(e)}]
    n_failed, n_tokens, n_rounds, began = len(lines), 0, 0, time.perf_counter()
    printed = _print_ready(lines, 0, command.json)
    for place, result in llm.as_finished(tokens, [params] * len(tokens)):
        index = served[place]
        lines[index] = [
            _line(asked[index].id, output, params.n) | _scored(result.prompt_logprobs) for output in result.outputs
        ]
        n_failed += any("error" in line for line in lines[index])
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
    failure = failure_of(output)
    if failure is not None:
        line["error"] = failure
    if n > 1:
        line["index"] = output.index
    if output.logprobs is not None:
        line["logprobs"] = [_logprobs(one) for one in output.logprobs]
    return line


def _scored(found: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
    """The log-probabilities of prompt tokens, if requested; the first has none."""
    return {} if found is None else {"prompt_logprobs": [None if one is None else _logprobs(one) for one in found]}


def _logprobs(one: TokenLogprobs) -> dict[str, Any]:
    top = {token: _finite(logprob) for token, logprob in one.top}
    return {"token": one.token, "logprob": _finite(one.logprob), "top": top}


def _finite(logprob: float) -> float:
    """Replace infinity, which JSON lacks, by the server's number."""
    return logprob if math.isfinite(logprob) else LEAST


def _print_ready(lines: dict[int, list[dict[str, Any]]], printed: int, as_json: bool) -> int:
    """Print the next results that are ready, in order. Returns how many prompts are printed."""
    while printed in lines:
        for line in lines[printed]:
            if as_json:
                print(json.dumps(line, ensure_ascii=False, allow_nan=False), flush=True)
            elif "error" in line:
                print(f"saguaro: prompt {line['id']}: {line['error']}", file=sys.stderr)
            else:
                print(f"== {line['id']}\n{line['text']}\n", flush=True)
        printed += 1
    return printed

"""`saguaro compare`: runs one prompt with each method, each token coloured by its origin; then prints a table.

Below the table it prints, for each method that can prepare, whether it does on this machine, and why. It ends with
"identical output", or with "OUTPUT DIFFERS" and exit status 1.
"""

import sys

from rich.console import Console

from saguaro.cli import commands
from saguaro.cli.candidates import config_for, encoder, load_candidates, method_names, settings_by_name
from saguaro.cli.paint import Painter, legend, wants_color
from saguaro.config import SamplingParams
from saguaro.engine.results import raise_failure
from saguaro.errors import ConfigError
from saguaro.measure.candidate import Candidate, results, table, verdict


def compare(command: commands.Compare) -> int:
    """Stream every method's output. Returns 1 if one differs that must not."""
    if not command.prompt:
        raise ConfigError("there is no prompt; give --prompt TEXT")
    params = command.sampling.params()
    names = method_names(command.methods, config_for(command.which, command.engine))
    encode, has_color = encoder([command.prompt], command.chat), wants_color(command.color)
    settings = settings_by_name(names)
    with load_candidates(settings, command.which, command.engine, params, encode, 1) as (entrants, prompts):
        if has_color:
            print(legend(), file=sys.stderr)
        for entrant in entrants:
            print(f"\n== {entrant.name}", flush=True)
            entrant.run(_stream, entrant, prompts[0], params, has_color)
        print()
        Console().print(table(results(entrants)))
        for entrant in entrants:
            if entrant.llm is not None and entrant.llm.engine.method.prepares:
                engine = entrant.llm.engine
                print(f"{entrant.name}: {engine.round.asks.why_not or engine.preparation}")
    return verdict(entrants)


def _stream(entrant: Candidate, prompt: list[int], params: SamplingParams, has_color: bool) -> list[list[int]]:
    """Print one output as it grows. Returns its tokens."""
    assert entrant.llm is not None
    tokens: list[int] = []
    painter = Painter(entrant.llm.engine.tokenizer, prompt)
    for delta in entrant.llm.stream(prompt, params):
        raise_failure(delta)
        tokens += delta.token_ids
        print(painter.paint(delta) if has_color else delta.text, end="", flush=True)
    print()
    return [tokens]

"""A recording of a target: the tokens that it wrote after each prompt, by temperature and seed.

Under shared noise the target's tokens are a function of (prompt, parameters, seed), whatever was speculated. So a
recording of a real model answers every verification of these requests.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from saguaro.config import SamplingParams
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, short

Key = tuple[tuple[int, ...], float, int]  # prompt, temperature, seed


@dataclass(frozen=True)
class Source:
    """The recorded model, and where it computed."""

    target: str
    epsilon: float | None  # noise of a grown target
    dtype: str
    device: str

    def __str__(self) -> str:
        noise = "" if self.epsilon is None else f", noise {self.epsilon:g}"
        return f"{self.target}{noise}, {self.dtype}, {self.device}"


@dataclass(frozen=True)
class Recording:
    """The outputs of one model, all of the same length."""

    source: Source
    n_tokens: int  # of each output
    outputs: dict[Key, list[int]] = field(default_factory=dict)

    def output(self, prompt: Sequence[int], temperature: float, seed: int | None) -> list[int]:
        """The tokens after this prompt."""
        found = None if seed is None else self.outputs.get((tuple(prompt), temperature, seed))
        if found is None:
            raise ConfigError(
                f"temperature {temperature:g} and seed {seed} after the prompt {short(list(prompt))} are not among the "
                f"{len(self.outputs)} recorded outputs; record again with these prompts and temperatures"
            )
        return found

    def save(self, path: Path) -> None:
        """Write the recording as JSON."""
        outputs = [
            {"prompt": prompt, "temperature": temperature, "seed": seed, "tokens": tokens}
            for (prompt, temperature, seed), tokens in self.outputs.items()
        ]
        path.write_text(json.dumps({"source": asdict(self.source), "n_tokens": self.n_tokens, "outputs": outputs}))


def load_recording(path: Path) -> Recording:
    """Read a file of Recording.save."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        outputs = {_key(each): _tokens(each, found["n_tokens"]) for each in found["outputs"]}
        return Recording(Source(**found["source"]), found["n_tokens"], outputs)
    except OSError as e:
        raise ConfigError(f"the recording {path} cannot be read: {e.strerror}; make one with --save") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no recording ({type(e).__name__}: {e}); make one with --save") from e


def record(
    engine: Engine, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], n_tokens: int
) -> dict[Key, list[int]]:
    """Run the target on every prompt at every temperature. The seed is the number of the prompt."""
    names = {}
    for (seed, prompt), temperature in product(enumerate(prompts), temperatures):
        names[tuple(prompt), temperature, seed] = engine.add(prompt, params_of(temperature, seed, n_tokens))
    while engine.has_work:
        engine.step()
    return {key: engine.result(name).outputs[0].token_ids for key, name in names.items()}


def params_of(temperature: float, seed: int, n_tokens: int) -> SamplingParams:
    """The parameters of a recorded output: so many tokens, whatever they are."""
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=n_tokens, ignore_eos=True)


def _key(each: dict[str, Any]) -> Key:
    return tuple(each["prompt"]), float(each["temperature"]), int(each["seed"])


def _tokens(each: dict[str, Any], n: int) -> list[int]:
    tokens = each["tokens"]
    if not (isinstance(tokens, list) and len(tokens) == n and all(type(token) is int for token in tokens)):
        raise ValueError(f"the tokens of an output are {short(tokens)}, not {n} ids")
    return tokens

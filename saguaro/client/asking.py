"""Bodies of requests to OpenAI-compatible servers.

Other servers have defaults of their own (top_k 40, or the model's generation_config.json), so a comparison states every
parameter. `top_k` is off as -1, which all of them understand.
"""

from collections.abc import Sequence
from typing import Any

from saguaro.config import SamplingParams
from saguaro.errors import ConfigError

KNOWN = (
    *("max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "ignore_eos"),
)
_EXTRAS = ("top_k", "min_p", "repetition_penalty", "ignore_eos")  # not of the OpenAI API
MAX_SEED = 2**31  # some servers keep 32 bits


def check_params(params: SamplingParams) -> None:
    """Raise if a parameter is set that not every server understands alike."""
    plain = SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(params, name)
        if name not in KNOWN and value != getattr(plain, name):
            raise ConfigError(f"{name} is {value!r}; over HTTP there are {', '.join(KNOWN)}: leave it out")


def sampling_body(params: SamplingParams, *, states_all: bool) -> dict[str, Any]:
    """The parameters as fields of a body; those that the OpenAI API lacks only if set, or if all are to be stated.

    >>> sampling_body(SamplingParams(max_tokens=8, temperature=0, seed=2**31 + 5), states_all=False)
    {'max_tokens': 8, 'temperature': 0, 'top_p': 1.0, 'seed': 5}
    """
    body: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    if params.max_tokens is not None:
        body = {"max_tokens": params.max_tokens, **body}
    if params.seed is not None:
        body["seed"] = params.seed % MAX_SEED
    if params.stop:
        body["stop"] = list(params.stop)
    plain = SamplingParams()
    for name in ("presence_penalty", "frequency_penalty", *_EXTRAS):
        value = getattr(params, name)
        if states_all or value != getattr(plain, name):
            body[name] = value if name != "top_k" or value > 0 else -1
    return body


def chat_body(model: str, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> dict[str, Any]:
    """A conversation's body."""
    return {"model": model, "messages": list(messages), **sampling}


def completion_body(model: str, prompt: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """A plain prompt's body."""
    return {"model": model, "prompt": prompt, **sampling}


def pick_model(served: Sequence[str], wanted: str | None) -> str:
    """The model to ask for: the wanted one, else the server's first. Some servers serve one model without a name.

    >>> pick_model(["a", "b"], None), pick_model(["a"], "lora"), pick_model([], None)
    ('a', 'lora', 'default')
    """
    return wanted or (served[0] if served else "default")

"""The output constraint, from `response_format` (OpenAI), `structured_outputs` or `guided_*` (vLLM)."""

from typing import Any

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import Asking, ResponseFormat, StructuredOutputs


def structured(body: Asking) -> dict[str, Any]:
    """The constraint as fields of SamplingParams. Raises if the engine does not support it."""
    wishes = {
        "response_format": _openai(body.response_format),
        "structured_outputs": _vllm(body.structured_outputs),
        **{f"guided_{name}": _guided(body, name) for name in ("json", "regex", "choice", "grammar")},
    }
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if len(given) > 1:
        raise APIError(400, f"{' and '.join(given)}: give one of them", param=list(given)[-1])
    return {"structured": next(iter(given.values()))} if given else {}


def _openai(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """json: a schema, or True for any object."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise APIError(400, "response_format has no json_schema.schema; give one", param="response_format.json_schema")
    return {"json": wanted.json_schema.schema_}


def _guided(body: Asking, name: str) -> dict[str, Any] | None:
    value = getattr(body, f"guided_{name}")
    return None if value is None else {name: value}


def _vllm(wanted: StructuredOutputs | None) -> dict[str, Any] | None:
    """Exactly one of json, regex, choice, grammar."""
    if wanted is None:
        return None
    wanted.check_extra()
    given: dict[str, Any] = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    named = {name: value for name, value in given.items() if value is not None}
    if wanted.json_object:
        named |= {"json_object": True}
    if len(named) > 1:
        names = " and ".join(named)
        raise APIError(400, f"structured_outputs has {names}; give one of them", param="structured_outputs")
    return {"json": True} if "json_object" in named else named or None

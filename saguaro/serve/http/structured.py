"""Which form the output must have, from `response_format` (OpenAI) or `structured_outputs` (vLLM)."""

from typing import Any

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import Asking, ResponseFormat, StructuredOutputs


def structured(body: Asking) -> dict[str, Any]:
    """The fields of SamplingParams that hold it; raises where the engine cannot keep to it."""
    one, other = _openai(body.response_format), _vllm(body.structured_outputs)
    if one is not None and other is not None:
        raise APIError(400, "response_format and structured_outputs: give one of them", param="structured_outputs")
    wish = one or other
    return {} if wish is None else {"structured": wish}


def _openai(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """json: a schema, or True for any object."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise APIError(400, "response_format has no json_schema.schema; give one", param="response_format.json_schema")
    return {"json": wanted.json_schema.schema_}


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

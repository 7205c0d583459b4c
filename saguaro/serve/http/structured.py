"""Which form the output must have, from `response_format` (OpenAI) or `structured_outputs` (vLLM)."""

from typing import Any

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import Asking


def structured(body: Asking) -> dict[str, Any]:
    """The fields of SamplingParams that hold it; raises where the engine cannot keep to it."""
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        message = f"response_format is of type {wanted.type!r}; only 'text' is supported"
        raise APIError(400, message, param="response_format")
    if body.structured_outputs is not None and body.structured_outputs.model_dump(exclude_none=True):
        raise APIError(400, "structured_outputs is not supported; leave it out", param="structured_outputs")
    return {}

"""Checks of a request for text, before it gets a ticket."""

from dataclasses import replace

from saguaro.config import SamplingParams
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.protocol import ChatRequest, CompletionRequest
from saguaro.serve.http.service import Service
from saguaro.serve.http.structured import structured

# Checked for every token: more would delay all requests.
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
MAX_ALLOWED = 1024  # tokens of allowed_token_ids


def check_asking(service: Service, body: ChatRequest | CompletionRequest, n_prompts: int) -> SamplingParams:
    """The sampling parameters. Raises if the request is not acceptable."""
    service.check_model(body.model)
    body.check_extra()
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options needs stream: true", param="stream_options")
    if body.stream_options is not None:
        body.stream_options.check_extra()
    if body.stream and body.prompt_logprobs is not None:
        raise APIError(400, "prompt_logprobs is not told in streams; leave stream out", param="prompt_logprobs")
    params = replace(body.params(service.defaults), **structured(body))
    _check_lists(params)
    limits = service.limits
    if params.n > limits.max_n:
        raise APIError(
            400, f"n is {params.n}; at most {limits.max_n} outputs are made of a prompt: ask twice", param="n"
        )
    if n_prompts > limits.max_prompts:
        message = f"{n_prompts} prompts; a request may have at most {limits.max_prompts}: ask twice"
        raise APIError(400, message, param="prompt")
    return params


def _check_lists(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOPS:
        raise APIError(400, f"stop has {len(params.stop)} strings; at most {MAX_STOPS} are looked for", param="stop")
    longest = max(map(len, params.stop), default=0)
    if longest > MAX_STOP_CHARS:
        message = f"stop has a string of {longest} characters; at most {MAX_STOP_CHARS} are looked for"
        raise APIError(400, message, param="stop")
    if len(params.allowed_token_ids) > MAX_ALLOWED:
        message = f"allowed_token_ids has {len(params.allowed_token_ids)} tokens; at most {MAX_ALLOWED} are looked at"
        raise APIError(400, message, param="allowed_token_ids")

"""POST /v1/responses of the OpenAI API. Responses are not stored."""

from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.responses import Response

from saguaro.serve.http.blocks import Block, Change, Closed, Grew, Opened
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.responses_body import ResponsesRequest
from saguaro.serve.http.service import Service
from saguaro.serve.http.turn import Data, Ended, answer_turn, new_id, now

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass
class ResponsesVoice:
    """Formats a turn. Every block is an item of the output."""

    body: ResponsesRequest
    model: str
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=now)
    _ids: dict[int, str] = field(default_factory=dict)  # item ids, by block
    _n_told: int = 0  # number of events sent

    def begin(self, n_prompt: int) -> list[Data]:
        """The response without its output."""
        response = self._response("in_progress")
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=response) for name in names]

    def change(self, change: Change) -> list[Data]:
        """The beginning, growth or end of an item."""
        match change:
            case Opened(block):
                return self._opened(block)
            case Grew(block, text):
                if block.kind == "call":
                    return [self._event("response.function_call_arguments.delta", **self._place(block), delta=text)]
                told = {"delta": text, **_no_logprobs(block)}
                return [self._event(f"{_EVENTS[block.kind]}.delta", **self._part_place(block), **told)]
            case Closed(block):
                return self._closed(block)

    def end(self, ended: Ended) -> list[Data]:
        """The whole response."""
        whole = self.whole(ended)
        return [self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, error: APIError) -> list[Data]:
        """A failed response."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        return [self._event("response.failed", response=failed)]

    def whole(self, ended: Ended) -> Data:
        """The response."""
        is_cut = ended.reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        last = len(ended.blocks) - 1
        response["output"] = [
            self._item(block, "incomplete" if is_cut and block.index == last else "completed") for block in ended.blocks
        ]
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = _usage(ended)
        return response | {"completed_at": now(), "seed": ended.result.outputs[0].seed}

    def _opened(self, block: Block) -> list[Data]:
        empty = Block(block.index, block.kind, block.call_id, block.name)
        item = self._item(empty, "in_progress")
        if block.kind != "call":
            item["content"] = []
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._event("response.content_part.added", **self._part_place(block), part=_part(empty))]

    def _closed(self, block: Block) -> list[Data]:
        events = self._finished(block)
        item = self._item(block, "completed" if block.is_complete else "incomplete")
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _finished(self, block: Block) -> list[Data]:
        """The end of an item's content; a call that was cut off has none."""
        if block.kind == "call":
            name, said = "response.function_call_arguments.done", {"arguments": block.text, "name": block.name}
            return [self._event(name, **self._place(block), **said)] if block.is_complete else []
        place = self._part_place(block)
        return [
            self._event(f"{_EVENTS[block.kind]}.done", **place, text=block.text, **_no_logprobs(block)),
            self._event("response.content_part.done", **place, part=_part(block)),
        ]

    def _item(self, block: Block, status: str) -> Data:
        item = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**item, **call}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}

    def _item_id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, new_id(_PREFIXES[block.kind]))

    def _place(self, block: Block) -> Data:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _part_place(self, block: Block) -> Data:
        return {**self._place(block), "content_index": 0}

    def _event(self, name: str, /, **data: Any) -> Data:
        number, self._n_told = self._n_told, self._n_told + 1
        return {"type": name, "sequence_number": number, **data}

    def _response(self, status: str) -> Data:
        body = self.body
        wanted = body.text.format if body.text and body.text.format else None
        choice = body.tool_choice if isinstance(body.tool_choice, str) else _plain(body.tool_choice)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _plain(wanted) or {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": [{"parameters": None, "strict": None, **_plain(tool)} for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


async def responses(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    voice = ResponsesVoice(body, body.model or service.names[0])
    return await answer_turn(service, body.chat(), request, voice)


def _plain(given: Any) -> Data:
    """A part of the request, repeated in the response."""
    return {} if given is None else dict(given.model_dump(by_alias=True, exclude_none=True))


def _no_logprobs(block: Block) -> Data:
    """An empty list, which clients expect for text."""
    return {"logprobs": []} if block.kind == "text" else {}


def _part(block: Block) -> Data:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(ended: Ended) -> Data:
    (output,) = ended.result.outputs
    n_prompt, n_output = len(ended.result.prompt_token_ids), len(output.token_ids)
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": output.timings.n_cached, "cache_write_tokens": 0},
        "output_tokens": n_output,
        "output_tokens_details": {"reasoning_tokens": ended.n_reasoning},
        "total_tokens": n_prompt + n_output,
    }

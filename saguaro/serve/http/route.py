"""Routes with a body: FastAPI documents it, we parse it; large bodies are parsed outside the event loop."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from saguaro.serve.http.errors import APIError
from saguaro.serve.http.service import Service
from saguaro.serve.http.sse import ClientGone

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def body_route(service: Service) -> type[APIRoute]:
    """A route class for endpoints that take `body` and `request`."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            assert self.body_field is not None, "the endpoint has no body"
            kind: Any = self.body_field.field_info.annotation

            async def handle(request: Request) -> Response:
                check_json(request.headers.get("content-type", ""))
                body = await service.read_body(kind, await request.body())
                try:
                    response: Response = await self.endpoint(body=body, request=request)
                except ClientGone:
                    return Response(status_code=499)  # the client has disconnected
                return response

            return handle

    return BodyRoute


def check_json(content_type: str) -> None:
    """Require a JSON content type, which a web page elsewhere cannot send without a CORS preflight."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"the body is of type {content_type[:100]!r}; send Content-Type: application/json")

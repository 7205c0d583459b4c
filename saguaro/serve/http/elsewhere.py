"""Unsupported endpoints of the OpenAI API and of other servers: 404 with an explanation."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.responses import Response

from saguaro.serve.http.errors import APIError

# By path prefix: the missing function.
ELSEWHERE = {
    "/v1/embeddings": "makes no embeddings",
    "/v1/rerank": "ranks no documents",
    "/rerank": "ranks no documents",
    "/v1/score": "ranks no documents",
    "/score": "ranks no documents",
    "/pooling": "makes no embeddings",
    "/classify": "classifies nothing",
    "/v1/audio": "neither hears nor speaks",
    "/v1/images": "makes no images",
    "/v1/videos": "makes no videos",
    "/v1/moderations": "judges no texts",
    "/v1/files": "stores no files",
    "/v1/batches": "runs no batches",
    "/v1/assistants": "has no assistants",
    "/v1/threads": "has no assistants",
    "/v1/vector_stores": "stores no files",
    "/v1/fine_tuning": "trains no models",
    "/v1/realtime": "has no realtime sessions",
    "/v1/conversations": "stores no conversations",
    "/v1/responses/{path:path}": "stores no responses",
    "/v1/complete": "has no such API",
}
HERE = "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"


def elsewhere_routes(app: FastAPI) -> None:
    """Add routes for these paths, and those below them."""
    for path, why in ELSEWHERE.items():
        for route in (path, f"{path}/{{rest:path}}") if "{" not in path else (path,):
            app.add_api_route(route, _refuser(path, why), methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _refuser(path: str, why: str) -> Callable[[], Awaitable[Response]]:
    name = path.partition("/{")[0]

    async def refuse() -> Response:
        raise APIError(404, f"{name}: this server continues text with a language model and {why}; it has {HERE}")

    return refuse

"""The server as an ASGI application: routes and middleware."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from saguaro import __version__
from saguaro.serve.http.chat import chat
from saguaro.serve.http.completions import complete
from saguaro.serve.http.elsewhere import elsewhere_routes
from saguaro.serve.http.errors import ErrorResponse, install_handlers
from saguaro.serve.http.guard import BodyGuard, HostGuard, KeyGuard
from saguaro.serve.http.messages import count_tokens, messages
from saguaro.serve.http.messages_body import CountTokensRequest, MessagesRequest
from saguaro.serve.http.messages_errors import AnthropicErrors
from saguaro.serve.http.page import page_routes
from saguaro.serve.http.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from saguaro.serve.http.responses import responses
from saguaro.serve.http.responses_body import ResponsesRequest
from saguaro.serve.http.route import body_route
from saguaro.serve.http.service import Service
from saguaro.serve.http.words import detokenize, tokenize

_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served, and why"},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve it now, and why"},
}


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Build the application. It starts and ends the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    app = FastAPI(
        title="Saguaro",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
    )
    install_handlers(app)
    _text_routes(app, service)
    _state_routes(app, service)
    page_routes(app)
    elsewhere_routes(app)
    # The last one added runs first: a body is read only after the key check, and CORS preflights need no key.
    app.add_middleware(BodyGuard, front=service.front, limits=service.limits)
    if api_keys:
        app.add_middleware(KeyGuard, keys=api_keys)
    if allowed_origins:
        origins = list(allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(HostGuard, names=allowed_hosts)
    app.add_middleware(AnthropicErrors)
    return app


def _text_routes(app: FastAPI, service: Service) -> None:
    routes = APIRouter(route_class=body_route(service))
    post: dict[str, Any] = {"responses": _REFUSALS, "response_model": None}

    @routes.post("/v1/chat/completions", **post)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat(service, body, request)

    @routes.post("/v1/completions", **post)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await complete(service, body, request)

    @routes.post("/v1/responses", **post)
    async def openai_responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, as the OpenAI Responses API has it."""
        return await responses(service, body, request)

    @routes.post("/v1/messages", **post)
    async def anthropic_messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages API has it."""
        return await messages(service, body, request)

    @routes.post("/v1/messages/count_tokens", **post)
    async def anthropic_count(body: CountTokensRequest, request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        return await count_tokens(service, body, request)

    @routes.post("/tokenize", **post)
    async def to_tokens(body: TokenizeRequest, request: Request) -> Response:
        """Tokens of a text or a conversation."""
        return JSONResponse(await tokenize(service, body, request))

    @routes.post("/detokenize", **post)
    async def to_text(body: DetokenizeRequest, request: Request) -> Response:
        """Text of tokens."""
        return JSONResponse(await detokenize(service, body, request))

    app.include_router(routes)


def _state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=_REFUSALS)
    async def models() -> dict[str, Any]:
        """The served model, by all its names."""
        return {"object": "list", "data": [_card(service, name) for name in service.names]}

    @app.get("/v1/models/{model:path}", responses=_REFUSALS)
    async def model(model: str) -> dict[str, Any]:
        """The served model."""
        service.check_model(model)
        return _card(service, model)

    @app.get("/health", responses=_REFUSALS)
    async def health() -> dict[str, str]:
        """Whether requests are served."""
        service.front.check()
        return {"status": "ok"}

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", responses=_REFUSALS, response_class=Response)
    async def ping() -> Response:
        """The same, without words."""
        service.front.check()
        return Response()

    @app.get("/load")
    async def load() -> dict[str, int]:
        """How many requests are being served."""
        return {"server_load": service.front.n_requests}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(await service.read_metrics(), media_type=service.metrics.content_type)


def _card(service: Service, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "saguaro"}
    card |= {"root": service.engine.loaded.name, "parent": None, "max_model_len": service.max_model_len}
    return {**card, "speculation": _speculation(service)}


def _speculation(service: Service) -> dict[str, Any] | None:
    """The default speculation settings; None: autoregressive."""
    method, config = service.engine.method, service.engine.config
    if not method.drafts:
        return None
    prepares = method.prepares
    told: dict[str, Any] = {"method": method.name, "lookahead": config.lookahead, "verification": method.verification}
    told |= {"prepares": prepares, "budget": config.budget if prepares else 0}
    preparation = service.engine.preparation
    told |= {"preparation": preparation.when, "why_not_prepared": preparation.why_not}
    return {**told, "why_not_asked": service.engine.round.asks.why_not}

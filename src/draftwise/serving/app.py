"""The ASGI application: routes and middleware."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import draftwise
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.serving import openapi
from draftwise.serving.answers import AnswerFormat, ChatFormat, CompletionFormat, Echo
from draftwise.serving.bodies import CLIENT_CLOSED, JsonRoute, authorize
from draftwise.serving.errors import grammar_errors_named
from draftwise.serving.generation import Generation
from draftwise.serving.http_errors import (
    answer_error,
    answer_http,
    answer_invalid,
)
from draftwise.serving.middleware import AccessLog, BodyLimit
from draftwise.serving.responses import (
    ClientDisconnectedError,
    EventStream,
    until_disconnect,
    whole_answer,
)
from draftwise.serving.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampling,
    SpeculationChange,
    TokenizeBody,
)
from draftwise.serving.service import Service
from draftwise.serving.tools.tooling import prepare_tools

# The page loads resources only from this server.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_bearer = HTTPBearer(auto_error=False, description="An API key of the server.")


def create_app(service: Service) -> FastAPI:
    """Create the application of a service. The caller starts and closes the service."""
    app = FastAPI(
        title="Draftwise",
        version=draftwise.__version__,
        description="OpenAI-compatible completions with lossless speculative decoding.",
        middleware=[
            # First, so that error responses of the other middleware get its headers too.
            *_cross_origin(service.settings.allowed_origins),
            Middleware(AccessLog),
            Middleware(BodyLimit, max_bytes=service.settings.max_body_bytes),
        ],
        exception_handlers={
            DraftwiseError: answer_error,
            RequestValidationError: answer_invalid,
            HTTPException: answer_http,
        },
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(_open)
    app.include_router(_guarded)
    folder = Path(str(files("draftwise.serving") / "page"))
    app.mount("/page", StaticFiles(directory=folder, check_dir=False))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(folder / "index.html", headers=_PAGE_HEADERS)

    return app


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Middleware that allows cross-origin requests from these origins."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PATCH"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "WWW-Authenticate", "X-Request-Id"],
        )
    ]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


async def _authorize(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """Check the API key of requests, also of those without a body. The schema names its kind."""
    authorize(request)


_open = APIRouter()
_guarded = APIRouter(
    dependencies=[Depends(_authorize)], responses=openapi.REFUSALS, route_class=JsonRoute
)


@_open.get("/health", responses=openapi.HEALTH)
async def health(service: Served) -> Response:
    """Health of the server."""
    health = service.health()
    body = {"status": health.status.value, "reason": health.reason}
    return JSONResponse(body, 200 if health.is_ok else 503)


@_open.get("/metrics", responses=openapi.METRICS)
async def metrics(service: Served) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(service.metrics_text(), media_type=openapi.PROMETHEUS)


@_open.get("/version", responses=openapi.VERSION)
async def version() -> dict[str, str]:
    """Version of the server."""
    return {"version": draftwise.__version__}


@_guarded.get("/v1/models", responses=openapi.MODELS)
async def models(service: Served) -> dict[str, Any]:
    """List the served model."""
    return {"object": "list", "data": [service.describe_model()]}


@_guarded.get("/v1/models/{name:path}", responses=openapi.MODEL)
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe a model, whose name may contain slashes."""
    service.check_model(name)
    return service.describe_model()


@_guarded.post("/v1/completions", responses=openapi.COMPLETION)
async def complete(body: CompletionBody, request: Request, service: Served) -> Response:
    """Create text completions."""
    generation = await service.completion(body, request.state.client)
    echoes = await _echoes(service, body, generation)
    answer_format = CompletionFormat(
        service.model_name, body.return_tokens, service.token_texts, echoes
    )
    return await _answer(request, service, body, generation, answer_format)


@_guarded.post("/v1/chat/completions", responses=openapi.CHAT)
async def chat(body: ChatBody, request: Request, service: Served) -> Response:
    """Create chat completions."""
    with grammar_errors_named("tools"):
        tooling = prepare_tools(body, service.tool_call_parser)
    generation = await service.chat(body, tooling, request.state.client)
    answer_format = ChatFormat(
        service.model_name,
        body.return_tokens,
        service.token_texts,
        body.stream,
        body.service_tier is not None,
        [tooling.new_answer() for _ in generation.specs],
    )
    return await _answer(request, service, body, generation, answer_format)


@_guarded.post("/tokenize", responses=openapi.TOKENS)
async def tokenize(body: TokenizeBody, service: Served) -> dict[str, Any]:
    """Tokenize a prompt or a chat."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("prompt", "give either a prompt or messages")
    prompt = body.prompt or [message.plain() for message in body.messages or []]
    _, ids = await service.tokenize(prompt, service.new_deadline(), body.chat())
    return {"count": len(ids), "max_model_len": service.client.model.max_model_len, "tokens": ids}


@_guarded.post("/detokenize", responses=openapi.TEXT)
async def detokenize(body: DetokenizeBody, service: Served) -> dict[str, Any]:
    """Convert token ids to text."""
    service.check_model(body.model)
    return {"prompt": await service.detokenize(body.tokens, service.new_deadline())}


@_guarded.get("/v1/speculation", responses=openapi.SPECULATION)
async def speculation(service: Served) -> dict[str, Any]:
    """Return the speculation settings of the server."""
    return await service.speculation()


@_guarded.patch("/v1/speculation", responses=openapi.SPECULATION)
async def change_speculation(body: SpeculationChange, service: Served) -> dict[str, Any]:
    """Change speculation settings from the next step on, also for running requests."""
    return await service.speculation(**body.changes())


@_guarded.get("/v1/stats", responses=openapi.STATISTICS)
async def stats(service: Served) -> dict[str, Any]:
    """Return recent statistics of the engine."""
    health = service.health()
    about = {"status": health.status.value, "reason": health.reason}
    return about | service.statistics.snapshot()


async def _answer(
    request: Request,
    service: Service,
    body: Sampling,
    generation: Generation,
    answer_format: AnswerFormat,
) -> Response:
    if body.stream:
        return EventStream(generation, answer_format, body.stream_options)
    try:
        content = await until_disconnect(request.receive, whole_answer(generation, answer_format))
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(content)


async def _echoes(
    service: Service, body: CompletionBody, generation: Generation
) -> list[Echo | None]:
    """The prompt to return before each answer; ``None`` unless ``echo`` is set."""
    echoes: list[Echo | None] = []
    for spec in generation.specs:
        if not body.echo:
            echoes.append(None)
        elif spec.is_first:
            text = spec.prompt
            if text is None:
                text = await service.detokenize(spec.prompt_ids, generation.deadline)
            has_logprobs = spec.params.prompt_logprobs is not None
            echoes.append(Echo(text, spec.prompt_ids, has_logprobs))
        else:
            echoes.append(echoes[-1])
    return echoes

"""The application: routes, and what stands before them."""

from __future__ import annotations

import hmac
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
from draftwise.serving import documents
from draftwise.serving.answers import AnswerForm
from draftwise.serving.bodies import CLIENT_CLOSED, JsonRoute
from draftwise.serving.chat_answers import ChatForm
from draftwise.serving.completion_answers import CompletionForm, Echo
from draftwise.serving.errors import UnauthorizedError
from draftwise.serving.generation import Generation, Question
from draftwise.serving.http_errors import (
    answer_error,
    answer_http,
    answer_invalid,
)
from draftwise.serving.middleware import AccessLog, BodyLimit
from draftwise.serving.responses import (
    ClientGoneError,
    EventStream,
    unless_gone,
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
from draftwise.serving.tools.preparation import prepare

# Nothing that the page needs comes from anywhere else.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_bearer = HTTPBearer(auto_error=False, description="One of the keys the server was given.")


def create_app(service: Service) -> FastAPI:
    """The application of a service, which somebody else starts and closes."""
    app = FastAPI(
        title="Draftwise",
        version=draftwise.__version__,
        description="OpenAI-compatible completions by lossless speculative decoding.",
        middleware=[
            # First, so that refusals by the others have its headers as well.
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
    """Let pages of these origins ask; nothing is needed if there are none."""
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
    service: Served,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Let nobody in without a key, if there are keys."""
    keys = service.settings.api_keys
    token = "" if given is None else given.credentials
    # All are compared, in a time that says nothing of them.
    matches = [hmac.compare_digest(token.encode(), key.encode()) for key in keys]
    if keys and not any(matches):
        raise UnauthorizedError("api_key", "missing or wrong: send Authorization: Bearer KEY")


_open = APIRouter()
_guarded = APIRouter(
    dependencies=[Depends(_authorize)], responses=documents.REFUSALS, route_class=JsonRoute
)


@_open.get("/health", responses=documents.HEALTH)
async def health(service: Served) -> Response:
    """Whether requests are answered now, and if not, why."""
    health = service.health()
    body = {"status": health.status.value, "reason": health.reason}
    return JSONResponse(body, 200 if health.is_ok else 503)


@_open.get("/metrics", responses=documents.METRICS)
async def metrics(service: Served) -> Response:
    """What is counted, in Prometheus' text format."""
    return Response(service.metrics_text(), media_type=documents.PROMETHEUS)


@_open.get("/version", responses=documents.VERSION)
async def version() -> dict[str, str]:
    """Of the server."""
    return {"version": draftwise.__version__}


@_guarded.get("/v1/models", responses=documents.MODELS)
async def models(service: Served) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [service.describe_model()]}


@_guarded.get("/v1/models/{name:path}", responses=documents.MODEL)
async def model(name: str, service: Served) -> dict[str, Any]:
    """The model of a name, which may hold slashes."""
    service.check_model(name)
    return service.describe_model()


@_guarded.post("/v1/completions", responses=documents.COMPLETION)
async def complete(body: CompletionBody, request: Request, service: Served) -> Response:
    """Continue a text."""
    generation = await service.completion(body)
    echoes = [await _echo(service, body, each) for each in generation.questions]
    form = CompletionForm(service.model_name, body.return_tokens, service.token_texts, echoes)
    return await _answer(request, service, body, generation, form)


@_guarded.post("/v1/chat/completions", responses=documents.CHAT)
async def chat(body: ChatBody, request: Request, service: Served) -> Response:
    """Answer in a chat."""
    tooling = prepare(body, service.tool_call_parser)
    generation = await service.chat(body, tooling)
    form = ChatForm(
        service.model_name,
        body.return_tokens,
        service.token_texts,
        body.stream,
        [tooling.new_answer() for _ in generation.questions],
    )
    return await _answer(request, service, body, generation, form)


@_guarded.post("/tokenize", responses=documents.TOKENS)
async def tokenize(body: TokenizeBody, service: Served) -> dict[str, Any]:
    """Tokens of a prompt or of a chat."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("prompt", "give either a prompt or messages")
    prompt = body.prompt or [message.plain() for message in body.messages or []]
    _, ids = await service.tokenize(prompt, body.chat())
    return {"count": len(ids), "max_model_len": service.client.model.max_model_len, "tokens": ids}


@_guarded.post("/detokenize", responses=documents.TEXT)
async def detokenize(body: DetokenizeBody, service: Served) -> dict[str, Any]:
    """Text of tokens."""
    service.check_model(body.model)
    return {"prompt": await service.detokenize(body.tokens)}


@_guarded.get("/v1/speculation", responses=documents.SPECULATION)
async def speculation(service: Served) -> dict[str, Any]:
    """How the server speculates."""
    return await service.speculation()


@_guarded.patch("/v1/speculation", responses=documents.SPECULATION)
async def change_speculation(body: SpeculationChange, service: Served) -> dict[str, Any]:
    """Speculate in another way from the next step on, also for requests that run."""
    return await service.speculation(**body.changes())


@_guarded.get("/v1/stats", responses=documents.STATISTICS)
async def stats(service: Served) -> dict[str, Any]:
    """What the engine did in the last second or so."""
    return service.statistics.snapshot()


async def _answer(
    request: Request, service: Service, body: Sampling, generation: Generation, form: AnswerForm
) -> Response:
    if body.stream:
        return EventStream(generation, form, body.stream_options)
    try:
        content = await unless_gone(request.receive, whole_answer(generation, form))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(content)


async def _echo(service: Service, body: CompletionBody, question: Question) -> Echo | None:
    """What stands before an answer."""
    if not body.echo:
        return None
    text = question.prompt
    if text is None:
        text = await service.detokenize(question.prompt_ids)
    return Echo(text, question.prompt_ids, question.params.prompt_logprobs is not None)

"""The public port: OpenAI's API, health, metrics. HTTP in, HTTP out; `service.py` does the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline_runtime.api_document import (
    CHAT,
    COMPLETION,
    DETOKENIZED,
    EMBEDDINGS,
    MODEL,
    MODELS,
    PLAIN,
    PLAIN_OK,
    TOKENIZED,
    VERSION,
    answered,
    describe_app,
    described,
)
from paceline_runtime.api_embeddings import embedding_reply, start_embedding
from paceline_runtime.api_errors import ApiError, install_error_handlers
from paceline_runtime.api_keys import KeyFile, KeyGate
from paceline_runtime.api_middleware import WorkGate, leaving_cause
from paceline_runtime.api_requests import start_chat, start_completion
from paceline_runtime.api_schema import CompletionRequest, EmbeddingRequest
from paceline_runtime.api_tokens import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from paceline_runtime.call_options import read_options
from paceline_runtime.chat_schema import ChatRequest
from paceline_runtime.generation import Generation, pieces_of
from paceline_runtime.metrics import CONTENT_TYPE
from paceline_runtime.openai_replies import Reply, event_stream
from paceline_runtime.service import Service

__all__ = ["EventResponse", "build_api"]

T = TypeVar("T")
_CLIENT_CLOSED = 499  # nginx's word for it; nobody reads it


def build_api(service: Service, keys: KeyFile | None = None) -> FastAPI:
    """Return the app of the public port; with `keys`, who asks must have one."""
    app = FastAPI(title="Paceline runtime", version=version("paceline"), docs_url=None, redoc_url=None)
    settings = service.settings
    if keys is not None:
        app.add_middleware(KeyGate, keys=keys)
    app.add_middleware(WorkGate, drain=service.drain, max_body=settings.max_body_bytes, read_timeout=settings.read_timeout)
    install_error_handlers(app)
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_tokens(app, service)
    describe_app(app)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", **PLAIN)
    async def live() -> Response:
        """200 while this process works, also while loading or in a long step; 503 if the engine hangs."""
        if (how := service.client.hung(service.settings.hang_timeout)) is not None:
            return PlainTextResponse(f"hung: {how}\n", 503)
        return PlainTextResponse(f"ok: {service.client.activity}\n")

    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", **PLAIN)
    async def ready() -> Response:
        """200 if new work should come here; 503 with the reason while loading, restarting or draining."""
        reason = service.not_ready_reason()
        return PlainTextResponse("ok\n") if reason is None else PlainTextResponse(f"not ready: {reason}\n", 503)

    @app.get("/metrics", **PLAIN_OK)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/version", **answered(VERSION))
    async def runtime_version() -> dict[str, str]:
        """The runtime's version."""
        return {"version": app.version}


def _add_models(app: FastAPI, service: Service) -> None:
    name = service.settings.served_model_name

    def card() -> dict[str, Any]:
        length = service.client.ready.max_model_len if service.client.ready is not None else None
        return {"id": name, "object": "model", "created": service.started, "owned_by": "paceline", "max_model_len": length}

    @app.get("/v1/models", **answered(MODELS))
    async def models() -> dict[str, Any]:
        """The one model that this server has."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}", **answered(MODEL, 404))
    async def model(model: str) -> dict[str, Any]:
        """One model by name."""
        if model != name:
            raise ApiError(404, f"the model {model!r} doesn't exist here", code="model_not_found", param="model")
        return card()


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", **described(CompletionRequest, COMPLETION, stream=True))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body = CompletionRequest.model_validate_json(await request.body())
        generations, reply = await start_completion(service, body, read_options(request))
        return await _answer(request, reply, generations, stream=bool(body.stream))

    @app.post("/v1/chat/completions", **described(ChatRequest, CHAT, stream=True))
    async def chat(request: Request) -> Response:
        """Answer in a chat."""
        body = ChatRequest.model_validate_json(await request.body())
        generations, reply = await start_chat(service, body, read_options(request))
        return await _answer(request, reply, generations, stream=bool(body.stream))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", **described(EmbeddingRequest, EMBEDDINGS))
    async def embeddings(request: Request) -> Response:
        """Turn texts into vectors: pooled hidden states of the model, of length 1."""
        body = EmbeddingRequest.model_validate_json(await request.body())
        generations = await start_embedding(service, body, read_options(request))
        try:
            answers = await _unless_disconnected(request, lambda: _gather(generations))
        finally:
            _close(generations)
        if answers is None:
            return Response(status_code=_CLIENT_CLOSED)
        return _json(embedding_reply(service.settings.served_model_name, body, generations))

    @app.post("/tokenize", **described(TokenizeRequest, TOKENIZED))
    async def tokenize(request: Request) -> Response:
        """Turn a text or a chat into token ids, as a completion or an answer would get them."""
        return _json(await tokenized(service, TokenizeRequest.model_validate_json(await request.body())))

    @app.post("/detokenize", **described(DetokenizeRequest, DETOKENIZED))
    async def detokenize(request: Request) -> Response:
        """Turn token ids into text."""
        return _json(await detokenized(service, DetokenizeRequest.model_validate_json(await request.body())))


def _json(data: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


class EventResponse(StreamingResponse):
    """Server-sent events of some generations, which are closed at its end whatever ends it.

    The events' own `finally` wouldn't do: it doesn't run if the client leaves before the first event is asked for.
    """

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._generations, leaving_cause(scope))


def _close(generations: Sequence[Generation], cause: str = "client") -> None:
    for generation in generations:
        generation.close(cause)


async def _answer(request: Request, reply: Reply, generations: list[Generation], *, stream: bool) -> Response:
    """Answer whole or as a stream; whatever happens, no generation is left running without a reader."""
    response = None
    try:
        response = await (_stream if stream else _whole)(request, reply, generations)
        return response or Response(status_code=_CLIENT_CLOSED)
    finally:
        if not isinstance(response, EventResponse):  # which closes them at its end
            _close(generations)


async def _whole(request: Request, reply: Reply, generations: list[Generation]) -> Response | None:
    answers = await _unless_disconnected(request, lambda: _gather(generations))
    return None if answers is None else Response(reply.whole(answers), media_type="application/json")


async def _gather(generations: list[Generation]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generation.whole()) for generation in generations]
    return [task.result() for task in tasks]


async def _stream(request: Request, reply: Reply, generations: list[Generation]) -> Response | None:
    """Wait for the first text (or error) before the headers go out, so that a refusal has a status of its own."""
    pieces = pieces_of(generations)
    first = await _unless_disconnected(request, lambda: anext(pieces))
    if first is None:
        return None
    return EventResponse(event_stream(reply, generations, first, pieces), generations)


async def _unless_disconnected(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of `work`, or None if the client left first (then `work` is cancelled)."""
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # a batch fails as its first failure does
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

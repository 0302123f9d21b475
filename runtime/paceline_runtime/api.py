"""The public port: OpenAI's API, health, metrics. HTTP in, HTTP out; `service.py` does the work."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError
from paceline_runtime.api_errors import ApiError, install_error_handlers, invalid
from paceline_runtime.api_middleware import WorkGate, request_id
from paceline_runtime.api_schema import ApiRequest, ChatRequest, CompletionRequest
from paceline_runtime.generation import Generation, pieces_of
from paceline_runtime.metrics import CONTENT_TYPE
from paceline_runtime.openai_replies import ChatReply, CompletionReply, Reply, event_stream
from paceline_runtime.service import CallOptions, Service

__all__ = ["EventResponse", "build_api"]

T = TypeVar("T")
_CLIENT_CLOSED = 499  # nginx's word for it; nobody reads it
_MAX_PRIORITY = 1 << 31


def build_api(service: Service) -> FastAPI:
    """Return the app of the public port."""
    app = FastAPI(title="Paceline runtime", version=version("paceline"), docs_url=None, redoc_url=None)
    app.add_middleware(WorkGate, drain=service.drain, max_body=service.settings.max_body_bytes)
    install_error_handlers(app)
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        """200 while this process works, also while loading; 503 if the engine hangs."""
        if service.client.hung(service.settings.hang_timeout):
            return PlainTextResponse("hung: the engine makes no step\n", 503)
        return PlainTextResponse("ok\n")

    @app.get("/health/ready")
    async def ready() -> Response:
        """200 if new work should come here; 503 with the reason while loading, restarting or draining."""
        reason = service.not_ready_reason()
        return PlainTextResponse("ok\n") if reason is None else PlainTextResponse(f"not ready: {reason}\n", 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def runtime_version() -> dict[str, str]:
        """The runtime's version."""
        return {"version": app.version}


def _add_models(app: FastAPI, service: Service) -> None:
    name = service.settings.served_model_name

    def card() -> dict[str, Any]:
        length = service.client.ready.max_model_len if service.client.ready is not None else None
        return {"id": name, "object": "model", "created": service.started, "owned_by": "paceline", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that this server has."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model by name."""
        if model != name:
            raise ApiError(404, f"the model {model!r} doesn't exist here", code="model_not_found", param="model")
        return card()


def _add_completions(app: FastAPI, service: Service) -> None:
    name = service.settings.served_model_name

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body = CompletionRequest.model_validate_json(await request.body())
        generations = await service.complete(body, _options(request))
        reply = CompletionReply(f"cmpl-{request_id(request.scope)}", name, body.choices, body.include_usage)
        return await _answer(request, reply, generations, stream=bool(body.stream))

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer in a chat."""
        body = ChatRequest.model_validate_json(await request.body())
        generations = await service.chat(body, _options(request))
        reply = ChatReply(f"chatcmpl-{request_id(request.scope)}", name, body.choices, body.include_usage)
        return await _answer(request, reply, generations, stream=bool(body.stream))


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
            _close(self._generations)


def _close(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


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


def _options(request: Request) -> CallOptions:
    """Read the headers that go beside the body. Raises `ApiError`."""
    priority = request.headers.get("x-request-priority", "0")
    try:
        number = int(priority)
    except ValueError:
        number = _MAX_PRIORITY + 1
    if abs(number) > _MAX_PRIORITY:
        raise invalid(f"X-Request-Priority must be a whole number (lower goes first), not {priority[:40]!r}")
    return CallOptions(request_id(request.scope), number, _timeout(request.headers.get("x-request-timeout")))


def _timeout(text: str | None) -> float | None:
    """Return seconds: `X-Request-Timeout` is a plain number of them, or a duration such as `500ms`."""
    if text is None:
        return None
    try:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
    except (FormatError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise invalid(f"X-Request-Timeout must be seconds or a duration above 0, as in 2.5 or 500ms, not {text[:40]!r}")
    return seconds


def _body(kind: type[ApiRequest]) -> dict[str, Any]:
    """Describe a body for OpenAPI; it is parsed by pydantic itself, whose errors say more than the framework's."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

"""The admin port: knobs, observation and drain, for the operator and for people with the token."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_core.errors import FormatError, KnobError, RevisionConflict
from paceline_core.wire import KnobsPatch, TimelineDocument, from_json, to_json
from paceline_runtime.admin_auth import TokenFile
from paceline_runtime.admin_lab import PREFIX as LAB
from paceline_runtime.admin_lab import add_lab
from paceline_runtime.api_errors import ApiError, error_body, install_error_handlers, invalid
from paceline_runtime.engine_client import KnobsNotTaken
from paceline_runtime.knob_store import KnobChange, NothingToRollBack
from paceline_runtime.logs import log_event
from paceline_runtime.observe import ObserveState
from paceline_runtime.service import Service
from paceline_runtime.timeline import STEPS_KEPT, WATCH_SECONDS

__all__ = ["build_admin"]

# how long a PATCH waits for the engine to take it over, so that its answer can say `applied`; a step takes less, and a
# change that takes longer is told as `pending`
APPLY_SECONDS = 2.0
MAX_BODY = 1 << 20


def build_admin(service: Service, tokens: TokenFile) -> FastAPI:
    """Return the app of the admin port."""
    app = FastAPI(title="Paceline runtime admin", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_BearerGate, tokens=tokens)
    install_error_handlers(app)
    app.add_exception_handler(KnobError, _unprocessable)
    app.add_exception_handler(KnobsNotTaken, _not_taken)
    app.add_exception_handler(RevisionConflict, _conflict)
    app.add_exception_handler(NothingToRollBack, _nothing)
    _add_knobs(app, service)
    _add_observe(app, service)
    _add_timeline(app, service)
    _add_drain(app, service)
    add_lab(app, service.settings.served_model_name)
    return app


class _BearerGate:
    """Lets nothing through without a token but the Lab's page, which asks for one."""

    def __init__(self, app: ASGIApp, tokens: TokenFile) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{LAB}/") or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the admin API needs 'Authorization: Bearer TOKEN'", code="unauthorized")
        await JSONResponse(error_body(error), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        return self._tokens.accepts(Request(scope).headers.get("authorization", ""))


def _add_knobs(app: FastAPI, service: Service) -> None:
    @app.get("/admin/knobs")
    async def read() -> Response:
        """Values in force, and how far changes have come."""
        return _knobs_answer(service)

    @app.patch("/admin/knobs")
    async def change(request: Request) -> Response:
        """Change some knobs at once: 409 if somebody else was faster, 422 with the bounds for bad values."""
        patch = await _patch(request)
        return await _carry_out(service, service.knobs.patch(patch, _if_match(request)), sorted(patch.knobs))

    @app.post("/admin/knobs/rollback")
    async def rollback(request: Request) -> Response:
        """Take the last change back."""
        body = await _json(request, default={})
        fencing = body.get("fencing", 0) if isinstance(body, dict) else None
        if not isinstance(fencing, int) or isinstance(fencing, bool):
            raise invalid("the body may hold 'fencing', a whole number, and nothing else")
        return await _carry_out(service, service.knobs.rollback(fencing, _if_match(request)), ["rollback"])


async def _carry_out(service: Service, change: KnobChange, what: list[str]) -> Response:
    log_event("knobs_changed", revision=change.revision, knobs=",".join(what))
    service.client.set_knobs(change)
    await service.client.wait_applied(change.revision, APPLY_SECONDS)
    return _knobs_answer(service)


def _knobs_answer(service: Service) -> Response:
    document = service.knobs.document(service.client.instance)
    return JSONResponse(to_json(document), headers={"ETag": f'"{document.revision}"'})


async def _patch(request: Request) -> KnobsPatch:
    try:
        return from_json(KnobsPatch, await _json(request))
    except FormatError as error:
        raise ApiError(422, str(error), code="invalid_body") from None


async def _json(request: Request, default: Any = None) -> Any:
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="body_too_large")
    if not raw and default is not None:
        return default
    try:
        body = json.loads(raw)
        # Python also reads NaN, 1e999 and half a surrogate pair, which no answer could repeat
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body isn't valid JSON: {error}", code="invalid_json") from None


def _if_match(request: Request) -> int | None:
    """Return the revision that the client believes in; `*` and no header match any."""
    text = request.headers.get("if-match", "*").strip()
    if text == "*":
        return None
    number = text.removeprefix("W/").strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise invalid('If-Match must be a revision from an ETag, as in "3"')
    return int(number)


def _add_observe(app: FastAPI, service: Service) -> None:
    def state() -> ObserveState:
        client, recorder = service.client, service.recorder
        return ObserveState(
            instance=client.instance,
            now=time.time(),
            epoch=service.knobs.epoch,
            revision=service.knobs.revision,
            gauges=client.gauges,
            step_model=client.step_model,
            unfinished=[recorder.record(s, None, "unfinished") for s in client.live.values()],
        )

    @app.get("/admin/observe")
    async def observe(since: int = Query(0, ge=0), instance: str | None = None) -> Response:
        """What is new since a cursor: requests, steps, gauges, the step-time model."""
        document = service.log.read(since, instance, state())
        # 5,000 records take 0.1 s to encode: on a thread, so that no stream stutters when the operator looks
        body = await asyncio.to_thread(lambda: json.dumps(to_json(document), separators=(",", ":")))
        return Response(body, media_type="application/json")


def _add_timeline(app: FastAPI, service: Service) -> None:
    @app.get("/admin/timeline")
    async def timeline(since: int = Query(0, ge=0), limit: int = Query(200, ge=1, le=STEPS_KEPT)) -> Response:
        """The last steps with who was in them; recorded while somebody looks, so the first look finds none."""
        recorder = service.recorder
        service.client.watch_timeline(WATCH_SECONDS)
        to_unix = time.time() - time.monotonic()
        cursor = recorder.timeline.cursor
        steps = recorder.timeline.read(since if since <= cursor else 0, limit, recorder.names, to_unix)
        document = TimelineDocument(service.client.instance, cursor, time.time(), WATCH_SECONDS, steps)
        body = await asyncio.to_thread(lambda: json.dumps(to_json(document), separators=(",", ":")))
        return Response(body, media_type="application/json")


def _add_drain(app: FastAPI, service: Service) -> None:
    @app.post("/admin/drain", status_code=202)
    async def drain() -> dict[str, Any]:
        """Stop taking new work, as SIGTERM does, but go on living."""
        service.drain.begin()
        return {"phase": service.drain.phase.value, "inFlight": service.drain.in_flight}


async def _unprocessable(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KnobError)
    body = error_body(ApiError(422, str(error), code="invalid_knobs"))
    body["error"]["violations"] = [
        {"field": v.field, "value": v.value, "bound": v.bound, "remedy": v.remedy} for v in error.violations
    ]
    return JSONResponse(body, 422)


async def _not_taken(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(ApiError(422, str(error), code="knobs_not_taken")), 422)


async def _conflict(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RevisionConflict)
    body = error_body(ApiError(409, str(error), code="revision_conflict"))
    body["error"]["revision"] = error.current_revision
    return JSONResponse(body, 409, {"ETag": f'"{error.current_revision}"'})


async def _nothing(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(ApiError(409, str(error), code="nothing_to_roll_back")), 409)

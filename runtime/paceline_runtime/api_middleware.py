"""What surrounds every public request: its id, its size and type, its place in the drain. Plain ASGI, so streams pass."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_runtime.api_errors import ApiError, error_body
from paceline_runtime.drain import Drain, DrainPhase

__all__ = ["WorkGate", "request_id"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # safe in headers and log lines


class WorkGate:
    """Wraps the app: every answer carries `X-Request-Id`, while draining also `Connection: close`.

    Work (`POST /v1/…`) is counted as in flight, must be JSON and at most `max_body` bytes.
    """

    def __init__(self, app: ASGIApp, drain: Drain, max_body: int) -> None:
        self._app = app
        self._drain = drain
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity
        is_work = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        answer = self._marked(send, identity)
        if not is_work:
            await self._app(scope, receive, answer)
            return
        if (error := self._refusal(headers)) is not None:
            await JSONResponse(error_body(error), error.status, {"Connection": "close"})(scope, receive, answer)
            return
        self._drain.enter()
        try:
            await self._app(scope, self._limited(receive), answer)
        finally:
            self._drain.leave()

    def _refusal(self, headers: Headers) -> ApiError | None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            text = f"the body must be JSON with 'Content-Type: application/json', not {kind[:100]!r}"
            return ApiError(415, text, code="unsupported_media_type")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """A chunked body doesn't say its size before: count it."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return limited

    def _marked(self, send: Send, identity: str) -> Send:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identity
                if self._drain.phase is not DrainPhase.SERVING:
                    headers["Connection"] = "close"
            await send(message)

        return marked


def request_id(scope: Any) -> str:
    """Return the id that `WorkGate` gave this request."""
    return str(scope["state"]["request_id"])

"""What surrounds every public request: its id, its size and type, its place in the drain. Plain ASGI, so streams pass.

A client that doesn't read, or doesn't send what it began, is given up: it must hold nobody else's memory or place.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_runtime.api_errors import ApiError, error_body
from paceline_runtime.drain import Drain, DrainPhase
from paceline_runtime.http_protocol import abort_connection, may_wait
from paceline_runtime.logs import log_event

__all__ = ["WorkGate", "leaving_cause", "request_id"]

BODY_SECONDS = 30.0  # between two pieces of a body
LINGER_SECONDS = 10.0  # for a body that nobody wants to arrive

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # safe in headers and log lines


class WorkGate:
    """Wraps the app: every answer carries `X-Request-Id`, while draining also `Connection: close`.

    Work (`POST /v1/…`) is counted as in flight, must be JSON and at most `max_body` bytes. A client may take `read_timeout`
    seconds until it reads on.
    """

    def __init__(self, app: ASGIApp, drain: Drain, max_body: int, read_timeout: float) -> None:
        self._app = app
        self._drain = drain
        self._max_body = max_body
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity
        is_work = scope["method"] == "POST" and scope["path"].startswith(("/v1/", "/tokenize", "/detokenize"))
        answer = self._answer(send, scope, identity)
        if not is_work:
            await self._app(scope, receive, answer)
            return
        if (error := self._refusal(headers)) is not None:
            await self._turn_away(error, receive, answer)
            return
        self._drain.enter()
        try:
            await self._app(scope, self._limited(receive), answer)
        finally:
            self._drain.leave()

    async def _turn_away(self, error: ApiError, receive: Receive, send: Send) -> None:
        """Answer before the body has come, then read what is on its way: a connection that is closed on unread bytes is
        reset, and many clients send all of a body before they look for an answer.
        """
        response = JSONResponse(error_body(error), error.status, {"Connection": "close"})
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})

    def _refusal(self, headers: Headers) -> ApiError | None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            text = f"the body must be JSON with 'Content-Type: application/json', not {kind[:100]!r}"
            return ApiError(415, text, code="unsupported_media_type")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            text = f"the body must be sent as it is, without 'Content-Encoding: {coding[:100]}'"
            return ApiError(415, text, code="unsupported_content_encoding")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """A chunked body doesn't say its size before: count it."""
        seen, whole = 0, False

        async def limited() -> Message:
            nonlocal seen, whole
            try:
                async with asyncio.timeout(None if whole else BODY_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body didn't come", {"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                await _discard(receive)
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return limited

    def _answer(self, send: Send, scope: Scope, identity: str) -> Send:
        """Wait for a client that reads slowly (its connection buffers some 64 KiB), but not for one that doesn't read."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(message, identity)
            if not may_wait(scope):  # nearly always: a timer for each token would cost half as much as sending it
                await send(message)
                return
            try:
                async with asyncio.timeout(self._read_timeout):
                    await send(message)
            except TimeoutError:
                scope["state"]["leaving_cause"] = "slow_reader"
                log_event("slow_reader", request_id=request_id(scope), seconds=self._read_timeout)
                abort_connection(scope)  # from here on it is a client that has left

        return answer

    def _mark(self, start: Message, identity: str) -> None:
        headers = MutableHeaders(scope=start)
        headers["X-Request-Id"] = identity
        if self._drain.phase is not DrainPhase.SERVING:
            headers["Connection"] = "close"


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def leaving_cause(scope: Scope) -> str:
    """Return in a word why a request's client is gone."""
    return str(scope.get("state", {}).get("leaving_cause", "client"))


def request_id(scope: Any) -> str:
    """Return the id that `WorkGate` gave this request."""
    return str(scope["state"]["request_id"])

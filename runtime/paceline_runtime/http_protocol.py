"""uvicorn's HTTP protocol with what it lacks for the open Internet: bounded request heads, in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline_runtime.api_errors import ApiError, error_body

__all__ = ["HEAD_SECONDS", "MAX_HEAD_BYTES", "BoundedHttp", "abort_connection", "may_wait"]

MAX_HEAD_BYTES = 64 << 10  # request line and headers; proxies allow 8 to 64 KiB
HEAD_SECONDS = 30.0  # for a whole head, so that connections that trickle don't pile up
_WORDS = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"the request line and the headers are larger than {MAX_HEAD_BYTES} bytes",
    HTTPStatus.REQUEST_TIMEOUT: f"the headers didn't come within {HEAD_SECONDS:g} s",
}
_ABORT, _FLOW = "paceline_abort", "paceline_flow"


class BoundedHttp(HttpToolsProtocol):
    """Refuses heads that are too large (431) or take too long (408), and lets the app abort a connection."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected; it has to say what it wants soon."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it in the same way
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"] |= {_ABORT: self.transport.abort, _FLOW: self.flow}
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole: what comes next is another head."""
        self._in_head = True
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._head_bytes:  # who never said anything, a pool that connects in advance, doesn't expect an answer either
            self._end_with(status, _WORDS[status])
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what isn't HTTP as the app answers what it doesn't understand."""
        self._end_with(HTTPStatus.BAD_REQUEST, msg)

    def _end_with(self, status: HTTPStatus, words: str) -> None:
        body = msgspec.json.encode(error_body(ApiError(status.value, words, code="http_error")))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def abort_connection(scope: Mapping[str, Any]) -> None:
    """Close a request's connection without waiting for the client to read what is still to be sent."""
    abort: Callable[[], None] | None = scope.get("state", {}).get(_ABORT)
    if abort is not None:
        abort()


def may_wait(scope: Mapping[str, Any]) -> bool:
    """Return whether sending on a request's connection may wait for its client: its buffer is full, or nobody knows."""
    flow: FlowControl | None = scope.get("state", {}).get(_FLOW)
    return flow is None or flow.write_paused

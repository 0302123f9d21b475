"""uvicorn's HTTP protocol with what it lacks for the open Internet: bounded request heads, in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_SECONDS", "MAX_HEAD_BYTES", "BoundedHttp", "abort_connection", "may_wait"]

MAX_HEAD_BYTES = 64 << 10  # request line and headers; proxies allow 8 to 64 KiB
HEAD_SECONDS = 30.0  # for a whole head, so that connections that trickle don't pile up
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
            text = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(text.encode())
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

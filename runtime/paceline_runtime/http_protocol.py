"""uvicorn's HTTP protocol with what it lacks for the open Internet: bounded request heads, in size and in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline_runtime.api_errors import ApiError, error_body
from paceline_runtime.logs import log_event

__all__ = ["HEAD_SECONDS", "MAX_HEAD_BYTES", "BoundedHttp", "abort_connection", "may_wait"]

MAX_HEAD_BYTES = 64 << 10  # request line and headers; proxies allow 8 to 64 KiB
HEAD_SECONDS = 30.0  # for a whole head, so that connections that trickle don't pile up
_WORDS = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"the request line and the headers are larger than {MAX_HEAD_BYTES} bytes",
    HTTPStatus.REQUEST_TIMEOUT: f"the headers didn't come within {HEAD_SECONDS:g} s",
}
_ABORT, _FLOW = "paceline_abort", "paceline_flow"


class BoundedHttp(HttpToolsProtocol):
    """Refuses heads that are too large (431) or take too long (408), and lets the app abort a connection.

    Stays with HTTP/1.1 where a client offers another protocol, as Java's and curl's do with HTTP/2.
    """

    _head_bytes = 0
    _in_head = True
    _replaying = False
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
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._stay(data[offer.args[0] :])
        except httptools.HttpParserError:
            log_event("not_http", level=logging.WARNING)
            self._end_with(HTTPStatus.BAD_REQUEST, "this isn't HTTP/1.1, or not valid")
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._replaying:
            return
        super().on_message_begin()
        self.scope["state"] |= {_ABORT: self.transport.abort, _FLOW: self.flow}
        if self._timer is None:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self._replaying:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._replaying:
            return
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole: what comes next is another head."""
        if self.parser.should_upgrade() and self._body_framing():
            return  # it isn't: the parser takes the body for something in the protocol that was offered
        self._in_head = True
        super().on_message_complete()

    def _body_framing(self) -> list[bytes]:
        """Return the lines of the head that say how long its body is; none without a body."""
        return [
            b"%s: %s\r\n" % (name, value)
            for name, value in self.headers
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 "))
        ]

    def _stay(self, rest: bytes) -> None:
        """Read on after a head that offered another protocol: `rest` is still HTTP/1.1, its body first if there is one.

        A new parser gets a head with a body of that length.
        """
        if framing := self._body_framing():
            self.parser = httptools.HttpRequestParser(self)
            self._replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
            self._replaying = False
        if rest:
            self.data_received(rest)

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

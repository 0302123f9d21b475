"""A TCP balancer for one port of one Service: listens on the Service's address, passes bytes to a ready pod.

Without a ready pod the port is closed, so that a client gets "connection refused" (as from kube-proxy) instead of silence.
Connections to a pod that goes away live on until one side closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import Counter

from paceline_local.endpoints import Backend, order

__all__ = ["Balancer"]

log = logging.getLogger(__name__)
_CONNECT_S = 3.0
_BACKLOG = 1024
_CHUNK = 1 << 16


class Balancer:
    """Balances one address and port over backends that may change at any time."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._backends: tuple[Backend, ...] = ()
        self._server: asyncio.Server | None = None
        self._open: Counter[Backend] = Counter()
        self._turn = 0

    async def set_backends(self, backends: tuple[Backend, ...]) -> None:
        """Take new backends; listen while there are any. Raises OSError if the address can't be bound."""
        self._backends = backends
        if backends and self._server is None:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, backlog=_BACKLOG)
            log.info("listening on %s:%d", self._host, self._port)
        elif not backends:
            self.close()

    def close(self) -> None:
        """Stop listening. Open connections go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            _reset(writer)
            return
        backend, up_reader, up_writer = upstream
        try:
            await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
        finally:
            self._release(backend)
            up_writer.close()
            writer.close()

    async def _connect(self) -> tuple[Backend, asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the best backend that answers. A refused connection carried no byte, so trying the next is safe."""
        self._turn += 1
        for backend in order(self._backends, self._open, self._turn):
            self._open[backend] += 1  # before the connection stands: many may be under way at once
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(backend.host, backend.port)
                return backend, reader, writer
            except (OSError, TimeoutError) as error:
                self._release(backend)
                log.info("%s:%d doesn't accept, trying the next: %s", backend.host, backend.port, error)
        return None

    def _release(self, backend: Backend) -> None:
        self._open[backend] -= 1
        if not self._open[backend]:
            del self._open[backend]  # pods come and go, each with an address of its own


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until the reader's side has sent its last, then say so to the other side."""
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (ConnectionError, OSError):
        _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection so that the other side sees an error: a clean end would look like a complete answer."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it may be closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

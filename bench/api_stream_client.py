"""Streams that cost the client next to nothing while they run: bytes and when they came, which are read afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

_EVENT = re.compile(rb"data: (.*?)\n\n")
_CUT = "\N{REPLACEMENT CHARACTER}"  # what the end of a sequence makes of a character that isn't whole
_LAST = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shown:
    """A piece of text that a client saw: when (Unix seconds), and the sequence's tokens (bytes of text) up to its end."""

    at: float
    token: int


class Stream(asyncio.Protocol):
    """One connection with one request; `ended` is done when the answer is whole."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._data: list[bytes] = []
        self._times: list[float] = []
        self._tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)  # uvloop's is one without being a subclass

    def data_received(self, data: bytes) -> None:
        self._times.append(time.time())
        self._data.append(data)
        self._tail = self._tail[-len(_LAST) :] + data  # the end may come in two reads
        if _LAST in self._tail and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream broke off"))

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield each event and when it had come whole."""
        ends, total = [], 0
        for piece in self._data:
            total += len(piece)
            ends.append(total)
        for found in _EVENT.finditer(b"".join(self._data)):
            if found[1] != b"[DONE]":
                yield self._times[bisect_left(ends, found.end())], json.loads(found[1])

    def shown(self) -> Iterator[Shown]:
        """Yield every character that was shown; a clock's token is a byte: a character's last byte is what completed it."""
        token = -1
        for at, event in self.events():
            for choice in event["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                for character in text.removesuffix(_CUT):
                    token += len(character.encode())
                    yield Shown(at, token)

    @property
    def chunks(self) -> int:
        """How many events there were."""
        return sum(1 for _ in self.events())


def request_of(path: str, body: dict[str, Any], identity: str) -> bytes:
    """Return a whole HTTP request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {identity}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def run_streams(port: int, requests: list[bytes], seconds: float) -> list[Stream]:
    """Send all requests at once, each on a connection of its own, and wait until all have their whole answer."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda r=request: Stream(r), "127.0.0.1", port) for request in requests]
    streams = [protocol for _, protocol in made]
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(stream.ended for stream in streams))
    finally:
        for transport, _ in made:
            transport.close()
    return streams

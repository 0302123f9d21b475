"""The last request records, in memory that is taken at start: a server's size doesn't grow with the requests it has served.

As objects a record with a hundred prefix hashes takes 5 kB in a hundred pieces; written out it is some 1.2 kB in one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import msgspec

from paceline_core.wire import RequestRecord

__all__ = ["RequestRing"]

_decode = msgspec.msgpack.Decoder(RequestRecord).decode
_encode = msgspec.msgpack.Encoder().encode


class RequestRing:
    """Records under rising numbers in `size` bytes, at most `most` of them: a new one takes the place of the oldest."""

    def __init__(self, size: int, most: int) -> None:
        self._bytes = bytearray(b"\1") * size  # written once, so that it is resident: zeros would be a promise of the kernel
        self._places: deque[tuple[int, int, int]] = deque()  # number, first byte, end
        self._most = most
        self._at = 0
        self.lost_until = 0

    def append(self, number: int, record: RequestRecord) -> None:
        """Keep a record; one larger than the ring is lost at once."""
        data = _encode(record)
        if len(data) > len(self._bytes):
            self._clear()
            self.lost_until = number
            return
        if self._at + len(data) > len(self._bytes):
            self._drop(self._at, len(self._bytes))
            self._at = 0
        self._drop(self._at, self._at + len(data))
        while len(self._places) >= self._most:
            self._drop_first()
        self._bytes[self._at : self._at + len(data)] = data
        self._places.append((number, self._at, self._at + len(data)))
        self._at += len(data)

    def after(self, cursor: int) -> Iterator[tuple[int, RequestRecord]]:
        """Yield the records after `cursor`, oldest first: walks back from the newest, so a short poll is cheap."""
        fresh = list(itertools.takewhile(lambda place: place[0] > cursor, reversed(self._places)))
        view = memoryview(self._bytes)
        return ((number, _decode(view[start:end])) for number, start, end in reversed(fresh))

    def _drop(self, start: int, end: int) -> None:
        """Forget the oldest records as far as they lie in [start, end): what lies there is older than all before it."""
        while self._places and start <= self._places[0][1] < end:
            self._drop_first()

    def _drop_first(self) -> None:
        self.lost_until = self._places.popleft()[0]

    def _clear(self) -> None:
        while self._places:
            self._drop_first()

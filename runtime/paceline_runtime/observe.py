"""What the operator may read of a server: the last requests and steps, in rings of fixed size under one cursor."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from paceline_core.wire import Gauges, ObserveDocument, RequestRecord, StepModelDocument, StepRecord
from paceline_runtime.record_ring import RequestRing

__all__ = ["ObserveLog", "ObserveState", "prefix_hashes"]

REQUESTS_KEPT = 8192
REQUEST_BYTES = 8 << 20  # some 7,000 requests with prompts of 1,500 tokens; taken at start
STEPS_KEPT = 32_768  # 5 minutes at 100 steps/s; 2.6 MB, taken at start
PAGE = 5000  # records in one answer: about 1 MB of JSON
_STEP_FIELDS = tuple(spec.name for spec in fields(StepRecord))  # two times, then counts
_WIDTH = 1 + len(_STEP_FIELDS)
_HASH_BYTES = 6  # below 2^53, so that every JSON reader keeps it exact


class _StepRing:
    """The last steps as plain numbers in one block of memory: as objects they would take five times as much."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = array("d", bytes(8 * size * _WIDTH))
        self._count = 0
        self.lost_until = 0

    def append(self, number: int, record: StepRecord) -> None:
        """Keep a step, in place of the oldest."""
        at = self._count % self._size * _WIDTH
        if self._count >= self._size:
            self.lost_until = int(self._values[at])
        self._values[at : at + _WIDTH] = array("d", (number, *(getattr(record, name) for name in _STEP_FIELDS)))
        self._count += 1

    def after(self, cursor: int) -> Iterator[tuple[int, StepRecord]]:
        """Yield the steps after `cursor`, oldest first."""
        first = max(0, self._count - self._size)
        low = bisect_right(range(first, self._count), cursor, key=self._number_of) + first
        return ((self._number_of(index), self._record(index)) for index in range(low, self._count))

    def _number_of(self, index: int) -> int:
        return int(self._values[index % self._size * _WIDTH])

    def _record(self, index: int) -> StepRecord:
        at = index % self._size * _WIDTH
        end, duration, *counts = self._values[at + 1 : at + _WIDTH]
        return StepRecord(end, duration, *map(int, counts))


@dataclass(frozen=True, slots=True)
class ObserveState:
    """The server at the moment of an answer; `unfinished` are the requests that are still here."""

    instance: str
    now: float
    epoch: int
    revision: int
    gauges: Gauges
    step_model: StepModelDocument | None
    unfinished: Sequence[RequestRecord]


class ObserveLog:
    """Collects records; `read` answers `GET /admin/observe`."""

    def __init__(self) -> None:
        self._requests = RequestRing(REQUEST_BYTES, REQUESTS_KEPT)
        self._steps = _StepRing(STEPS_KEPT)
        self._last = 0

    def add_request(self, record: RequestRecord) -> None:
        """Keep a request that has ended."""
        self._last += 1
        self._requests.append(self._last, record)

    def add_step(self, record: StepRecord) -> None:
        """Keep a step."""
        self._last += 1
        self._steps.append(self._last, record)

    def read(self, since: int, instance: str | None, now: ObserveState) -> ObserveDocument:
        """Return up to `PAGE` records after the cursor `since`; an unknown cursor or instance starts from the oldest."""
        if since > self._last or (instance is not None and instance != now.instance):
            since = 0
        merged = heapq.merge(self._requests.after(since), self._steps.after(since), key=lambda item: item[0])
        page = list(itertools.islice(merged, PAGE))
        at_end = len(page) < PAGE
        requests = tuple(r for _, r in page if isinstance(r, RequestRecord))
        return ObserveDocument(
            instance=now.instance,
            cursor=page[-1][0] if page else since,
            now=now.now,
            epoch=now.epoch,
            revision=now.revision,
            gauges=now.gauges,
            requests=requests + (tuple(now.unfinished) if at_end else ()),
            steps=tuple(r for _, r in page if isinstance(r, StepRecord)),
            step_model=now.step_model,
            truncated=0 < since < max(self._requests.lost_until, self._steps.lost_until),
        )


def prefix_hashes(tokens: Sequence[int], block_size: int, key: bytes) -> tuple[int, ...]:
    """Return a keyed hash for each full block of a prompt, chained, so that equal prefixes show and texts don't."""
    hashes: list[int] = []
    parent = b""
    ids = array("I", tokens)
    for end in range(block_size, len(ids) + 1, block_size):
        parent = hashlib.blake2b(parent + ids[end - block_size : end].tobytes(), digest_size=_HASH_BYTES, key=key).digest()
        hashes.append(int.from_bytes(parent, sys.byteorder))
    return tuple(hashes)

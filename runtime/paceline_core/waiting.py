"""Requests that wait for admission, in the order of the strategy in force."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from paceline_core.sequence import SequenceState, Stage

__all__ = ["OrderKey", "WaitingQueue"]

OrderKey = Callable[[SequenceState], tuple[float, ...]]

# Under strict priorities a steady stream of urgent work would keep the rest waiting for ever; after this long (seconds)
# the oldest goes next whatever its priority.
PATIENCE = 60.0


class WaitingQueue:
    """A heap with lazy deletion, so that any request can leave in O(1), and the order of arrival beside it."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, SequenceState]] = []
        self._tickets = 0
        self._arrivals: deque[SequenceState] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        return (seq for _, ticket, seq in self._heap if seq.ticket == ticket and seq.stage is Stage.WAITING)

    def push(self, seq: SequenceState) -> None:
        """Add a waiting sequence (new or preempted)."""
        self._tickets += 1
        seq.ticket = self._tickets  # an entry left from an earlier wait of the same sequence is void
        heapq.heappush(self._heap, (self._key(seq), seq.ticket, seq))
        if not seq.preemptions:
            self._arrivals.append(seq)
        self._size += 1
        if len(self._heap) > 2 * self._size + 64:
            self.reorder(self._key)

    def left(self) -> None:
        """Note that one of the waiting sequences has changed its stage."""
        self._size -= 1

    def reorder(self, key: OrderKey) -> None:
        """Order by another key from now on."""
        self._key = key
        self._heap = [(key(seq), seq.ticket, seq) for seq in self]
        heapq.heapify(self._heap)

    def first(self, now: float) -> SequenceState | None:
        """Return who goes next, without removing it: the first by key, unless the oldest has lost its patience."""
        best = self._best()
        if best is None:
            return None
        oldest = self.oldest()
        if oldest is not None and oldest.priority > best.priority and now >= oldest.request.arrival + PATIENCE:
            oldest.priority = best.priority  # also as a victim it counts as what it goes before
            return oldest
        return best

    def oldest(self) -> SequenceState | None:
        """Return the one that waits since the earliest arrival and never ran."""
        while self._arrivals and self._arrivals[0].stage is not Stage.WAITING:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None

    def _best(self) -> SequenceState | None:
        while self._heap:
            _, ticket, seq = self._heap[0]
            if seq.ticket == ticket and seq.stage is Stage.WAITING:
                return seq
            heapq.heappop(self._heap)
        return None

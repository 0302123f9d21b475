"""Requests that wait for admission, in the order of the strategy in force."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from paceline_core.sequence import SequenceState, Stage

__all__ = ["OrderKey", "WaitingQueue"]

OrderKey = Callable[[SequenceState], tuple[float, ...]]

# Under strict priorities and deadlines a steady stream of urgent work would keep the rest waiting for ever. Who has waited
# this long (seconds) goes next whatever its priority, but only once in so many admissions: in a long backlog everybody has
# waited, and there the urgent still go first.
PATIENCE = 60.0
TURN = 8


class WaitingQueue:
    """A heap with lazy deletion, so that any request can leave in O(1), and the order of arrival beside it."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, SequenceState]] = []
        self._tickets = 0
        self._arrivals: deque[SequenceState] = deque()
        self._size = 0
        self._since_patient = TURN  # admissions since one went out of turn

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        return (seq for _, ticket, seq in self._heap if seq.ticket == ticket and seq.stage is Stage.WAITING)

    def push(self, seq: SequenceState, *, patient: bool = False) -> None:
        """Add a waiting sequence (new or preempted); `patient` ones count as waiting since their arrival, as new ones do."""
        self._enter(seq)
        self._size += 1
        if patient or not seq.preemptions:
            self._arrive(seq)
        if len(self._heap) > 2 * self._size + 64:
            self.reorder(self._key)

    def dropped(self) -> None:
        """Note that one of the waiting sequences has ended."""
        self._size -= 1

    def admitted(self, seq: SequenceState) -> None:
        """Note that `seq`, which `first` returned, runs now."""
        self._size -= 1
        self._since_patient = 0 if seq.out_of_turn else self._since_patient + 1
        seq.out_of_turn = False

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
        if oldest is None or oldest.request.seq_id >= best.request.seq_id:  # always so where the first come goes first
            return best
        if self._since_patient < TURN or now < oldest.request.arrival + PATIENCE:
            return best
        oldest.out_of_turn = True
        if oldest.priority > best.priority:
            oldest.priority = best.priority  # also as a victim it counts as what it goes before
            self._enter(oldest)  # and in the queue: else what makes way for it would come back before it, for ever
        return oldest

    def first_may_change(self) -> bool:
        """Return whether time alone may change who goes next: somebody older stands behind the first."""
        best, oldest = self._best(), self.oldest()
        return best is not None and oldest is not None and oldest.request.seq_id < best.request.seq_id

    def oldest(self) -> SequenceState | None:
        """Return the one that waits since the earliest arrival and never ran."""
        while self._arrivals and self._arrivals[0].stage is not Stage.WAITING:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None

    def _enter(self, seq: SequenceState) -> None:
        """Give a waiting sequence its place; an entry left from an earlier wait or another priority is void."""
        self._tickets += 1
        seq.ticket = self._tickets
        heapq.heappush(self._heap, (self._key(seq), seq.ticket, seq))

    def _arrive(self, seq: SequenceState) -> None:
        """Note an arrival; behind one that waits long, those that came later and left are dropped in bulk."""
        self._arrivals.append(seq)
        if len(self._arrivals) > 2 * self._size + 64:
            self._arrivals = deque(s for s in self._arrivals if s.stage is Stage.WAITING)

    def _best(self) -> SequenceState | None:
        while self._heap:
            _, ticket, seq = self._heap[0]
            if seq.ticket == ticket and seq.stage is Stage.WAITING:
                return seq
            heapq.heappop(self._heap)
        return None

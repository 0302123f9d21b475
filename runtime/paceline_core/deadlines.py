"""Work that can no longer be in time: found when the last moment to start it has passed, in O(log n)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from paceline_core.sequence import SequenceState, Stage

__all__ = ["DeadlineWatch"]

BestCase = Callable[[int, int], float]


class DeadlineWatch:
    """Requests with a deadline and without a first token, by the latest time at which their rest could be started."""

    def __init__(self, best_case: BestCase) -> None:
        self._best_case = best_case
        self._heap: list[tuple[float, int, SequenceState]] = []
        self._count = itertools.count()

    def watch(self, sequences: Iterable[SequenceState]) -> None:
        """Start watching those of `sequences` that have a deadline."""
        for seq in sequences:
            if seq.request.deadline is not None and seq.first_token is None:
                heapq.heappush(self._heap, (self._latest_start(seq), next(self._count), seq))

    def next_time(self) -> float | None:
        """Return when the next request becomes hopeless if it isn't started by then."""
        while self._heap and self._is_settled(self._heap[0][2]):
            heapq.heappop(self._heap)
        return math.nextafter(self._heap[0][0], math.inf) if self._heap else None  # at that very moment it may still start

    def hopeless(self, now: float) -> list[SequenceState]:
        """Return, and stop watching, those that can't make their deadline even if the engine did nothing else."""
        found: list[SequenceState] = []
        while self._heap and self._heap[0][0] < now:
            _, _, seq = heapq.heappop(self._heap)
            if self._is_settled(seq):
                continue
            latest = self._latest_start(seq)  # progress since it was pushed leaves more time
            if latest < now:
                found.append(seq)
            else:
                heapq.heappush(self._heap, (latest, next(self._count), seq))
        return found

    def _latest_start(self, seq: SequenceState) -> float:
        assert seq.request.deadline is not None, "only sequences with a deadline are watched"
        return seq.request.deadline - self._best_case(seq.known - seq.computed, seq.computed)

    @staticmethod
    def _is_settled(seq: SequenceState) -> bool:
        return seq.stage is Stage.ENDED or seq.first_token is not None or seq.awaits_sample

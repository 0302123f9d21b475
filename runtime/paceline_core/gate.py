"""Where results wait: static and dynamic batching give a batch's results back together, the others one by one."""

from __future__ import annotations

from paceline_core.request import Ended, FinishReason
from paceline_core.sequence import SequenceState

__all__ = ["ResultGate"]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


class ResultGate:
    """Counts the live members of the batch that runs and holds the results of those that have ended."""

    def __init__(self) -> None:
        self._batch = 0
        self._live = 0
        self._held: list[SequenceState] = []
        self._out: list[Ended] = []

    @property
    def is_open(self) -> bool:
        """True while a batch runs."""
        return self._live > 0

    def join(self, seq: SequenceState) -> None:
        """Make `seq` a member of the batch that runs (or begins with it)."""
        seq.batch = self._batch
        self._live += 1

    def is_member(self, seq: SequenceState) -> bool:
        """Return whether `seq` belongs to the batch that runs."""
        return seq.batch == self._batch

    def end(self, seq: SequenceState, now: float) -> None:
        """Take an ended sequence: a member's result waits for its batch, unless nobody waits for the result."""
        if not self.is_member(seq):
            self._out.append(seq.ended(now))
            return
        self._live -= 1
        if seq.reason in _NATURAL:
            self._held.append(seq)
        else:
            self._out.append(seq.ended(now))
        if not self._live:
            self.dissolve(now)

    def dissolve(self, now: float) -> None:
        """Give the held results back and forget the batch: its members are free of each other."""
        self._out.extend(seq.ended(now) for seq in self._held)
        self._held.clear()
        self._live = 0
        self._batch += 1

    def take(self) -> list[Ended]:
        """Return the results given back since the last call."""
        out, self._out = self._out, []
        return out

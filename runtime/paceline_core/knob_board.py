"""The knobs in force, the change that waits for the next step boundary, and the way back."""

from __future__ import annotations

from dataclasses import replace

from paceline_core.errors import PacelineError
from paceline_core.knobs import Knobs

__all__ = ["KnobBoard"]


class KnobBoard:
    """A change is validated whole (a `Knobs` can't be built otherwise), applied at once and counted by epoch.

    Restart-class knobs size what is already built, so they keep the value that this process started with.
    """

    def __init__(self, knobs: Knobs, first_epoch: int = 0) -> None:
        self.knobs = knobs
        self.epoch = first_epoch
        self._pending: Knobs | None = None
        self._newest = first_epoch
        self._previous: Knobs | None = None

    @property
    def is_pending(self) -> bool:
        """True while a change waits for the next step boundary."""
        return self._pending is not None

    def propose(self, knobs: Knobs) -> int:
        """Put a change in line for the next step boundary; return its epoch. Raises `KnobError` if it can't run here."""
        self._pending = replace(knobs, max_num_seqs_limit=self.knobs.max_num_seqs_limit, block_size=self.knobs.block_size)
        self._newest += 1
        return self._newest

    def rollback(self) -> int:
        """Put the setting before the last change in line; return its epoch. A rollback can be rolled back too.

        A change that isn't in force yet is dropped. Raises `PacelineError` if there is nothing to go back to.
        """
        if self._pending is not None:
            return self.propose(self.knobs)
        if self._previous is None:
            raise PacelineError("no earlier setting to roll back to: the knobs were never changed")
        return self.propose(self._previous)

    def apply(self) -> Knobs | None:
        """At a step boundary: put the waiting change in force and return what was in force before, or None."""
        if self._pending is None:
            return None
        before, self.knobs, self._pending = self.knobs, self._pending, None
        self.epoch = self._newest
        if before != self.knobs:
            self._previous = before
        return before

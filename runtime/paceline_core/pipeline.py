"""The plans in flight: at most two, one that runs and one that is prepared; they complete in order."""

from __future__ import annotations

from collections import deque

from paceline_core.plan import StepPlan
from paceline_core.sequence import SequenceState

__all__ = ["Pipeline"]


class Pipeline:
    """Plans in flight with the states behind their entries, and how well the slots of completed steps were used."""

    def __init__(self, depth: int) -> None:
        assert depth in (1, 2), "at most two plans are in flight"
        self.next_step = 0
        self.slot_steps = 0
        self.slot_steps_busy = 0
        self._depth = depth
        self._flights: deque[tuple[StepPlan, list[SequenceState], int]] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """True while no further plan may be made."""
        return len(self._flights) >= self._depth

    def launch(self, plan: StepPlan, sequences: list[SequenceState], slots: int) -> None:
        """Add a plan; `slots` is how many sequences it could have had."""
        self.next_step += 1
        self._flights.append((plan, sequences, slots))

    def land(self, plan: StepPlan) -> list[SequenceState]:
        """Remove the oldest plan, which must be `plan`; return the states behind its entries."""
        oldest, sequences, slots = self._flights.popleft()
        assert oldest is plan, f"step {plan.step_id} completes out of order, step {oldest.step_id} is due"
        if sequences:  # a plan that only carries news is no step of the batch
            self.slot_steps += slots
        return sequences

"""The plans in flight: at most two, one that runs and one that is prepared; they complete in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from paceline_core.plan import StepPlan, StepShape
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

    def gauges(self) -> dict[str, int]:
        """Return the counts of `wire.Gauges` that are kept here."""
        return {"slot_steps": self.slot_steps, "slot_steps_busy": self.slot_steps_busy}

    def repeats(self, sequences: Sequence[SequenceState], slots: int) -> bool:
        """Return whether one more plan keeps it full and what is in flight is a decode of just these `sequences`."""
        if len(self._flights) != self._depth - 1:
            return False
        return all(
            not plan.shape.prefill_tokens and len(members) == len(sequences) and had == slots and members == sequences
            for plan, members, had in self._flights
        )

    def skip(self, steps: int, sequences: int, slots: int) -> StepPlan | None:
        """Count `steps` more steps of as many `sequences`; move the plan in flight ahead, and return it."""
        self.next_step += steps
        self.slot_steps_busy += steps * sequences
        self.slot_steps += steps * slots
        if not self._flights:
            return None
        plan, members, slots = self._flights.pop()
        plan = _later(plan, steps)
        self._flights.append((plan, members, slots))
        return plan


def _later(plan: StepPlan, steps: int) -> StepPlan:
    """Return the decode step that comes `steps` after `plan`, without the news that `plan` carried."""
    shape = plan.shape
    return replace(
        plan,
        step_id=plan.step_id + steps,
        scheduled=tuple(entry._replace(start=entry.start + steps) for entry in plan.scheduled),
        shape=StepShape(shape.decode_tokens, 0, shape.context_tokens + steps * shape.decode_tokens, 0),
        preempted=(),
        preempted_for=(),
        removed=(),
        resize_blocks=None,
    )

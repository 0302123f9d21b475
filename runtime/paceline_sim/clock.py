"""The runner of the twin: it computes nothing, it only knows how long a step would take."""

from __future__ import annotations

from collections import deque

from paceline_core.plan import StepPlan, StepResult
from paceline_core.step_time import StepPredictor

__all__ = ["VirtualRunner"]

_PLACEHOLDER = (0,)  # the one token that each sampling sequence gets


class VirtualRunner:
    """Runs plans in order on a clock of its own: a plan starts when it was submitted and the one before it has ended."""

    def __init__(self, model: StepPredictor) -> None:
        self._model = model
        self._plans: deque[tuple[StepPlan, float, float]] = deque()  # (plan, end, duration)
        self.busy_until = 0.0

    @property
    def next_end(self) -> float | None:
        """When the oldest plan ends, or None if none runs."""
        return self._plans[0][1] if self._plans else None

    @property
    def newest_duration(self) -> float:
        """The seconds of the plan that was submitted last; 0 if none runs."""
        return self._plans[-1][2] if self._plans else 0.0

    def submit(self, plan: StepPlan, now: float) -> None:
        """Take the next plan at time `now`. A plan that only carries news takes no time."""
        duration = self._model.predict(plan.shape) if plan.scheduled else 0.0
        self.busy_until = max(now, self.busy_until) + duration
        self._plans.append((plan, self.busy_until, duration))

    def collect(self) -> tuple[StepPlan, StepResult]:
        """Return the oldest plan and its result; the caller's clock has reached `next_end`."""
        plan, _, duration = self._plans.popleft()
        return plan, StepResult({entry.seq_id: _PLACEHOLDER for entry in plan.scheduled if entry.samples}, duration)

    def skip(self, flying: StepPlan | None, busy_until: float, duration: float) -> None:
        """Be busy until `busy_until`, with `flying`, which takes `duration`, as the only plan (None: with none)."""
        self.busy_until = busy_until
        self._plans.clear()
        if flying is not None:
            self._plans.append((flying, busy_until, duration))

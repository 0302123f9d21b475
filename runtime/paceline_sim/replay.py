"""Replays a trace through the production scheduler under a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_core.knobs import Knobs
from paceline_core.scheduler import Scheduler
from paceline_core.step_time import StepModel
from paceline_sim.clock import VirtualRunner
from paceline_sim.result import Outcome, Result
from paceline_sim.trace import Trace

__all__ = ["simulate"]


def simulate(
    trace: Trace, knobs: Knobs, model: StepModel, *, num_blocks: int, max_model_len: int, pipeline_depth: int = 1
) -> Result:
    """Return what becomes of `trace` under `knobs` on an engine whose steps take what `model` says.

    `num_blocks` sizes the KV pool, `max_model_len` (tokens) bounds a request, `pipeline_depth` is the engine's. Raises
    `RequestRefused` for a request that could never run there.
    """
    scheduler = Scheduler(
        knobs, num_blocks=num_blocks, max_model_len=max_model_len, pipeline_depth=pipeline_depth, step_model=model
    )
    return _Replay(trace, scheduler, VirtualRunner(model)).run()


@dataclass(slots=True)
class _Replay:
    trace: Trace
    scheduler: Scheduler
    runner: VirtualRunner
    arrived: int = 0
    steps: int = 0
    busy: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self) -> Result:
        now = self.trace.requests[0].arrival
        while self.arrived < len(self.trace.requests) or self.scheduler.has_work:
            self._arrive(now)
            while (plan := self.scheduler.schedule(now)) is not None:
                self.runner.submit(plan, now)
            now = self._next_time(now)
            if now == self.runner.next_end:
                self._complete(now)
            self.outcomes.extend(map(Outcome.of, self.scheduler.take_ended()))
        self.outcomes.sort(key=lambda outcome: outcome.index)
        return Result(
            outcomes=tuple(self.outcomes),
            duration=now - self.trace.requests[0].arrival,
            steps=self.steps,
            slots=self.scheduler.knobs.max_num_seqs,
            busy=self.busy,
        )

    def _arrive(self, now: float) -> None:
        """Hand over who has come by now."""
        requests = self.trace.requests
        while self.arrived < len(requests) and requests[self.arrived].arrival <= now:
            self.scheduler.add(requests[self.arrived].to_request(self.arrived), now)
            self.arrived += 1
        if self.arrived == len(requests):
            self.scheduler.close_source()

    def _next_time(self, now: float) -> float:
        """Return when something happens next: a step ends, a request comes, or waiting is over."""
        times = [self.runner.next_end, self.scheduler.next_event(now)]
        if self.arrived < len(self.trace.requests):
            times.append(self.trace.requests[self.arrived].arrival)
        upcoming = [time for time in times if time is not None]
        assert upcoming or not self.scheduler.has_work, "the scheduler has work but waits for nothing"
        return min(upcoming, default=now)

    def _complete(self, now: float) -> None:
        plan, result = self.runner.collect()
        self.scheduler.complete(plan, result, now)
        self.steps += bool(plan.scheduled)
        self.busy += len(plan.scheduled) * result.duration

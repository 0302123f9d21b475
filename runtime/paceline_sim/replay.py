"""Replays a trace through the production scheduler under a virtual clock.

```
 arrive ─▶ stride (the steps that can only repeat each other) ─▶ schedule ▸ run ▸ complete ─▶ outcomes
   ▲                                                                              │
   └──────────────────── the next step's end, arrival or delay ◀──────────────────┘
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from paceline_core.causes import Breakdown, Causes, Story
from paceline_core.errors import RequestRefused
from paceline_core.knobs import Knobs
from paceline_core.plan import StepPlan, StepShape
from paceline_core.request import Ended
from paceline_core.scheduler import Scheduler
from paceline_core.step_time import StepPredictor
from paceline_core.stride import Stride
from paceline_sim.clock import VirtualRunner
from paceline_sim.result import Outcome, Result
from paceline_sim.tally import Tally
from paceline_sim.trace import Trace

__all__ = ["ReplayObserver", "simulate"]

StepObserver = Callable[[float, float, StepShape, int], None]


class ReplayObserver(Protocol):
    """Sees a replay in full: who was in each step, and why each request took as long as it did."""

    def planned(self, plan: StepPlan, now: float) -> None:
        """Take a plan made at `now`: who is in it, who lost its memory."""

    def completed(self, plan: StepPlan, end: float, duration: float, kv_blocks: int) -> None:
        """Take a step that ended, with the KV blocks that were in use during it."""

    def ended(self, ended: Ended, story: Story) -> None:
        """Take a request's end, with the parts of its time and their culprits."""


def simulate(
    trace: Trace,
    knobs: Knobs,
    model: StepPredictor,
    *,
    num_blocks: int,
    max_model_len: int,
    pipeline_depth: int = 1,
    skip_ahead: bool = True,
    on_step: StepObserver | None = None,
    observer: ReplayObserver | None = None,
    details: bool = True,
) -> Result:
    """Return what becomes of `trace` under `knobs` on an engine whose steps take what `model` says.

    `num_blocks` sizes the KV pool, `max_model_len` (tokens) bounds a request, `pipeline_depth` is the engine's. `skip_ahead`
    takes steps that can only repeat each other in one stride: much faster and, to the last bit, the same result. `on_step`
    sees each step as it ends: (end, seconds, shape, KV blocks in use); `observer` sees all, but only without skipping.
    Without `details` nobody follows where requests' time goes (all `Outcome.parts` are 0) and there is no `Result.series`:
    a fifth less time. Raises `RequestRefused` that names the request's place in the trace if it could never run there.
    """
    assert observer is None or not skip_ahead, "skipped steps have no plans to observe"
    assert observer is None or details, "an observer is told the causes"
    scheduler = Scheduler(
        knobs, num_blocks=num_blocks, max_model_len=max_model_len, pipeline_depth=pipeline_depth, step_model=model
    )
    tally = Tally(trace.requests[0].arrival, series=details)
    causes = Causes(model, culprits=observer is not None) if details else None
    return _Replay(trace, scheduler, model, VirtualRunner(model), tally, skip_ahead, on_step, causes, observer).run()


@dataclass(slots=True)
class _Replay:
    trace: Trace
    scheduler: Scheduler
    model: StepPredictor
    runner: VirtualRunner
    tally: Tally
    skip_ahead: bool
    on_step: StepObserver | None
    causes: Causes | None
    observer: ReplayObserver | None
    arrived: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self) -> Result:
        now = self.trace.requests[0].arrival
        self._arrive(now)
        while self.arrived < len(self.trace.requests) or self.scheduler.has_work:
            if self.skip_ahead and (stride := self.scheduler.find_stride(now)) is not None:
                now = self._skip(stride, now)
                self._arrive(now)
            while (plan := self.scheduler.schedule(now)) is not None:
                if self.causes is not None:
                    self.causes.planned(plan, now)
                if self.observer is not None:
                    self.observer.planned(plan, now)
                self.runner.submit(plan, now)
            if self.causes is not None:
                self.causes.queue_waits(self.scheduler.waits_for, now)
            now = self._next_time(now)
            if now == self.runner.next_end:
                self._complete(now)
            self._take_ended()
            self._arrive(now)
        return self._result(now)

    def _take_ended(self) -> None:
        for ended in self.scheduler.take_ended():
            story = Story(Breakdown()) if self.causes is None else self.causes.ended(ended)
            self.outcomes.append(Outcome.of(ended, story.parts))
            if self.observer is not None:
                self.observer.ended(ended, story)

    def _result(self, now: float) -> Result:
        self.outcomes.sort(key=lambda outcome: outcome.index)
        gauges = self.scheduler.gauges()
        return Result(
            outcomes=tuple(self.outcomes),
            duration=now - self.trace.requests[0].arrival,
            steps=self.tally.steps,
            slots=self.scheduler.knobs.max_num_seqs,
            busy=self.tally.busy,
            computing=self.tally.seconds,
            kv_blocks=gauges.kv_blocks_total,
            kv_peak=self.tally.kv_peak,
            kv_time=self.tally.kv_time,
            preemptions=gauges.preemptions,
            series=self.tally.series(),
        )

    @property
    def _next_arrival(self) -> float:
        requests = self.trace.requests
        return requests[self.arrived].arrival if self.arrived < len(requests) else math.inf

    def _arrive(self, now: float) -> None:
        """Hand over who has come by now."""
        requests, block_size = self.trace.requests, self.scheduler.knobs.block_size
        while self._next_arrival <= now:
            try:
                self.scheduler.add(requests[self.arrived].to_request(self.arrived, block_size), now)
            except RequestRefused as error:
                raise RequestRefused(error.reason, f"request {self.arrived + 1} of the trace: {error}") from None
            if self.causes is not None:
                self.causes.arrived(self.arrived, requests[self.arrived].arrival)
            self.arrived += 1
        if self.arrived == len(requests):
            self.scheduler.close_source()

    def _next_time(self, now: float) -> float:
        """Return when something happens next: a step ends, a request comes, or waiting is over."""
        times = [self.runner.next_end, self.scheduler.next_event(now)]
        if self.arrived < len(self.trace.requests):
            times.append(self._next_arrival)
        upcoming = [time for time in times if time is not None]
        assert upcoming or not self.scheduler.has_work, "the scheduler has work but waits for nothing"
        return min(upcoming, default=now)

    def _complete(self, now: float) -> None:
        plan, result = self.runner.collect()
        kv_blocks = self.scheduler.kv_blocks_used
        self.scheduler.complete(plan, result, now)
        if self.causes is not None:
            self.causes.completed(plan, now, result.duration)
        if self.observer is not None:
            self.observer.completed(plan, now, result.duration, kv_blocks)
        if plan.scheduled:
            self._count(now, result.duration, len(plan.scheduled), len(result.tokens), plan.shape, kv_blocks)

    def _count(self, end: float, duration: float, sequences: int, tokens: int, shape: StepShape, kv_blocks: int) -> None:
        self.tally.step(end, duration, sequences, tokens, shape.prefill_tokens, kv_blocks)
        if self.on_step is not None:
            self.on_step(end, duration, shape, kv_blocks)

    def _skip(self, stride: Stride, now: float) -> float:
        """Take as many steps of `stride` as fit before the next arrival and the end of memory; return the time after them.

        A round is what the plain loop does: plan a step, then complete the oldest, which with two plans in flight is the one
        before.
        """
        width, period, until = len(stride.sequences), len(stride.growth), self._next_arrival
        if self.causes is not None:
            self.causes.queue_waits(self.scheduler.waits_for, now)
        ahead = self.runner.next_end is not None  # a plan is in flight: each round completes the one planned before
        busy_until, duration = self.runner.busy_until, self.runner.newest_duration
        assert ahead or busy_until == now, "who decodes has just been in a step"
        context, left, taken = stride.context, stride.available, 0
        used = self.scheduler.kv_blocks_used
        while taken < stride.most and now < until:
            grown = stride.growth[taken % period]
            if grown > left:
                break
            left -= grown
            used += grown
            before, lasted = busy_until, duration
            duration = self.model.predict_decode(width, context)
            busy_until = before + duration
            now, seconds, read = (before, lasted, context - width) if ahead else (busy_until, duration, context)
            self.tally.step(now, seconds, width, width, 0, used)
            if self.on_step is not None:
                self.on_step(now, seconds, StepShape(width, 0, read, 0), used)
            context += width
            taken += 1
        if taken:
            self.runner.skip(self.scheduler.skip(stride, taken, now), busy_until, duration)
            if self.causes is not None:
                self.causes.skipped(now)
        return now

"""The engine: requests in, `schedule()` → `runner.submit()` → `runner.collect()` → `complete()`, tokens out.

Nothing here knows of sockets, text or models: the runner is a model or a clock, time is injected. The engine process
drives it for the server, `LLM` drives it offline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline_core.causes import Causes, Story
from paceline_core.errors import PacelineError
from paceline_core.knobs import Knobs
from paceline_core.plan import StepPlan
from paceline_core.request import Ended, FinishReason, Request
from paceline_core.scheduler import Scheduler
from paceline_core.speculation import Proposer
from paceline_core.step_time import StepTimeFitter
from paceline_core.wire import Gauges
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import ModelStepResult, PromptReport, TokenLogprobs

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarMatcher  # loads the grammar library

__all__ = ["Engine", "EngineBroken", "ModelBackend", "SequenceRunner", "Turn"]

REFIT_EVERY = 64  # steps between two fits of the step-time model: a fit costs about a millisecond, so well under 1 %


class EngineBroken(PacelineError):
    """A step failed, so no further one can be run: start a new engine."""


class SequenceRunner(Protocol):
    """A runner (see `paceline_core.plan.Runner`) that is told of each sequence before the first plan that names it."""

    def add(
        self, seq_id: int, prompt_tokens: list[int], params: SamplingParams, matcher: GrammarMatcher | None = None
    ) -> None:
        """Keep the prompt and how to sample (`matcher` follows `params.grammar`); `plan.removed` drops it again."""

    def submit(self, plan: StepPlan) -> None:
        """Take the next plan; return before it is computed."""

    def collect(self) -> ModelStepResult:
        """Wait for the oldest submitted plan and return its result."""

    def close(self) -> None:
        """Stop its threads; no plan is in flight."""


class ModelBackend(Protocol):
    """A loaded model or a clock: the runner and the sizes that the scheduler needs."""

    @property
    def runner(self) -> SequenceRunner:
        """Runs the plans."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool at start."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""

    @property
    def device(self) -> str:
        """Where it runs: `cpu`, `cuda`, `clock`."""

    def blocks_for(self, kv_memory_fraction: float) -> int:
        """KV blocks that this share of the free memory holds. Raises a `ModelError` if that is none."""

    def check_step(self, tokens: int, num_blocks: int) -> None:
        """Raise a `ModelError` if steps of so many tokens have no memory beside a pool of so many blocks."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop brought: tokens per sequence, ends, and the step that completed with its seconds.

    `stories` say where the time of those that `ended` went, by sequence. `logprobs` (one for each of the tokens) and
    `prompts` are there for the sequences that asked for them.
    """

    tokens: Mapping[int, tuple[int, ...]]
    ended: list[Ended]
    plan: StepPlan | None = None
    duration: float = 0.0
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompts: Mapping[int, PromptReport] = field(default_factory=dict)
    stories: Mapping[int, Story] = field(default_factory=dict)


class Engine:
    """Drives a scheduler and a runner with up to `pipeline_depth` plans in flight. One thread calls everything here.

    `fitter` may bring steps that were measured before; `first_epoch` goes on where an engine before this one ended;
    `proposer` makes drafts, for a runner that can check them.
    """

    def __init__(
        self,
        backend: ModelBackend,
        knobs: Knobs,
        *,
        pipeline_depth: int = 1,
        fitter: StepTimeFitter | None = None,
        first_epoch: int = 0,
        proposer: Proposer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._runner = backend.runner
        self._now = now
        self._in_flight: deque[StepPlan] = deque()
        self._depth = pipeline_depth
        self._fitter = fitter or StepTimeFitter()
        self._kv_share = knobs.kv_memory_fraction
        self._blocks_asked = backend.num_blocks
        self._resizing = False
        self._idle = False
        self._broken: Exception | None = None
        self._looked = 0.0  # when `schedule` was asked last
        self.steps = 0
        self.expected = 0.0  # seconds that what was submitted last should take; the watchdog's thread reads it
        self.num_blocks = backend.num_blocks
        self.step_model = self._fitter.model() if self._fitter.steps else None
        self._causes = Causes(self.step_model, culprits=True)
        self._scheduler = Scheduler(
            knobs,
            num_blocks=self.num_blocks,
            max_model_len=backend.max_model_len,
            pipeline_depth=pipeline_depth,
            step_model=self.step_model,
            first_epoch=first_epoch,
            proposer=proposer,
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(
        self, request: Request, params: SamplingParams, matcher: GrammarMatcher | None = None, submitted: float | None = None
    ) -> None:
        """Take a request (with its `tokens`), which was ready for the engine at `submitted` (None: at its arrival).

        Raises `RequestRefused` if it can never run here.
        """
        assert request.tokens is not None, "the engine computes real tokens"
        self._scheduler.add(request, self._now())
        intake = 0.0 if submitted is None else max(0.0, submitted - request.arrival)
        self._causes.arrived(request.seq_id, request.arrival, intake)
        self._runner.add(request.seq_id, list(request.tokens), params, matcher)

    def abort(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence early; False if it isn't there (any more)."""
        return self._scheduler.abort(seq_id, self._now(), reason)

    # -- the hot path -----------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Keep the pipeline full and finish its oldest step. Returns at once if nothing can run now.

        Raises what a step failed with, and `EngineBroken` from then on: nobody knows what the model's state is.
        """
        if self._broken is not None:
            raise EngineBroken(f"an earlier step failed: {self._broken!r}") from self._broken
        self._fill()
        self._idle = not self._in_flight
        # who left before the step ended: the rest of that step is no part of their stories
        gone = self._scheduler.take_ended()
        stories = self._stories(gone)
        if self._idle:
            return Turn({}, gone, stories=stories)
        result = self._collect()
        plan = self._in_flight.popleft()
        now = self._now()
        tokens = self._scheduler.complete(plan, result, now)
        self._causes.completed(plan, now, result.duration)
        self._account(plan, result)
        # a sequence that was aborted meanwhile, or whose sample came to nothing, has no tokens in this turn
        logprobs = {i: found[: len(tokens[i])] for i, found in result.logprobs.items() if i in tokens}
        prompts = {i: report for i, report in result.prompts.items() if i in tokens}
        ended = self._scheduler.take_ended()
        stories |= self._stories(ended)
        return Turn(tokens, [*gone, *ended], plan, result.duration, logprobs, prompts, stories)

    def _stories(self, ended: list[Ended]) -> dict[int, Story]:
        return {each.request.seq_id: self._causes.ended(each) for each in ended}

    def _collect(self) -> ModelStepResult:
        try:
            return self._runner.collect()
        except Exception as error:
            self._broken = error
            raise

    def _fill(self) -> None:
        while len(self._in_flight) < self._depth:
            self._looked = self._now()
            plan = self._scheduler.schedule(self._looked)
            if plan is not None:
                self._causes.planned(plan, self._looked)
            self._causes.queue_waits(self._scheduler.waits_for, self._looked)
            if plan is None:
                return
            if not self._in_flight:
                self.expected = 0.0
            self.expected += self.step_model.predict(plan.shape) if self.step_model is not None and plan.scheduled else 0.0
            self._runner.submit(plan)
            self._in_flight.append(plan)

    def _account(self, plan: StepPlan, result: ModelStepResult) -> None:
        if plan.resize_blocks is not None:
            self.num_blocks, self._resizing = plan.resize_blocks, False
        if not plan.scheduled:
            return
        self.steps += 1
        if not plan.num_drafts:  # a draft isn't a decode more: the twin's steps have none
            self._fitter.observe(plan.shape, result.duration)
        if self.steps % REFIT_EVERY == 0:
            self.step_model = self._scheduler.step_model = self._causes.model = self._fitter.model()

    def wait(self) -> float | None:
        """Seconds until `turn` may do something without new input: 0 now, None not before input comes."""
        if not self._idle:
            return 0.0
        # asked as of the look that found nothing: an event that came due since then must not be taken for past
        event = self._scheduler.next_event(self._looked)
        return None if event is None else max(0.0, event - self._now())

    # -- knobs and figures ------------------------------------------------------------------------------------------

    def set_knobs(self, knobs: Knobs) -> int:
        """Put knobs in force from the next step on and return their epoch; a new KV share also rebuilds the pool.

        Raises `KnobError`, or a `ModelError` if the pool would have no block or the steps no memory; nothing changes then.
        """
        is_same = knobs.kv_memory_fraction == self._kv_share
        num_blocks = self._blocks_asked if is_same else self._backend.blocks_for(knobs.kv_memory_fraction)
        self._backend.check_step(knobs.max_num_batched_tokens, num_blocks)
        epoch = self._scheduler.set_knobs(knobs)
        if not is_same:
            self._scheduler.resize_pool(num_blocks)
            self._kv_share, self._blocks_asked, self._resizing = knobs.kv_memory_fraction, num_blocks, True
        return epoch

    @property
    def resizing(self) -> bool:
        """True until the step that rebuilds the KV pool has run."""
        return self._resizing

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs, or a step is in flight."""
        return bool(self._in_flight) or self._scheduler.has_work

    @property
    def epoch(self) -> int:
        """The knob epoch that the next step runs under."""
        return self._scheduler.epoch

    def gauges(self) -> Gauges:
        """What runs, waits and is used now."""
        return self._scheduler.gauges()

    def close_source(self) -> None:
        """No more requests will come: static batching stops waiting for a full batch."""
        self._scheduler.close_source()

    def reopen_source(self) -> None:
        """Requests may come again."""
        self._scheduler.reopen_source()

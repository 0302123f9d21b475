"""The four batching strategies: who may be admitted now, in which order, and how many prefill tokens a step takes.

| strategy | admission | slots free |
|---|---|---|
| `static` | when idle and a full batch waits (or the source has ended, or the oldest waited `staticFlush`) | all at once |
| `dynamic` | when idle and (a full batch or a preferred size waits, or the oldest waited `maxQueueDelay`) | all at once |
| `continuous` | every step, first come, first served | at once |
| `iteration` | continuous, by priority and earliest deadline, in steps that keep the TPOT objective | at once |

A policy is a pure function of what it is shown; the loop in `scheduler.py` is the same for all four.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepShape
from paceline_core.sequence import SequenceState
from paceline_core.step_time import StepPredictor

__all__ = ["ContinuousPolicy", "DynamicPolicy", "IterationPolicy", "Policy", "QueueView", "StaticPolicy", "make_policy"]


@dataclass(frozen=True, slots=True)
class QueueView:
    """What a policy may know of the queue: how many wait, since when the oldest, and whether the engine is idle."""

    now: float
    waiting: int
    oldest_arrival: float
    idle: bool
    source_closed: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """The base: admission at every step, first come, first served, the whole token budget for whoever wants it."""

    knobs: Knobs
    model: StepPredictor | None = None
    gang = False  # True: a batch's slots and results are given back together, when its last member has ended
    deadlines = False  # True: requests that can't meet their deadline are refused

    def key(self, seq: SequenceState) -> tuple[float, ...]:
        """Return the waiting order: the smallest goes first."""
        return (seq.request.seq_id,)

    def admissible(self, view: QueueView) -> int:
        """Return how many waiting sequences may be admitted now (slots and memory may allow fewer)."""
        return view.waiting

    def flush_at(self, view: QueueView) -> float:
        """Return when a batch that isn't full starts anyway, if nothing else happens before."""
        return math.inf

    def guards(self, urgent: StepShape) -> bool:
        """Return whether a step with these `urgent` decodes must keep an objective, so that batch work comes last."""
        return False

    def prefill_tokens(self, shape: StepShape, start: int, want: int, *, batch: bool = False) -> int:
        """Return how many of the `want` tokens from `start` a step that already has `shape` may take on."""
        return want

    def may_join(self, shape: StepShape, seq: SequenceState) -> bool:
        """Return whether one more sequence may run beside those of `shape`."""
        return True

    def may_decode(self, shape: StepShape) -> bool:
        """Return whether a step of `shape` keeps the objective."""
        return True

    def best_case(self, remaining: int, start: int) -> float:
        """Return the least seconds that computing `remaining` tokens from position `start` can take."""
        return 0.0


class ContinuousPolicy(Policy):
    """Admit at every step; a slot is refilled on the step after it was freed."""

    __slots__ = ()


class GangPolicy(Policy, ABC):
    """Start a batch only when idle, and let it go together."""

    __slots__ = ()
    gang = True

    def admissible(self, view: QueueView) -> int:
        """Return the size of the batch to start now: 0 while one runs or too few wait."""
        if not view.idle or not view.waiting:
            return 0
        full = self.knobs.max_num_seqs
        if view.waiting >= full:
            return full
        return view.waiting if view.now >= self.flush_at(view) else 0

    def flush_at(self, view: QueueView) -> float:
        """Return when the oldest request has waited long enough."""
        return view.oldest_arrival + self.patience

    @property
    @abstractmethod
    def patience(self) -> float:
        """The longest wait of the oldest request, in seconds."""


class StaticPolicy(GangPolicy):
    """Wait for a full batch; flush when the source has ended or after `staticFlush`."""

    __slots__ = ()

    @property
    def patience(self) -> float:
        """The knob `staticFlush`."""
        return self.knobs.static_flush

    def flush_at(self, view: QueueView) -> float:
        """Return at once if nobody will come any more."""
        return -math.inf if view.source_closed else view.oldest_arrival + self.patience


class DynamicPolicy(GangPolicy):
    """Wait for a full batch or a preferred size, but never longer than `maxQueueDelay`."""

    __slots__ = ()

    @property
    def patience(self) -> float:
        """The knob `maxQueueDelay`."""
        return self.knobs.max_queue_delay

    def admissible(self, view: QueueView) -> int:
        """Return the largest batch that may start: full, all that wait if the delay is over, or a preferred size."""
        size = GangPolicy.admissible(self, view)
        if size or not view.idle:
            return size
        return max((n for n in self.knobs.preferred_batch_sizes if n <= view.waiting), default=0)


class IterationPolicy(Policy):
    """Continuous batching that serves the urgent first and keeps the step time under the TPOT objective."""

    __slots__ = ()
    deadlines = True

    def key(self, seq: SequenceState) -> tuple[float, ...]:
        """Return priority, then the earliest deadline (the TTFT objective where the request states none), then age."""
        request = seq.request
        due = request.deadline
        if due is None:
            due = math.inf if self.knobs.slo_ttft is None else request.arrival + self.knobs.slo_ttft
        return (seq.priority, due, request.seq_id)

    def guards(self, urgent: StepShape) -> bool:
        """Return whether there is an objective, a model to keep it by, and somebody to keep it for."""
        return self.model is not None and self.knobs.slo_tpot is not None and urgent.decode_tokens > 0

    def prefill_tokens(self, shape: StepShape, start: int, want: int, *, batch: bool = False) -> int:
        """Return the largest chunk whose predicted step time keeps the TPOT objective of the decodes in `shape`.

        Without decodes nobody's TPOT is at stake. The first prompt of a step is granted one block's worth in any case: it
        must get on even where the decodes alone miss the objective. `batch` work isn't: it can wait.
        """
        model, objective = self.model, self.knobs.slo_tpot
        if model is None or objective is None or not shape.decode_tokens:
            return want
        low, high = 0 if shape.prefill_tokens or batch else min(want, self.knobs.block_size), want
        while low < high:
            middle = (low + high + 1) // 2
            step = shape.with_prefill(start, middle)
            if model.predict(step) <= objective and not model.outside(step):
                low = middle
            else:
                high = middle - 1
        return low

    def may_join(self, shape: StepShape, seq: SequenceState) -> bool:
        """Return whether the TPOT objective holds with one more sequence, in this step and as one more decode after it."""
        model, objective = self.model, self.knobs.slo_tpot
        if model is None or objective is None or not shape.decode_tokens:
            return True
        decodes = StepShape(shape.decode_tokens, 0, shape.context_tokens, 0).with_decode(seq.known, 1)
        first_block = min(seq.known, self.knobs.block_size)
        return model.predict(decodes) <= objective and self.prefill_tokens(shape, 0, first_block, batch=seq.is_batch) > 0

    def may_decode(self, shape: StepShape) -> bool:
        """Return whether the predicted time of a step of `shape` is within the objective."""
        model, objective = self.model, self.knobs.slo_tpot
        return model is None or objective is None or model.predict(shape) <= objective

    def best_case(self, remaining: int, start: int) -> float:
        """Return the least seconds that computing `remaining` tokens from `start` takes, alone on the engine.

        It errs low, by the model's own error, because what is refused for it would have been served otherwise.
        """
        model = self.model
        shape = StepShape(prefill_tokens=remaining, prefill_attention=remaining * start + remaining * remaining // 2)
        if model is None or model.outside(shape):
            return 0.0
        steps = -(-remaining // self.knobs.max_num_batched_tokens)
        return max(0.0, 1.0 - model.residual) * (model.predict(shape) + (steps - 1) * model.constant)


_POLICIES: dict[Strategy, type[Policy]] = {
    Strategy.STATIC: StaticPolicy,
    Strategy.DYNAMIC: DynamicPolicy,
    Strategy.CONTINUOUS: ContinuousPolicy,
    Strategy.ITERATION: IterationPolicy,
}


def make_policy(knobs: Knobs, model: StepPredictor | None) -> Policy:
    """Return the policy of the strategy that `knobs` name."""
    return _POLICIES[knobs.strategy](knobs, model)

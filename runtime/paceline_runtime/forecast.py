"""What a newcomer's wait will be: the core's forecast, fed with the last requests and corrected by how they waited."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline_core.forecast import Traffic, predict_wait
from paceline_core.knobs import Knobs, Strategy
from paceline_core.step_time import StepModel
from paceline_core.wire import Gauges, StepModelDocument
from paceline_runtime.sequence import LiveSequence

__all__ = ["EngineView", "WaitForecast"]

_KEPT = 256  # requests that the means are taken over
_UNSEEN_OUTPUT = 256  # tokens assumed while nothing has finished (chat answers are mostly shorter)
_WORTH_LEARNING = 0.05  # seconds: shorter waits are a step's length, not a queue's
_GAIN = 0.1  # of one request on the correction: the last twenty or so decide
_MAX_CORRECTION = 8.0
_MAX_RETRY_AFTER = 600


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of the engine now."""

    knobs: Knobs
    num_blocks: int
    gauges: Gauges
    model: StepModelDocument | None
    live: Iterable[LiveSequence]


class WaitForecast:
    """Used on one thread."""

    def __init__(self) -> None:
        self._prompts: deque[int] = deque(maxlen=_KEPT)
        self._outputs: deque[int] = deque(maxlen=_KEPT)
        self._correction = 1.0

    def finished(self, computed_prompt: int, output: int) -> None:
        """Remember a request: prompt tokens that weren't cached, and tokens that it generated."""
        self._prompts.append(computed_prompt)
        self._outputs.append(output)

    def waited(self, predicted: float, seconds: float) -> None:
        """Learn from a request that got its slot after `seconds`, where `predicted` had been said."""
        if predicted < _WORTH_LEARNING:
            return
        # a ratio's logarithm is as far from 0 for half as for twice
        ratio = max(seconds, _WORTH_LEARNING) / predicted
        corrected = self._correction * ratio**_GAIN
        self._correction = min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, corrected))

    def predict(self, view: EngineView, priority: int = 0) -> float:
        """Return the seconds that a newcomer of this priority would wait for a slot; 0 without a step-time model."""
        if view.model is None:
            return 0.0
        waiting = [s for s in view.live if s.first_token is None and _goes_first(s, priority, view.knobs)]
        started = sum(s.first_token is not None for s in view.live)
        # those that compute their prompt have a slot but no token yet
        ahead = max(0, len(waiting) - max(0, view.gauges.running - started))
        model = StepModel.from_document(view.model)
        wait = predict_wait(
            model, view.knobs, self._traffic(), num_blocks=view.num_blocks, running=view.gauges.running, ahead=ahead
        )
        return wait * self._correction

    def _traffic(self) -> Traffic:
        outputs = sorted(self._outputs) or [_UNSEEN_OUTPUT]
        prompts = self._prompts or [_UNSEEN_OUTPUT]
        long = outputs[min(len(outputs) - 1, int(0.9 * len(outputs)))]
        return Traffic(sum(prompts) / len(prompts), sum(outputs) / len(outputs), float(long))


def _goes_first(sequence: LiveSequence, priority: int, knobs: Knobs) -> bool:
    return knobs.strategy is not Strategy.ITERATION or sequence.submission.priority <= priority


def retry_after(seconds: float) -> str:
    """Return the value of a `Retry-After` header: whole seconds, at least 1."""
    return str(min(_MAX_RETRY_AFTER, max(1, math.ceil(seconds))))

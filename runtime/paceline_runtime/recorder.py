"""Turns what the engine reports into metrics and records for `/admin/observe`."""

from __future__ import annotations

import math
import time
from collections import deque

from paceline_core.request import FinishReason
from paceline_core.wire import Gauges, RequestRecord, StepRecord
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.messages import EngineReady, SequenceEnded, StepStatistics
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog, prefix_hashes
from paceline_runtime.sequence import LiveSequence

__all__ = ["Recorder"]

_OUTCOMES = {
    FinishReason.STOP: "finished",
    FinishReason.LENGTH: "finished",
    FinishReason.ABORT: "aborted",
    FinishReason.REFUSED: "refused",
}
_RATE_WINDOW = 64  # last ends that the finishing rate is taken from
_MAX_RETRY_AFTER = 60


class Recorder:
    """The `EngineListener` of a server."""

    def __init__(self, metrics: RuntimeMetrics, log: ObserveLog, knobs: KnobStore, hash_key: bytes) -> None:
        self._metrics = metrics
        self._log = log
        self._knobs = knobs
        self._hash_key = hash_key
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)

    def engine_ready(self, ready: EngineReady) -> None:
        """A (new) engine takes requests."""
        self._metrics.engine_started()
        self._metrics.ready.set(1)

    def engine_died(self, lost: list[LiveSequence]) -> None:
        """Count what was lost."""
        self._metrics.ready.set(0)
        self._metrics.engine_restarts.inc()
        self._metrics.update_gauges(Gauges())
        for sequence in lost:
            self._metrics.count_request("failed")
            self._log.add_request(self.record(sequence, None, "aborted"))

    def tokens(self, sequence: LiveSequence, count: int, now: float) -> None:
        """Observe the time to the first token, or the time since the last."""
        if sequence.last_token is None:
            self._metrics.ttft.observe(now - sequence.submission.arrival)
        else:
            self._metrics.itl.observe((now - sequence.last_token) / count)

    def sequence_ended(self, sequence: LiveSequence, ended: SequenceEnded) -> None:
        """Count and keep a request that the engine gave its last word on."""
        outcome = _OUTCOMES[ended.reason]
        self._metrics.count_request(outcome)
        self._log.add_request(self.record(sequence, ended, outcome))
        if outcome == "finished":
            now = time.monotonic()
            self._ends.append(now)
            self._metrics.e2e.observe(now - sequence.submission.arrival)

    def stepped(self, step: StepStatistics | None, gauges: Gauges) -> None:
        """Take the engine's figures over."""
        self._metrics.update(gauges)
        if step is None:
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(step.duration)
        self._log.add_step(_step_record(step, gauges))

    def knobs_applied(self, num_blocks: int) -> None:
        """Publish what is in force."""
        self._metrics.knob_epoch.set(self._knobs.epoch)
        self._metrics.knob_revision.set(self._knobs.revision)
        self._metrics.set_knobs(self._knobs.target, num_blocks)

    def retry_after(self, waiting: int) -> str:
        """Return whole seconds until `waiting` requests will have been served at the rate of the last ones."""
        if len(self._ends) < 2 or (span := time.monotonic() - self._ends[0]) <= 0:
            return "1"
        return str(min(_MAX_RETRY_AFTER, max(1, math.ceil(waiting * span / len(self._ends)))))

    def record(self, sequence: LiveSequence, ended: SequenceEnded | None, outcome: str) -> RequestRecord:
        """Return what the operator may know of a request."""
        s, to_unix = sequence.submission, time.time() - time.monotonic()
        end = ended.last_token or ended.released if ended is not None else time.monotonic()
        return RequestRecord(
            request_id=s.request_id,
            arrival=s.arrival + to_unix,
            prompt_tokens=len(s.tokens),
            output_tokens=ended.output_len if ended is not None else sequence.output_len,
            outcome=outcome,
            epoch=ended.epoch if ended is not None else sequence.epoch,
            end_epoch=ended.end_epoch if ended is not None else self._knobs.epoch,
            first_scheduled=_shifted(ended.first_scheduled if ended is not None else None, to_unix),
            first_token=_shifted(sequence.first_token, to_unix),
            end=None if outcome == "unfinished" else end + to_unix,
            cached_tokens=ended.cached_len if ended is not None else 0,
            preemptions=ended.preemptions if ended is not None else 0,
            priority=s.priority,
            max_tokens=s.params.max_tokens,
            prefix_hashes=self._prefix_hashes(sequence),
        )

    def _prefix_hashes(self, sequence: LiveSequence) -> tuple[int, ...]:
        if sequence.prefix_hashes is None:
            block_size = self._knobs.target.block_size
            sequence.prefix_hashes = prefix_hashes(sequence.submission.tokens, block_size, self._hash_key)
        return sequence.prefix_hashes


def _shifted(moment: float | None, offset: float) -> float | None:
    return None if moment is None else moment + offset


def _step_record(step: StepStatistics, gauges: Gauges) -> StepRecord:
    return StepRecord(
        end=step.end + time.time() - time.monotonic(),
        duration=step.duration,
        epoch=step.epoch,
        decode_tokens=step.decode_tokens,
        prefill_tokens=step.prefill_tokens,
        context_tokens=step.context_tokens,
        prefill_attention=step.prefill_attention,
        running=gauges.running,
        waiting=gauges.waiting,
    )

"""Turns what the engine reports into metrics, log lines and records for `/admin/observe` and `/admin/timeline`."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from paceline_core.causes import PARTS
from paceline_core.request import FinishReason
from paceline_core.wire import Gauges, RequestRecord, StepModelDocument, StepRecord
from paceline_runtime.forecast import WaitForecast
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.messages import EngineReady, SequenceEnded, StepStatistics
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog, prefix_hashes
from paceline_runtime.sequence import LiveSequence
from paceline_runtime.slow_requests import SlowRequestLog
from paceline_runtime.timeline import Timeline
from paceline_runtime.tracing import Tracing

__all__ = ["Recorder"]

_OUTCOMES = {
    FinishReason.STOP: "finished",
    FinishReason.LENGTH: "finished",
    FinishReason.ABORT: "aborted",
    FinishReason.REFUSED: "refused",
}
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REFUSED: "abort",  # vLLM has no word of its own for it
}
_ROUNDING = 1e-6  # seconds
_NAMES_KEPT = 8192  # sequences whose request is remembered: those of a timeline and the culprits of those that end now


class Recorder:
    """The `EngineListener` of a server. `slow_request` is the latency in seconds above which the log says why.

    `tracing`, if set, gets a span for each sequence.
    """

    def __init__(
        self, metrics: RuntimeMetrics, log: ObserveLog, knobs: KnobStore, hash_key: bytes, slow_request: float
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._knobs = knobs
        self._hash_key = hash_key
        self._ttft, self._itl = metrics.histogram("ttft"), metrics.histogram("itl")  # one of them for each token
        self._slow = SlowRequestLog(slow_request)
        self._names: OrderedDict[int, str] = OrderedDict()
        self.tracing: Tracing | None = None
        self.forecast = WaitForecast()
        self.timeline = Timeline()

    @property
    def names(self) -> Mapping[int, str]:
        """The requests of the last sequences."""
        return self._names

    def engine_ready(self, ready: EngineReady) -> None:
        """A (new) engine takes requests."""
        self._metrics.engine_started()
        self._metrics.gauge("ready").set(1)

    def engine_died(self, lost: list[LiveSequence]) -> None:
        """Count what was lost."""
        self._metrics.gauge("ready").set(0)
        self._metrics.counter("engine_restarts").inc()
        self._metrics.update_gauges(Gauges())
        for sequence in lost:
            sequence.stop_cause = "engine_died"
            record = self.record(sequence, None, "aborted")
            self._metrics.count_request("failed")
            self._metrics.observe_request(record, None, "error")
            self._log.add_request(record)
            self._trace(record, sequence)

    def submitted(self, sequence: LiveSequence) -> None:
        """Remember whose sequence it is."""
        self._names[sequence.seq_id] = sequence.submission.request_id
        if len(self._names) > _NAMES_KEPT:
            self._names.popitem(last=False)

    def tokens(self, sequence: LiveSequence, count: int, now: float) -> None:
        """Observe the time to the first token, or the time since the last."""
        if sequence.last_token is None:
            self._ttft.observe(now - sequence.submission.arrival)
        else:
            self._itl.observe((now - sequence.last_token) / count)
        for place in range(count - 1):
            self._metrics.counter("accepted_by_place", str(place)).inc()

    def sequence_ended(self, sequence: LiveSequence, ended: SequenceEnded) -> None:
        """Count and keep a request that the engine gave its last word on."""
        now, outcome = time.monotonic(), _OUTCOMES[ended.reason]
        record = self.record(sequence, ended, outcome)
        self._metrics.count_request(outcome)
        self._log.add_request(record)
        finished = outcome == "finished"
        self._metrics.observe_request(record, time.time() if finished else None, _FINISH[ended.reason])
        if outcome == "refused":
            self._metrics.counter("refusals", record.reason).inc()
        elif outcome == "aborted":
            self._metrics.counter("aborts", record.reason).inc()
        else:
            self.forecast.finished(record.prompt_tokens - ended.cached_len, ended.output_len)
        if ended.first_scheduled is not None:
            self.forecast.waited(sequence.submission.predicted_wait, ended.first_scheduled - sequence.submission.arrival)
        if self._slow.look(record, now - sequence.submission.arrival, now):
            self._metrics.counter("slow_requests").inc()
        self._trace(record, sequence)

    def count_turned_away(self, reason: str) -> None:
        """Count a request that never reached the engine."""
        self._metrics.count_request("rejected")
        self._metrics.counter("refusals", reason).inc()

    def turned_away(self, request_id: str, arrival: float, reason: str, *, prompt_tokens: int = 0, tenant: str = "") -> None:
        """Count and keep a request that never reached the engine: the queue was too long, or nobody could serve it."""
        self.count_turned_away(reason)
        now, to_unix = time.time(), time.time() - time.monotonic()
        epoch = self._knobs.epoch
        record = RequestRecord(
            request_id, arrival + to_unix, prompt_tokens, 0, "refused", epoch, epoch, end=now, reason=reason, tenant=tenant
        )
        self._log.add_request(record)

    def stepped(
        self, step: StepStatistics | None, gauges: Gauges, members: Sequence[tuple[int, int, bool]] | None = None
    ) -> None:
        """Take the engine's figures over."""
        self._metrics.update(gauges)
        if step is None:
            return
        self._metrics.observe_step(step.decode_tokens + step.prefill_tokens, step.duration)
        self._log.add_step(_step_record(step, gauges))
        if members is not None:
            self.timeline.add(step, members)

    def fitted(self, model: StepModelDocument) -> None:
        """Publish how good the step-time model is."""
        self._metrics.set_model(model)

    def knobs_applied(self, num_blocks: int) -> None:
        """Publish what is in force."""
        self._metrics.gauge("knob_epoch").set(self._knobs.epoch)
        self._metrics.gauge("knob_revision").set(self._knobs.revision)
        self._metrics.set_knobs(self._knobs.target, num_blocks)

    def record(self, sequence: LiveSequence, ended: SequenceEnded | None, outcome: str) -> RequestRecord:
        """Return what the operator may know of a request."""
        s, now = sequence.submission, time.monotonic()
        to_unix = time.time() - now
        end = ended.last_token or ended.released if ended is not None else now
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
            parts={} if ended is None else _parts(ended, s.arrival, now),
            delayed_by={} if ended is None else self._named(ended.delayed_by),
            preempted_by={} if ended is None else self._named(ended.preempted_by),
            reason=_reason(sequence, ended, outcome),
            tenant=s.tenant,
        )

    def _trace(self, record: RequestRecord, sequence: LiveSequence) -> None:
        if self.tracing is not None:
            self.tracing.record(record, sequence.submission.traceparent, time.time())

    def _named(self, culprits: Mapping[int, float]) -> dict[str, float]:
        """Return seconds by request; -1 is nobody, and several sequences may be of one request."""
        named: dict[str, float] = {}
        for seq_id, seconds in culprits.items():
            name = "-" if seq_id < 0 else self._names.get(seq_id, f"#{seq_id}")
            named[name] = named.get(name, 0.0) + seconds
        return named

    def _prefix_hashes(self, sequence: LiveSequence) -> tuple[int, ...]:
        """Return the prompt's hashes; another tenant's equal prompt has others, as its blocks aren't shared either."""
        if sequence.prefix_hashes is None:
            block_size, tenant = self._knobs.target.block_size, sequence.submission.tenant
            key = self._hash_key
            if tenant:
                key = hashlib.blake2b(tenant.encode(), key=key, digest_size=32).digest()
            sequence.prefix_hashes = prefix_hashes(sequence.submission.tokens, block_size, key)
        return sequence.prefix_hashes


def _parts(ended: SequenceEnded, arrival: float, now: float) -> dict[str, float]:
    """Return the parts that took any time: the engine's own, the way from it to here, and what neither explains."""
    if not ended.parts:
        return {}
    parts = {name: seconds for name, seconds in zip(PARTS, ended.parts, strict=True) if seconds > 0}
    parts["delivery"] = max(0.0, now - ended.released)
    other = abs(ended.released - arrival - sum(ended.parts))
    if other > _ROUNDING:
        parts["other"] = other
    return parts


def _reason(sequence: LiveSequence, ended: SequenceEnded | None, outcome: str) -> str:
    if outcome == "refused" and ended is not None:
        return ended.refusal_code or ("deadline" if sequence.submission.deadline is not None else "kv_capacity")
    return sequence.stop_cause if outcome == "aborted" else ""


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

"""Prometheus metrics of a server, as `metric_table.py` lists them."""

from __future__ import annotations

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics import MetricWrapperBase

from paceline_core.knobs import Knobs, Strategy
from paceline_core.wire import Gauges, RequestRecord, StepModelDocument
from paceline_runtime.metric_table import LABELS, METRICS, MetricSpec

__all__ = ["CONTENT_TYPE", "RuntimeMetrics"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENGINE = "0"
M = TypeVar("M", bound=MetricWrapperBase)


class RuntimeMetrics:
    """One registry per server. Counters that the engine sums are fed with its running totals (`update`)."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = (model_name, _ENGINE)
        self._last = Gauges()
        self._made = {spec.attribute: _make(spec, self.registry) for spec in METRICS}
        self._children: dict[tuple[str, ...], MetricWrapperBase] = {}
        for spec in METRICS:
            for own in [()] if not spec.labels else [(value,) for value in spec.known]:
                self._made[spec.attribute].labels(*self._labels, *own)  # there from the start, with 0

    def gauge(self, attribute: str, *labels: str) -> PrometheusGauge:
        """Return the gauge of a row of the table, with its own labels' values."""
        return self._child(attribute, PrometheusGauge, labels)

    def counter(self, attribute: str, *labels: str) -> Counter:
        """Return the counter of a row."""
        return self._child(attribute, Counter, labels)

    def histogram(self, attribute: str, *labels: str) -> Histogram:
        """Return the histogram of a row."""
        return self._child(attribute, Histogram, labels)

    def _child(self, attribute: str, kind: type[M], labels: tuple[str, ...]) -> M:
        key = (attribute, *labels)
        found = self._children.get(key)  # looking labels up takes longer than counting, and there is one per token
        if found is None:
            found = self._children[key] = self._made[attribute].labels(*self._labels, *labels)
        assert isinstance(found, kind), f"{attribute} is no {kind.__name__}"
        return found

    def count_request(self, outcome: str) -> None:
        """Count one request: finished, aborted, refused, rejected (queue full, draining, not ready) or failed."""
        self.counter("requests", outcome).inc()

    def observe_request(self, record: RequestRecord, released: float | None, finish_reason: str) -> None:
        """Take a sequence that ended; `released` is when its result came (Unix seconds), if it has one."""
        self.counter("success", finish_reason).inc()
        for part, seconds in record.parts.items():
            self.histogram("part", part).observe(seconds)
        if record.tenant:
            self._count_tokens(record)
        if released is None or record.first_token is None or record.first_scheduled is None or record.end is None:
            return
        self.histogram("e2e").observe(released - record.arrival)
        self.histogram("queue_time").observe(record.first_scheduled - record.arrival)
        self.histogram("prefill_time").observe(record.first_token - record.first_scheduled)
        self.histogram("decode_time").observe(record.end - record.first_token)
        self.histogram("inference_time").observe(record.end - record.first_scheduled)
        if record.output_tokens > 1:
            self.histogram("tpot").observe((record.end - record.first_token) / (record.output_tokens - 1))
        self.histogram("request_prompt").observe(record.prompt_tokens)
        self.histogram("request_output").observe(record.output_tokens)
        self.histogram("request_most").observe(record.output_tokens)
        self.histogram("params_max_tokens").observe(record.max_tokens)

    def _count_tokens(self, record: RequestRecord) -> None:
        self.counter("key_requests", record.tenant, record.outcome).inc()
        self.counter("key_tokens", record.tenant, "prompt").inc(record.prompt_tokens)
        self.counter("key_tokens", record.tenant, "cached").inc(record.cached_tokens)
        self.counter("key_tokens", record.tenant, "output").inc(record.output_tokens)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Take a step of so many tokens."""
        self.counter("steps").inc()
        self.histogram("step_seconds").observe(seconds)
        self.histogram("iteration_tokens").observe(tokens)

    def update(self, now: Gauges) -> None:
        """Take the engine's figures over; its totals start from 0 again with `engine_started`."""
        self.update_gauges(now)
        last, self._last = self._last, now
        for attribute, total, before in (
            ("prompt_tokens", now.prompt_tokens, last.prompt_tokens),
            ("generation_tokens", now.output_tokens, last.output_tokens),
            ("preemptions", now.preemptions, last.preemptions),
            ("prefix_queries", now.prefix_queries, last.prefix_queries),
            ("prefix_hits", now.prefix_hits, last.prefix_hits),
            ("draft_checks", now.draft_checks, last.draft_checks),
            ("draft_tokens", now.draft_tokens, last.draft_tokens),
            ("accepted_drafts", now.accepted_drafts, last.accepted_drafts),
            ("slot_steps", now.slot_steps, last.slot_steps),
            ("slot_steps_busy", now.slot_steps_busy, last.slot_steps_busy),
        ):
            if total != before:  # a turn of the engine changes few of them
                self.counter(attribute).inc(total - before)

    def update_gauges(self, now: Gauges) -> None:
        """Take over what is true now, without the totals."""
        self.gauge("running").set(now.running)
        self.gauge("waiting").set(now.waiting)
        self.gauge("kv_usage").set(now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0)
        self.gauge("kv_blocks", "total").set(now.kv_blocks_total)
        self.gauge("kv_blocks", "used").set(now.kv_blocks_used)
        self.gauge("kv_blocks", "cached").set(now.kv_blocks_cached)

    def engine_started(self) -> None:
        """A new engine counts from zero."""
        self._last = Gauges()

    def set_model(self, model: StepModelDocument) -> None:
        """Publish how good the step-time model is."""
        self.gauge("model_residual").set(model.residual)
        self.gauge("model_steps").set(model.steps)

    def set_knobs(self, knobs: Knobs, num_blocks: int) -> None:
        """Publish the strategy and the pool's settings (the old values' series is dropped)."""
        for strategy in Strategy:
            self.gauge("strategy", strategy.value).set(knobs.strategy is strategy)
        self._made["cache_config"].clear()
        self._children = {key: child for key, child in self._children.items() if key[0] != "cache_config"}
        values = (str(knobs.block_size), str(num_blocks), str(knobs.prefix_caching), str(knobs.kv_memory_fraction))
        self.gauge("cache_config", *values).set(1)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


def _make(spec: MetricSpec, registry: CollectorRegistry) -> MetricWrapperBase:
    labels = (*LABELS, *spec.labels)
    if spec.kind == "histogram":
        return Histogram(spec.name, spec.text, labels, registry=registry, buckets=spec.buckets)
    kind = Counter if spec.kind == "counter" else PrometheusGauge
    return kind(spec.name, spec.text, labels, registry=registry)

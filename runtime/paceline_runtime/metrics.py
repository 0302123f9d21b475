"""Prometheus metrics of a server: vLLM's names, so that existing dashboards and scalers work, and our own `paceline_*`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from paceline_core.knobs import Knobs, Strategy
from paceline_core.wire import Gauges

__all__ = ["CONTENT_TYPE", "RuntimeMetrics"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENGINE = "0"
# vLLM's own buckets, so that its dashboards' quantiles stay comparable
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LABELS = ("model_name", "engine")


class RuntimeMetrics:
    """One registry per server. Counters that the engine sums are fed with its running totals (`update`)."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = (model_name, _ENGINE)
        self._last = Gauges()
        self._make_vllm()
        self._make_own()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets).labels(*self._labels)

    def _make_vllm(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.")
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use (1 = all).")
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", _ITL)
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the result (static and dynamic: of the batch).", _E2E
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began to run.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = self._counter("vllm:num_preemptions", "Sequences that lost their KV and were recomputed.")
        self._cache_config = Gauge(
            "vllm:cache_config_info", "The KV cache's settings, as labels.", registry=self.registry,
            labelnames=(*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization"),
        )  # fmt: skip

    def _make_own(self) -> None:
        self.slot_steps = self._counter("paceline_slot_steps", "Slots offered: maxNumSeqs summed over steps.")
        self.slot_steps_busy = self._counter("paceline_slot_steps_busy", "Slots that did useful work, summed over steps.")
        self.steps = self._counter("paceline_steps", "Engine steps.")
        self.step_seconds = self._histogram("paceline_step_seconds", "Time of one engine step.", _STEP)
        self.knob_epoch = self._gauge("paceline_knob_epoch", "Knob changes that steps were run under.")
        self.knob_revision = self._gauge("paceline_knob_revision", "Revision of the knobs that were asked for.")
        self.ready = self._gauge("paceline_engine_ready", "1 while the engine takes requests.")
        self.engine_restarts = self._counter("paceline_engine_restarts", "Times that a dead engine was started again.")
        self._strategy = Gauge(
            "paceline_strategy", "1 for the batching strategy in force.", (*_LABELS, "strategy"), registry=self.registry
        )
        self._requests = Counter(
            "paceline_requests", "Requests by how they ended.", (*_LABELS, "outcome"), registry=self.registry
        )

    def count_request(self, outcome: str) -> None:
        """Count one request: finished, aborted, refused, rejected (queue full, draining, not ready) or failed."""
        self._requests.labels(*self._labels, outcome).inc()

    def update(self, now: Gauges) -> None:
        """Take the engine's figures over; its totals start from 0 again with `engine_started`."""
        self.update_gauges(now)
        last, self._last = self._last, now
        self.prompt_tokens.inc(now.prompt_tokens - last.prompt_tokens)
        self.generation_tokens.inc(now.output_tokens - last.output_tokens)
        self.preemptions.inc(now.preemptions - last.preemptions)
        self.slot_steps.inc(now.slot_steps - last.slot_steps)
        self.slot_steps_busy.inc(now.slot_steps_busy - last.slot_steps_busy)

    def update_gauges(self, now: Gauges) -> None:
        """Take over what is true now, without the totals."""
        self.running.set(now.running)
        self.waiting.set(now.waiting)
        self.kv_usage.set(now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0)

    def engine_started(self) -> None:
        """A new engine counts from zero."""
        self._last = Gauges()

    def set_knobs(self, knobs: Knobs, num_blocks: int) -> None:
        """Publish the strategy and the pool's settings (the old values' series is dropped)."""
        for strategy in Strategy:
            self._strategy.labels(*self._labels, strategy.value).set(knobs.strategy is strategy)
        self._cache_config.clear()
        values = (str(knobs.block_size), str(num_blocks), str(knobs.prefix_caching), str(knobs.kv_memory_fraction))
        self._cache_config.labels(*self._labels, *values).set(1)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)

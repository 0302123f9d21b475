"""OpenTelemetry traces, if asked for: one span per sequence, from its record, under the client's own trace.

The libraries come with the extra `otel` and are loaded only here. Attributes follow the conventions for generative AI as
vLLM sets them; `paceline.latency.*` are the parts of `causes.py`. No text, no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paceline_core.wire import RequestRecord
from paceline_runtime.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor  # type: ignore[attr-defined]
    from opentelemetry.util.types import AttributeValue

__all__ = ["Tracing", "open_tracing"]

_NANO = 1e9


class Tracing:
    """Makes spans of records and gives them to `processor`."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "paceline-runtime"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paceline_runtime")
        self._model_name = model_name

    def record(self, record: RequestRecord, traceparent: str, released: float) -> None:
        """Make the span of a sequence that has ended at `released` (Unix seconds); `traceparent` is the client's header."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=int(record.arrival * _NANO),
            attributes=dict(_attributes(record, self._model_name, released)),
        )
        if record.first_token is not None:
            span.add_event("first_token", timestamp=int(record.first_token * _NANO))
        if record.outcome != "finished":
            span.set_status(Status(StatusCode.ERROR, record.reason or record.outcome))
        span.end(int(released * _NANO))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def open_tracing(endpoint: str, model_name: str) -> Tracing:
    """Return tracing to an OTLP endpoint over HTTP. Raises `SettingsError` without the extra `otel`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'paceline[otel]'") from None
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise SettingsError(f"--otlp-traces-endpoint {endpoint!r} is no address, as in http://collector:4318/v1/traces")
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model_name)


def _attributes(record: RequestRecord, model_name: str, released: float) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.response.model", model_name
    yield "gen_ai.request.id", record.request_id
    yield "gen_ai.request.max_tokens", record.max_tokens
    yield "gen_ai.usage.prompt_tokens", record.prompt_tokens
    yield "gen_ai.usage.completion_tokens", record.output_tokens
    yield "gen_ai.latency.e2e", released - record.arrival
    if record.first_scheduled is not None:
        yield "gen_ai.latency.time_in_queue", record.first_scheduled - record.arrival
    if record.first_token is not None:
        yield "gen_ai.latency.time_to_first_token", record.first_token - record.arrival
    for part, seconds in record.parts.items():
        yield f"paceline.latency.{part}", seconds
    yield "paceline.outcome", record.outcome
    yield "paceline.epoch", record.epoch
    yield "paceline.preemptions", record.preemptions
    yield "paceline.cached_tokens", record.cached_tokens
    if record.delayed_by:
        yield "paceline.delayed_by", list(record.delayed_by)

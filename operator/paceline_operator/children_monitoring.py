"""Children of the Prometheus operator: what is scraped, and when somebody is to be woken. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from paceline_core.durations import parse_duration
from paceline_operator.children import Manifest
from paceline_operator.names import base_name, selector
from paceline_operator.spec import InferenceService
from paceline_operator.spec_platform import Monitoring

__all__ = ["monitoring_children"]

_WINDOW = "5m"  # over which quantiles are taken
_PATIENCE = "10m"  # for which something must be wrong before it is an alert


def monitoring_children(service: InferenceService) -> Iterator[tuple[str, Manifest]]:
    """Yield kind and content of the monitoring objects that the spec wants."""
    monitoring = service.spec.monitoring or Monitoring()
    if monitoring.pod_monitor:
        yield "PodMonitor", {"spec": _pod_monitor(service, monitoring)}
    if monitoring.rules:
        group = {"name": f"paceline-{base_name(service.name)}", "rules": list(_rules(service))}
        yield "PrometheusRule", {"spec": {"groups": [group]}}


def _pod_monitor(service: InferenceService, monitoring: Monitoring) -> Manifest:
    interval = f"{int(parse_duration(monitoring.interval))}s"
    endpoint = {"port": "http", "path": "/metrics", "interval": interval}
    return {
        "selector": {"matchLabels": selector(service.name)},
        "podMetricsEndpoints": [endpoint],
        "podTargetLabels": ["app.kubernetes.io/instance"],
    }


def _rules(service: InferenceService) -> Iterator[Manifest]:
    pods = f'namespace="{service.namespace}",pod=~"{base_name(service.name)}-[a-z0-9]+-[a-z0-9]+"'
    percentile = service.slo.percentile
    for name, objective, metric in (
        ("PacelineTimeToFirstToken", service.slo.ttft, "vllm:time_to_first_token_seconds"),
        ("PacelineTimePerToken", service.slo.tpot, "vllm:inter_token_latency_seconds"),
    ):
        if objective is not None:
            buckets = f"sum by (le) (rate({metric}_bucket{{{pods}}}[{_WINDOW}]))"
            expression = f"histogram_quantile({percentile / 100:g}, {buckets}) > {parse_duration(objective):g}"
            yield _rule(service, name, expression, f"percentile {percentile} is above the objective of {objective}")
    yield _rule(
        service,
        "PacelineNotReady",
        f"sum(paceline_engine_ready{{{pods}}}) == 0",
        "no pod takes requests: see the conditions of the InferenceService",
    )
    yield _rule(
        service,
        "PacelineKvCacheFull",
        f"avg(vllm:kv_cache_usage_perc{{{pods}}}) > 0.95 and sum(vllm:num_requests_waiting{{{pods}}}) > 0",
        "requests wait because the KV cache is full: add replicas, or raise batching.kvMemoryFraction",
    )


def _rule(service: InferenceService, name: str, expression: str, summary: str) -> Manifest:
    return {
        "alert": name,
        "expr": expression,
        "for": _PATIENCE,
        "labels": {"severity": "warning", "namespace": service.namespace, "inferenceservice": service.name},
        "annotations": {"summary": f"{service.namespace}/{service.name}: {summary}"},
    }

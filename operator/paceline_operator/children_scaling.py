"""Children that decide how many pods there are: disruption budget and autoscalers. Pure.

Autoscalers scale the InferenceService by its scale subresource; the operator alone owns the Deployment's replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_core.durations import parse_duration
from paceline_operator.children import Manifest
from paceline_operator.names import GROUP, KIND, VERSION, base_name, selector
from paceline_operator.spec import InferenceService
from paceline_operator.spec_platform import Scaling

__all__ = ["disruption_budget", "scaling_children"]

# as a metrics adapter names vllm:num_requests_waiting and vllm:kv_cache_usage_perc: colons don't fit its API
_WAITING, _KV_USAGE = "vllm_num_requests_waiting", "vllm_kv_cache_usage_perc"
_STEP = 60  # seconds between two steps of an HPA downwards


def disruption_budget(service: InferenceService) -> Manifest:
    """Return a budget of one pod at a time: a drain of nodes never takes a service down, and never hangs for good."""
    return {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(service.name)}}}


def scaling_children(service: InferenceService) -> Iterator[tuple[str, Manifest]]:
    """Yield kind and content of the autoscaler that the spec wants."""
    scaling = service.spec.scaling
    if scaling is None:
        return
    if scaling.provider == "KEDA":
        yield "ScaledObject", {"spec": _scaled_object(service, scaling)}
    else:
        yield "HorizontalPodAutoscaler", {"spec": _autoscaler(service, scaling)}


def _target(service: InferenceService) -> Manifest:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": service.name}


def _autoscaler(service: InferenceService, scaling: Scaling) -> Manifest:
    """Return an HPA of autoscaling/v2 (v2beta2 has the same fields); it may double at once, and sheds one pod a minute."""
    window = int(parse_duration(scaling.cooldown))
    down = {"type": "Pods", "value": 1, "periodSeconds": _STEP}
    return {
        "scaleTargetRef": _target(service),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": list(_hpa_metrics(scaling)),
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": window, "policies": [down]}},
    }


def _hpa_metrics(scaling: Scaling) -> Iterator[Manifest]:
    if scaling.waiting_requests is not None:
        yield _pods_metric(_WAITING, str(scaling.waiting_requests))
    if scaling.kv_cache_utilization is not None:
        yield _pods_metric(_KV_USAGE, f"{10 * scaling.kv_cache_utilization}m")  # a share, in thousandths
    if scaling.cpu_utilization is not None:
        target = {"type": "Utilization", "averageUtilization": scaling.cpu_utilization}
        yield {"type": "Resource", "resource": {"name": "cpu", "target": target}}


def _pods_metric(name: str, average: str) -> Manifest:
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": average}}}


def _scaled_object(service: InferenceService, scaling: Scaling) -> Manifest:
    return {
        "scaleTargetRef": _target(service),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "cooldownPeriod": int(parse_duration(scaling.cooldown)),
        "triggers": list(_triggers(service, scaling)),
    }


def _triggers(service: InferenceService, scaling: Scaling) -> Iterator[Manifest]:
    """Yield Prometheus triggers; KEDA divides the sum by the threshold, so both queries are sums over the pods."""
    pods = f'{{namespace="{service.namespace}",pod=~"{base_name(service.name)}-[a-z0-9]+-[a-z0-9]+"}}'
    if scaling.waiting_requests is not None:
        yield _trigger(scaling, f"sum(vllm:num_requests_waiting{pods})", str(scaling.waiting_requests))
    if scaling.kv_cache_utilization is not None:
        yield _trigger(scaling, f"sum(vllm:kv_cache_usage_perc{pods}) * 100", str(scaling.kv_cache_utilization))


def _trigger(scaling: Scaling, query: str, threshold: str) -> Manifest:
    metadata = {"serverAddress": scaling.prometheus, "query": query, "threshold": threshold}
    return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}

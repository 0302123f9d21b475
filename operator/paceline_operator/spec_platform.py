"""The parts of a spec that are about the platform around the pods: scaling, network, routing, monitoring, rollout."""
# ruff: noqa: RUF009  `item` returns a dataclass field; ruff knows only `field` itself

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.errors import Problem
from paceline_operator.fields import item, record
from paceline_operator.kinds import Boolean, Duration, Integer, ListOf, MapOf, Raw, Text

__all__ = [
    "SCALING", "EndpointPicker", "Gateway", "Monitoring", "NetworkRules", "Rollout", "Routing", "Scaling",
    "scaling_problems",
]  # fmt: skip

_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
_TARGETS = ("waitingRequests", "kvCacheUtilization", "cpuUtilization")
_MOST_REPLICAS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """An autoscaler that sets spec.replicas through the scale subresource."""

    max_replicas: int = item(Integer(1, _MOST_REPLICAS), "Most pods.", required=True)
    min_replicas: int = item(Integer(0, _MOST_REPLICAS), "Fewest pods; 0 needs KEDA. Default 1.", default=1)
    provider: str = item(
        Text(choices=("HPA", "KEDA")), "HPA (HorizontalPodAutoscaler) or KEDA (ScaledObject). Default HPA.", default="HPA"
    )
    waiting_requests: int | None = item(
        Integer(1, 100_000), "Requests waiting per pod, on average, above which pods are added."
    )
    kv_cache_utilization: int | None = item(Integer(1, 100), "Percent of the KV cache in use above which pods are added.")
    cpu_utilization: int | None = item(
        Integer(1, 1000), "Percent of the CPU request in use above which pods are added; HPA only."
    )
    prometheus: str | None = item(
        Text(1024, r"^https?://[!-~]+$", example="http://prometheus.monitoring:9090"),
        "Prometheus that KEDA asks; needed with provider KEDA.",
    )
    cooldown: str = item(Duration(0, 3600), "How long load must stay low before pods are removed. Default 5m.", default="5m")


SCALING = record(
    Scaling,
    (
        "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must not be above maxReplicas: lower it, or raise maxReplicas",
    ),
    (
        " || ".join(f"has(self.{name})" for name in _TARGETS),
        f"name what to scale by: one of {', '.join(_TARGETS)}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRules:
    """Who may reach the pods, where the network enforces NetworkPolicies."""

    enabled: bool = item(
        Boolean(),
        "Whether there is a NetworkPolicy. Default true, where the operator runs in the cluster.",
        default=True,
    )
    clients: tuple[Mapping[str, Any], ...] = item(
        ListOf(Raw(("ipBlock", "namespaceSelector", "podSelector")), 64),
        "Peers, as in a NetworkPolicy, that may reach port 8000 (name Prometheus too). Default: everybody.",
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPicker:
    """The Gateway API's endpoint picker, a Service of the namespace."""

    name: str = item(Text(63, _NAME, example="llm-epp"), "Name of its Service.", required=True)
    port: int = item(Integer(1, 65_535), "Its gRPC port. Default 9002.", default=9002)
    failure_mode: str = item(
        Text(choices=("FailOpen", "FailClose")),
        "Without the picker: FailOpen sends requests to any pod, FailClose refuses them. Default FailOpen.",
        default="FailOpen",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A Gateway that an HTTPRoute attaches to."""

    name: str = item(Text(pattern=_NAME, example="public"), "Name of the Gateway.", required=True)
    namespace: str | None = item(Text(63, _NAME, example="gateways"), "Its namespace. Default: the service's.")
    section_name: str | None = item(Text(pattern=_NAME, example="https"), "One listener of it. Default: all.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Ways to the pods through the Gateway API, besides the Service."""

    endpoint_picker: EndpointPicker | None = item(
        record(EndpointPicker), "Makes an InferencePool of the pods, with this picker."
    )
    gateway: Gateway | None = item(record(Gateway), "Makes an HTTPRoute from this Gateway to the pool, or to the Service.")
    hostnames: tuple[str, ...] = item(
        ListOf(Text(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", example="llm.example.com"), 16),
        "Host names of the HTTPRoute. Default: the Gateway's.",
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Objects of the Prometheus operator."""

    pod_monitor: bool = item(Boolean(), "Whether there is a PodMonitor. Default false.", default=False)
    rules: bool = item(Boolean(), "Whether there is a PrometheusRule with alerts from slo. Default false.", default=False)
    interval: str = item(Duration(1, 3600), "Time between two scrapes. Default 15s.", default="15s")
    labels: Mapping[str, str] | None = item(
        MapOf(Text(63, min_length=0)), "Further labels of both objects, by which a Prometheus selects them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How pods are replaced."""

    drain_timeout: str = item(
        Duration(0, 3600),
        "How long a pod that goes may finish its requests. Default 30s. A change rolls the pods.",
        default="30s",
    )
    progress_deadline: str = item(
        Duration(30, 86_400), "Without progress for so long, a rollout counts as failed. Default 1h.", default="1h"
    )


def scaling_problems(scaling: Scaling | None) -> Iterator[Problem]:
    """Yield what is wrong between the fields of `scaling`."""
    if scaling is None:
        return
    path, keda = "spec.scaling", scaling.provider == "KEDA"
    if scaling.min_replicas > scaling.max_replicas:
        bound = f"≤ maxReplicas ({scaling.max_replicas})"
        yield Problem(f"{path}.minReplicas", scaling.min_replicas, bound, "lower it, or raise maxReplicas")
    if scaling.min_replicas == 0 and not keda:
        yield Problem(f"{path}.minReplicas", 0, "≥ 1 with provider HPA", "raise it, or set provider: KEDA")
    if keda and scaling.prometheus is None:
        yield Problem(f"{path}.prometheus", None, "required with provider KEDA", "name the Prometheus that KEDA asks")
    if keda and scaling.cpu_utilization is not None:
        yield Problem(f"{path}.cpuUtilization", scaling.cpu_utilization, "HPA only", "remove it, or set provider: HPA")
    if not (scaling.waiting_requests or scaling.kv_cache_utilization or scaling.cpu_utilization):
        yield Problem(path, "no target", "something to scale by", f"add one of {', '.join(_TARGETS)}")

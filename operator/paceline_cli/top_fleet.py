"""What `paceline top` shows: the InferenceServices that an API server has, and what their pods' metrics say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError
from urllib.request import urlopen

from paceline_cli.kube import kube_client
from paceline_cli.top_metrics import Activity, Reading, between, read
from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError, PacelineError
from paceline_operator.names import GROUP, PLURAL, SERVICE_LABEL, VERSION, belongs
from paceline_operator.pods import is_fetcher

__all__ = ["Cluster", "Fleet", "KubeCluster", "ServiceRow"]

_SCRAPES = 16  # at once: a pod that doesn't answer holds up one of them
_TIMEOUT_S = 3.0
_LIMIT = 4 * 1024 * 1024  # bytes of metrics


class Cluster(Protocol):
    """Where services, pods and metrics come from."""

    def services(self) -> Sequence[Mapping[str, Any]]:
        """Return the InferenceServices. Raises `PacelineError`."""

    def pods(self) -> Sequence[Mapping[str, Any]]:
        """Return their pods. Raises `PacelineError`."""

    def metrics(self, pod: Mapping[str, Any]) -> str:
        """Return a pod's metrics. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """One service: what its status says, and what its pods do. `silent` pods are ready but gave no metrics."""

    namespace: str
    name: str
    ready: str
    replicas: str
    strategy: str
    tuner: str
    change: str
    objectives: Mapping[str, float]
    percentile: float
    activity: Activity
    silent: int

    def misses(self, name: str) -> bool:
        """Whether the latency `name` (ttft or tpot) is above its objective."""
        value, bound = getattr(self.activity, name), self.objectives.get(name)
        return value is not None and bound is not None and value > bound


class KubeCluster:
    """An API server named by a kubeconfig (None: as kubectl finds it). Raises `PacelineError` if that can't be read.

    Pods on loopback (those of `paceline local`) are asked directly, others through the API server's proxy.
    """

    def __init__(self, kubeconfig: Path | None, namespace: str | None) -> None:
        from kubernetes import client

        self._namespace = namespace
        api = kube_client(kubeconfig)
        self._core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)

    def services(self) -> Sequence[Mapping[str, Any]]:
        """Return the InferenceServices."""
        if self._namespace is None:
            found = _asked(self._custom.list_cluster_custom_object, GROUP, VERSION, PLURAL)
        else:
            found = _asked(self._custom.list_namespaced_custom_object, GROUP, VERSION, self._namespace, PLURAL)
        return list(found["items"])

    def pods(self) -> Sequence[Mapping[str, Any]]:
        """Return the pods of InferenceServices as plain data."""
        if self._namespace is None:
            found = _asked(self._core.list_pod_for_all_namespaces, label_selector=SERVICE_LABEL)
        else:
            found = _asked(self._core.list_namespaced_pod, self._namespace, label_selector=SERVICE_LABEL)
        return list(self._core.api_client.sanitize_for_serialization(found)["items"])

    def metrics(self, pod: Mapping[str, Any]) -> str:
        """Return a pod's metrics."""
        from kubernetes.client import ApiException

        address = str((pod.get("status") or {}).get("podIP") or "")
        if address.startswith("127."):
            with urlopen(f"http://{address}:8000/metrics", timeout=_TIMEOUT_S) as answer:  # a pod's address
                return str(answer.read(_LIMIT).decode())
        meta = pod["metadata"]
        try:
            return str(
                self._core.connect_get_namespaced_pod_proxy_with_path(
                    f"{meta['name']}:8000", meta["namespace"], "metrics", _request_timeout=_TIMEOUT_S
                )
            )
        except ApiException as error:
            raise OSError(f"{error.status} {error.reason}") from None


def _asked(ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the answer of the API server. Raises `PacelineError` in one line."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return ask(*args, _request_timeout=_TIMEOUT_S * 3, **options)
    except ApiException as error:
        hint = ": is the operator's CRD installed?" if error.status == 404 else ""  # HTTP
        raise PacelineError(f"the API server answered {error.status} {error.reason}{hint}") from None
    except HTTPError as error:
        raise PacelineError(f"the API server can't be reached: {error}") from None


@dataclass(slots=True)
class Fleet:
    """A cluster looked at again and again: rates and latencies are those since the look before."""

    cluster: Cluster
    clock: Callable[[], float] = time.monotonic
    _readings: dict[str, Reading] = field(default_factory=dict)

    def look(self) -> list[ServiceRow]:
        """Return a row per service, by namespace and name. Raises `PacelineError`."""
        services = self.cluster.services()
        pods = [pod for pod in self.cluster.pods() if _is_ready(pod) and not is_fetcher(pod)]
        with ThreadPoolExecutor(_SCRAPES) as pool:
            readings = dict(zip((pod["metadata"]["uid"] for pod in pods), pool.map(self._read, pods), strict=True))
        rows = [self._row(service, pods, readings) for service in services]
        self._readings = {uid: reading for uid, reading in readings.items() if reading is not None}
        return sorted(rows, key=lambda row: (row.namespace, row.name))

    def _read(self, pod: Mapping[str, Any]) -> Reading | None:
        try:
            return read(self.cluster.metrics(pod), self.clock())
        except (OSError, URLError, FormatError, UnicodeDecodeError):
            return None  # counted as silent in its row

    def _row(
        self, service: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], readings: Mapping[str, Reading | None]
    ) -> ServiceRow:
        meta, spec, status = service["metadata"], service.get("spec") or {}, service.get("status") or {}
        own = [pod for pod in pods if belongs(pod, service)]
        found = [readings[pod["metadata"]["uid"]] for pod in own]
        pairs = [(r, self._readings.get(p["metadata"]["uid"])) for p, r in zip(own, found, strict=True) if r is not None]
        percentile = float((spec.get("slo") or {}).get("percentile") or 95)
        tuning = status.get("tuning")
        return ServiceRow(
            namespace=meta["namespace"],
            name=meta["name"],
            ready=_ready(status),
            replicas=f"{status.get('readyReplicas', 0)}/{spec.get('replicas', 1)}",
            strategy=str(status.get("strategy") or ""),
            tuner=_tuner(tuning),
            change=_change(tuning),
            objectives=_objectives(spec.get("slo") or {}),
            percentile=percentile,
            activity=between(pairs, percentile),
            silent=len(own) - len(pairs),
        )


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _ready(status: Mapping[str, Any]) -> str:
    """Return `yes`, or the reason why not."""
    condition = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), None)
    if condition is None:
        return "unknown"
    return "yes" if condition["status"] == "True" else str(condition.get("reason") or "no")


def _tuner(tuning: Any) -> str:
    if isinstance(tuning, Mapping):
        return " ".join(str(tuning[key]) for key in ("mode", "state") if tuning.get(key))
    return str(tuning or "")


def _change(tuning: Any) -> str:
    change = tuning.get("lastChange") if isinstance(tuning, Mapping) else None
    return str(change.get("why") or "") if isinstance(change, Mapping) else ""


def _objectives(slo: Mapping[str, Any]) -> dict[str, float]:
    """Return the objectives in seconds; one that can't be read is the status's to complain of."""
    found = {}
    for name in ("ttft", "tpot"):
        try:
            found[name] = parse_duration(slo[name])
        except (KeyError, FormatError):
            continue
    return found

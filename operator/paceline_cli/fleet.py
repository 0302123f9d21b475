"""One InferenceService as the command line sees it: its object, its pods, its address and its pods' metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kubernetes import client, config
from prometheus_client.parser import text_string_to_metric_families

from paceline_core.errors import PacelineError
from paceline_operator.names import GROUP, PLURAL, SERVICE_LABEL, VERSION, base_name

__all__ = ["Fleet", "FleetError", "PodView", "Slots"]

LOCAL_ADDRESS = "paceline.io/local-address"
SCRAPE_TIMEOUT = 5.0  # seconds; a pod under load answers late, not never
_STRATEGY = "strategy="


class FleetError(PacelineError):
    """The service, its pods or its address aren't what a command needs; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod in a line: name, address, phase or what it waits for, and how often its process was restarted."""

    name: str
    ip: str
    state: str
    ready: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Slot-steps of a service since its pods started: all of them, and those that did useful work."""

    total: float = 0.0
    busy: float = 0.0

    def utilisation_since(self, earlier: Slots) -> float:
        """Return the share of slots in use between two readings (0 if no step ran)."""
        total = self.total - earlier.total
        return (self.busy - earlier.busy) / total if total > 0 else 0.0


@dataclass(slots=True)
class Fleet:
    """Reads and edits one InferenceService through the API server that `kubeconfig` names."""

    kubeconfig: Path
    name: str
    namespace: str = "default"
    _api: client.ApiClient = field(init=False, repr=False)
    _core: client.CoreV1Api = field(init=False, repr=False)
    _custom: client.CustomObjectsApi = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._api = config.new_client_from_config(config_file=str(self.kubeconfig))  # type: ignore[no-untyped-call]
        self._core, self._custom = client.CoreV1Api(self._api), client.CustomObjectsApi(self._api)

    def get(self) -> dict[str, Any]:
        """Return the InferenceService."""
        return self._plain(self._custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name))

    def edit_batching(self, **knobs: Any) -> None:
        """Merge `knobs` (wire names) into `spec.batching`, as `kubectl patch` would."""
        body = {"spec": {"batching": knobs}}
        self._custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name, body)

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the service's conditions by type."""
        return {c["type"]: c for c in self.get().get("status", {}).get("conditions", [])}

    def pods(self) -> list[PodView]:
        """Return the service's pods that aren't being deleted, by name."""
        selector = f"{SERVICE_LABEL}={base_name(self.name)}"
        found = self._plain(self._core.list_namespaced_pod(self.namespace, label_selector=selector))["items"]
        alive = [_view(pod) for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: pod.name)

    def url(self) -> str:
        """Return the root URL of the service's address."""
        service = self._plain(self._core.read_namespaced_service(base_name(self.name), self.namespace))
        address = service["metadata"].get("annotations", {}).get(LOCAL_ADDRESS) or service["spec"].get("clusterIP")
        if not address or address == "None":
            raise FleetError(f"service {self.name} has no address yet: look at 'paceline local status'")
        return f"http://{address}:{service['spec']['ports'][0]['port']}"

    def slots(self) -> Slots:
        """Return the slot-steps of all pods, added up."""
        readings = [self._metrics(pod) for pod in self.pods()]
        total = sum(r.get("paceline_slot_steps_total", 0.0) for r in readings)
        return Slots(total, sum(r.get("paceline_slot_steps_busy_total", 0.0) for r in readings))

    def strategies(self) -> set[str]:
        """Return the strategies that the pods say are in force."""
        readings = [self._metrics(pod) for pod in self.pods()]
        return {key.removeprefix(_STRATEGY) for r in readings for key, on in r.items() if on and key.startswith(_STRATEGY)}

    def _plain(self, found: object) -> dict[str, Any]:
        """Return an object of the client as the JSON that the API server sent."""
        plain: dict[str, Any] = self._api.sanitize_for_serialization(found)  # type: ignore[no-untyped-call]
        return plain

    def _metrics(self, pod: PodView) -> dict[str, float]:
        """Return a pod's samples; those of `paceline_strategy` under `strategy=<name>`."""
        text = httpx.get(f"http://{pod.ip}:8000/metrics", timeout=SCRAPE_TIMEOUT, trust_env=False).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        plain = {s.name: s.value for s in samples if s.name.startswith("paceline_slot_steps")}
        return plain | {_STRATEGY + s.labels["strategy"]: s.value for s in samples if s.name == "paceline_strategy"}


def _view(pod: dict[str, Any]) -> PodView:
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    waiting = next((c["state"]["waiting"]["reason"] for c in containers if "waiting" in c.get("state", {})), None)
    return PodView(
        name=pod["metadata"]["name"],
        ip=status.get("podIP", ""),
        state=waiting or status.get("phase", "Pending"),
        ready=bool(containers) and all(c["ready"] for c in containers),
        restarts=sum(c["restartCount"] for c in containers),
    )

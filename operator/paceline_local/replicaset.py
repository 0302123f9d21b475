"""ReplicaSet → Pods: how many to create, which to delete, and the ReplicaSet's status. Pure: objects in, decisions out."""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass

from paceline_local.manifests import (
    Manifest,
    condition,
    is_deleting,
    is_ready,
    merge_condition,
    owner_reference,
    parse_timestamp,
)

__all__ = ["PodPlan", "is_active", "new_pod", "next_available", "plan_pods", "replica_set_status"]

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass(frozen=True, slots=True)
class PodPlan:
    """How many pods to create, and which to delete."""

    create: int
    delete: tuple[Manifest, ...]


def is_active(pod: Manifest) -> bool:
    """Whether the pod counts as a replica: not ended, not being deleted."""
    return not is_deleting(pod) and (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}


def plan_pods(replica_set: Manifest, pods: list[Manifest]) -> PodPlan:
    """Return what to do about the pods that the ReplicaSet controls. A ReplicaSet that is being deleted does nothing."""
    if is_deleting(replica_set):
        return PodPlan(0, ())
    active = [pod for pod in pods if is_active(pod)]
    missing = int(replica_set["spec"].get("replicas", 1)) - len(active)
    victims = sorted(active, key=_worth)[: max(-missing, 0)]
    return PodPlan(max(missing, 0), tuple(victims))


def _worth(pod: Manifest) -> tuple[object, ...]:
    """Sort key: what is worth least comes first. Not placed, not running, not ready, restarted often, young."""
    status = pod.get("status") or {}
    restarts = sum(int(c.get("restartCount") or 0) for c in status.get("containerStatuses") or ())
    placed = bool(pod["spec"].get("nodeName"))
    phase = _PHASES.get(status.get("phase", "Pending"), 0)
    born = parse_timestamp(pod["metadata"]["creationTimestamp"])
    return placed, phase, is_ready(pod), -restarts, -born, pod["metadata"]["name"]


def new_pod(replica_set: Manifest) -> Manifest:
    """Return a new pod of the ReplicaSet's template with a random name."""
    meta, template = replica_set["metadata"], copy.deepcopy(replica_set["spec"]["template"])
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(5))
    labels = (template.get("metadata") or {}).get("labels") or {}
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    return {
        "metadata": {
            "name": f"{meta['name']}-{suffix}",
            "namespace": meta["namespace"],
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owner_reference(replica_set)],
        },
        "spec": template["spec"],
    }


def _available_at(pod: Manifest, min_ready: float) -> float | None:
    """Return when (Unix seconds) the pod counts as available, None while it isn't ready."""
    ready = condition(pod, "Ready")
    if ready is None or ready["status"] != "True":
        return None
    return parse_timestamp(ready["lastTransitionTime"]) + min_ready if min_ready else 0.0


def next_available(replica_set: Manifest, pods: list[Manifest], now: float) -> float | None:
    """Return when the next ready pod will have been ready for `minReadySeconds`: nothing else tells us."""
    min_ready = float(replica_set["spec"].get("minReadySeconds") or 0)
    times = [t for pod in pods if is_active(pod) and (t := _available_at(pod, min_ready)) is not None and t > now]
    return min(times, default=None)


def replica_set_status(replica_set: Manifest, pods: list[Manifest], now: float, failure: str | None) -> Manifest:
    """Return the whole status; `failure` is why the last pod couldn't be created."""
    active = [pod for pod in pods if is_active(pod)]
    min_ready = float(replica_set["spec"].get("minReadySeconds") or 0)
    times = [_available_at(pod, min_ready) for pod in active]
    status: Manifest = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": sum(t is not None for t in times),
        "availableReplicas": sum(t is not None and t <= now for t in times),
        "observedGeneration": replica_set["metadata"].get("generation", 1),
        "conditions": [],
    }
    if failure is not None:
        bad = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}
        status["conditions"] = [merge_condition(condition(replica_set, "ReplicaFailure"), bad, now)]
    return status

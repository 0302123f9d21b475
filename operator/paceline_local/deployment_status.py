"""A Deployment's status from its ReplicaSets: counts and the conditions Available, Progressing and ReplicaFailure. Pure."""

from __future__ import annotations

from paceline_local.manifests import Manifest, condition, parse_timestamp, timestamp
from paceline_local.rollout import find_current
from paceline_local.rollout_limits import limits_of

__all__ = ["deployment_status", "progress_deadline"]

_PROGRESS_DEADLINE_S = 600
_COUNTS = ("replicas", "readyReplicas", "availableReplicas")


def deployment_status(deployment: Manifest, replica_sets: list[Manifest], now: float) -> Manifest:
    """Return the whole status for the ReplicaSets that the Deployment controls, `now` in Unix seconds."""
    current = find_current(deployment, replica_sets)
    totals = {field: sum(int((rs.get("status") or {}).get(field) or 0) for rs in replica_sets) for field in _COUNTS}
    status: Manifest = totals | {
        "updatedReplicas": int(((current or {}).get("status") or {}).get("replicas") or 0),
        "unavailableReplicas": max(totals["replicas"] - totals["availableReplicas"], 0),
        "observedGeneration": deployment["metadata"].get("generation", 1),
    }
    wanted = [_available(deployment, status), _progressing(deployment, status, current, now), _failure(replica_sets)]
    status["conditions"] = [_dated(deployment, c, now) for c in wanted if c is not None]
    return status


def progress_deadline(deployment: Manifest) -> float | None:
    """Return when (Unix seconds) a rollout under way must have made progress, None if nothing is under way."""
    progressing = condition(deployment, "Progressing")
    if progressing is None or progressing["status"] != "True" or progressing["reason"] == "NewReplicaSetAvailable":
        return None
    limit = deployment["spec"].get("progressDeadlineSeconds", _PROGRESS_DEADLINE_S)
    return parse_timestamp(progressing["lastUpdateTime"]) + float(limit)


def _available(deployment: Manifest, status: Manifest) -> Manifest:
    least = limits_of(deployment).min_available
    if status["availableReplicas"] >= least:
        return _condition("Available", "True", "MinimumReplicasAvailable", "Deployment has minimum availability.")
    return _condition("Available", "False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability.")


def _condition(kind: str, status: str, reason: str, message: str) -> Manifest:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _complete(deployment: Manifest, status: Manifest) -> bool:
    replicas = deployment["spec"].get("replicas", 1)
    return bool(status["updatedReplicas"] == status["replicas"] == status["availableReplicas"] == replicas)


def _progressing(deployment: Manifest, status: Manifest, current: Manifest | None, now: float) -> Manifest:
    name = deployment["metadata"]["name"]
    if deployment["spec"].get("paused"):
        return _condition("Progressing", "Unknown", "DeploymentPaused", "Deployment is paused")
    shown = f'ReplicaSet "{current["metadata"]["name"]}"' if current else f'Deployment "{name}"'
    if _complete(deployment, status) and current is not None:
        return _condition("Progressing", "True", "NewReplicaSetAvailable", f"{shown} has successfully progressed.")
    before = condition(deployment, "Progressing")
    if _moved(deployment, status):
        return _condition("Progressing", "True", "ReplicaSetUpdated", f"{shown} is progressing.") | {
            "lastUpdateTime": timestamp(now)
        }
    deadline = progress_deadline(deployment)
    late = deadline is not None and now >= deadline
    if late or (before is not None and before["reason"] == "ProgressDeadlineExceeded"):
        return _condition("Progressing", "False", "ProgressDeadlineExceeded", f"{shown} has timed out progressing.")
    return _condition("Progressing", "True", "ReplicaSetUpdated", f"{shown} is progressing.")


def _moved(deployment: Manifest, status: Manifest) -> bool:
    """Whether the rollout got further since the status that the Deployment has: only that defers the deadline."""
    before = deployment.get("status") or {}
    if before.get("observedGeneration") != status["observedGeneration"]:
        return True
    old_before = int(before.get("replicas") or 0) - int(before.get("updatedReplicas") or 0)
    more = any(status[f] > int(before.get(f) or 0) for f in ("updatedReplicas", "readyReplicas", "availableReplicas"))
    return more or status["replicas"] - status["updatedReplicas"] < old_before


def _failure(replica_sets: list[Manifest]) -> Manifest | None:
    failures = [c for rs in replica_sets if (c := condition(rs, "ReplicaFailure")) is not None]
    if not failures:
        return None
    return _condition("ReplicaFailure", "True", failures[0]["reason"], failures[0]["message"])


def _dated(deployment: Manifest, after: Manifest, now: float) -> Manifest:
    """Add the two times: transition = the status changed, update = anything changed or progress was made."""
    before = condition(deployment, after["type"]) or {}
    same_status = before.get("status") == after["status"]
    same = same_status and before.get("reason") == after["reason"] and before.get("message") == after["message"]
    transition = before.get("lastTransitionTime") if same_status else None
    updated = after.get("lastUpdateTime") or (before.get("lastUpdateTime") if same else None)
    return after | {
        "lastTransitionTime": transition or timestamp(now),
        "lastUpdateTime": updated or timestamp(now),
    }

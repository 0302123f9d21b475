"""What a pod's status means for people: one finding per pod, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline_operator.names import CONTAINER, FETCHER, NAME_LABEL, RESTART_HASH
from paceline_operator.remedies import last_line, no_node, out_of_memory, short, start_failure

__all__ = [
    "Finding",
    "Instance",
    "diagnose",
    "instances",
    "is_fetcher",
    "is_leaving",
    "is_mounting",
    "is_ready",
    "steady_in",
    "worst",
]

_PULL = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
_START_FAILED = 2  # exit code of the runtime's own "error: …" line
_STABLE = 120.0  # seconds that a container which fell over again and again must run before it counts as well


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a pod isn't ready. `rank` orders by how much somebody has to do about it; `crash` says that it fell over."""

    rank: int
    reason: str
    message: str
    crash: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """A running runtime container that can be asked for its knobs."""

    name: str
    address: str
    ready: bool
    process: str
    restart_hash: str


def instances(pods: Iterable[Mapping[str, Any]]) -> list[Instance]:
    """Return the pods whose runtime runs; `process` changes when a container is started anew."""
    found = []
    for pod in pods:
        state = _runtime(pod)
        address = pod.get("status", {}).get("podIP")
        if address and state and "running" in (state.get("state") or {}) and not is_leaving(pod) and not is_fetcher(pod):
            meta = pod["metadata"]
            process = f"{meta['uid']}/{state.get('containerID') or state.get('restartCount', 0)}"
            annotation = (meta.get("annotations") or {}).get(RESTART_HASH, "")
            found.append(Instance(meta["name"], address, is_ready(pod), process, annotation))
    return found


def is_fetcher(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod only fetches a model."""
    return (pod["metadata"].get("labels") or {}).get(NAME_LABEL) == FETCHER


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is being deleted or has ended for good."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return "deletionTimestamp" in pod["metadata"] or ended


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod takes requests."""
    return _condition(pod, "Ready").get("status") == "True" and not is_leaving(pod)


def is_mounting(pod: Mapping[str, Any]) -> bool:
    """Return whether a container waits for its volumes (a ConfigMap or Secret may be gone)."""
    return ((_runtime(pod) or {}).get("state") or {}).get("waiting", {}).get("reason") in {"ContainerCreating", *_CONFIG}


def worst(pods: Iterable[Mapping[str, Any]], now: float) -> Finding | None:
    """Return the finding that somebody should look at first, None if every pod is well."""
    findings = [finding for pod in pods if (finding := diagnose(pod, now))]
    return min(findings, key=lambda finding: finding.rank, default=None)


def diagnose(pod: Mapping[str, Any], now: float) -> Finding | None:
    """Return why a pod isn't ready or won't stay so, None if it is well or is going. `now` is in seconds since 1970."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if "deletionTimestamp" in pod["metadata"]:
        return None
    if is_ready(pod):
        return _relapse(pod) if steady_in([pod], now) else None
    if status.get("phase") == "Failed":
        text = short(status.get("message") or "the pod failed")
        return Finding(1, status.get("reason") or "Failed", f"{name}: {text}", True)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Finding(3, "Unschedulable", f"{name}: {no_node(pod, scheduled.get('message') or 'no node fits')}")
    for container in _containers(pod):
        if finding := _container_finding(pod, container):
            return finding
    if not status.get("containerStatuses"):
        return Finding(6, "Starting", f"{name}: waits for a node to start it")
    return Finding(5, "Loading", f"{name}: runs and waits for /health/ready")


def steady_in(pods: Iterable[Mapping[str, Any]], now: float) -> float:
    """Return the seconds until the last container that fell over at least twice has run long enough to count as well
    again: between two falls it looks healthy."""
    ends = [_fell_at(c) + _STABLE for pod in pods for c in _containers(pod) if int(c.get("restartCount") or 0) > 1]
    return max(0.0, max(ends, default=now) - now)


def _fell_at(container: Mapping[str, Any]) -> float:
    """Return when a container fell over last, in seconds since 1970 (0: never, or it ended well)."""
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if not (ended.get("finishedAt") and (ended.get("exitCode") or ended.get("reason") == "OOMKilled")):
        return 0.0
    return datetime.fromisoformat(str(ended["finishedAt"])).timestamp()


def _relapse(pod: Mapping[str, Any]) -> Finding | None:
    """Return the crash that a pod which is ready right now comes from."""
    crashes = (_container_finding(pod, container) for container in _containers(pod))
    return next((finding for finding in crashes if finding and finding.crash), None)


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _container_finding(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Finding | None:
    name, state = pod["metadata"]["name"], container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated")
    reason, message = waiting.get("reason", ""), short(waiting.get("message") or "")
    if reason in _PULL:
        return Finding(2, "ImagePull", f"{name}: {reason}: {message or container.get('image', '')}")
    if reason in _CONFIG:
        return Finding(2, "ContainerConfig", f"{name}: {reason}: {message}")
    previous = (container.get("lastState") or {}).get("terminated")
    crash = ended or (previous if container.get("restartCount") else None)
    if crash and (crash.get("exitCode") or crash.get("reason") == "OOMKilled"):
        return _crash_finding(pod, container, crash)
    if reason == "CrashLoopBackOff":
        return Finding(1, "Crashed", f"{name}: {container['name']} ends at once, restarted {_times(container)}", True)
    return Finding(6, "Starting", f"{name}: {reason}") if reason else None


def _crash_finding(pod: Mapping[str, Any], container: Mapping[str, Any], crash: Mapping[str, Any]) -> Finding:
    name, code, message = pod["metadata"]["name"], crash.get("exitCode"), crash.get("message") or ""
    if crash.get("reason") == "OOMKilled":
        return Finding(1, "OutOfMemory", f"{name}: {out_of_memory(pod, container['name'], message)}", True)
    line = last_line(message)
    if code == _START_FAILED and message.strip():
        reason, words = start_failure(line)
        return Finding(1, reason, f"{name}: {words}", True)
    what = f"exit code {code}" + (f" ({crash['reason']})" if crash.get("reason") not in (None, "Error") else "")
    return Finding(
        1, "Crashed", f"{name}: {container['name']} ended with {what}, restarted {_times(container)}: {line}", True
    )


def _times(container: Mapping[str, Any]) -> str:
    count = container.get("restartCount", 0)
    return "once" if count == 1 else f"{count} times"


def _runtime(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    states = pod.get("status", {}).get("containerStatuses") or []
    return next((state for state in states if state["name"] == CONTAINER), None)


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})

"""What a pod's status means for people: one finding per pod, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.names import RESTART_HASH
from paceline_operator.pod import CONTAINER

__all__ = ["Finding", "Instance", "diagnose", "instances", "is_leaving", "is_mounting", "is_ready", "worst"]

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
_LONGEST = 400  # characters of a message that fit a table and an event


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
        if address and state and "running" in (state.get("state") or {}) and not is_leaving(pod):
            meta = pod["metadata"]
            process = f"{meta['uid']}/{state.get('containerID') or state.get('restartCount', 0)}"
            annotation = (meta.get("annotations") or {}).get(RESTART_HASH, "")
            found.append(Instance(meta["name"], address, is_ready(pod), process, annotation))
    return found


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


def worst(pods: Iterable[Mapping[str, Any]]) -> Finding | None:
    """Return the finding that somebody should look at first, None if every pod is ready."""
    findings = [finding for pod in pods if (finding := diagnose(pod))]
    return min(findings, key=lambda finding: finding.rank, default=None)


def diagnose(pod: Mapping[str, Any]) -> Finding | None:
    """Return why a pod isn't ready, None if it is or if it is going."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if "deletionTimestamp" in pod["metadata"] or is_ready(pod):
        return None
    if status.get("phase") == "Failed":
        return Finding(
            1, status.get("reason") or "Failed", f"{name}: {_short(status.get('message') or 'the pod failed')}", True
        )
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Finding(3, "Unschedulable", f"{name}: {_short(scheduled.get('message') or 'no node fits')}")
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if finding := _container_finding(pod, container):
            return finding
    if not status.get("containerStatuses"):
        return Finding(6, "Starting", f"{name}: waits for a node to start it")
    return Finding(5, "Loading", f"{name}: runs and waits for /health/ready")


def _container_finding(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Finding | None:
    name, state = pod["metadata"]["name"], container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated")
    reason, message = waiting.get("reason", ""), _short(waiting.get("message") or "")
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
    name, code = pod["metadata"]["name"], crash.get("exitCode")
    if crash.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, container["name"])
        remedy = "raise spec.resources.limits.memory, or lower batching.kvMemoryFraction or model.maxModelLen"
        return Finding(1, "OutOfMemory", f"{name}: killed at its memory limit of {limit}: {remedy}", True)
    line = _last_line(crash.get("message") or "")
    if code == _START_FAILED and line:
        return Finding(1, "StartFailed", f"{name}: {line}", True)
    what = f"exit code {code}" + (f" ({crash['reason']})" if crash.get("reason") not in (None, "Error") else "")
    return Finding(
        1, "Crashed", f"{name}: {container['name']} ended with {what}, restarted {_times(container)}: {line}", True
    )


def _last_line(text: str) -> str:
    """Return the line that says why: the last `error:` line, else the last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return _short((errors or lines or ["it left no message"])[-1])


def _memory_limit(pod: Mapping[str, Any], name: str) -> str:
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    return str(((containers.get(name, {}).get("resources") or {}).get("limits") or {}).get("memory", "the node"))


def _times(container: Mapping[str, Any]) -> str:
    count = container.get("restartCount", 0)
    return "once" if count == 1 else f"{count} times"


def _runtime(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    states = pod.get("status", {}).get("containerStatuses") or []
    return next((state for state in states if state["name"] == CONTAINER), None)


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"

"""A pod's status from the states of its containers: phase, conditions, container statuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline_local.container_state import ContainerState, container_status
from paceline_local.manifests import Manifest, condition, merge_condition, timestamp

__all__ = ["Placement", "phase_of", "pod_status", "unschedulable_status"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pod runs: its address, the node's, and since when (Unix seconds)."""

    pod_ip: str
    host_ip: str
    started_at: float


def phase_of(init: Mapping[str, ContainerState], main: Mapping[str, ContainerState], policy: str) -> str:
    """Return the pod's phase by Kubernetes' rules for the containers' states and the restartPolicy."""
    if any(s.ended is not None and s.ended.exit_code != 0 for s in init.values()) and policy == "Never":
        return "Failed"
    states = list(main.values())
    if policy != "Always" and all(s.ended is not None for s in states):
        clean = all(s.ended is not None and s.ended.exit_code == 0 for s in states)
        if clean:
            return "Succeeded"
        if policy == "Never":
            return "Failed"
    # a container that waits for its first start keeps the pod Pending; one that crashed and waits doesn't
    return "Running" if all(s.process or s.last for s in states) else "Pending"


def pod_status(
    pod: Manifest, init: Mapping[str, ContainerState], main: Mapping[str, ContainerState], place: Placement, now: float
) -> Manifest:
    """Return the fields of the status that the node agent owns."""
    spec, uid = pod["spec"], pod["metadata"]["uid"]
    phase = phase_of(init, main, spec.get("restartPolicy", "Always"))
    status: Manifest = {
        "phase": phase,
        "hostIP": place.host_ip,
        "podIP": place.pod_ip,
        "podIPs": [{"ip": place.pod_ip}],
        "startTime": timestamp(place.started_at),
        "qosClass": (pod.get("status") or {}).get("qosClass") or "BestEffort",
        "containerStatuses": [container_status(c, main[c["name"]], uid) for c in spec["containers"]],
        "conditions": _conditions(pod, init, main, phase, now),
    }
    if spec.get("initContainers"):
        entries = [container_status(c, init[c["name"]], uid) for c in spec["initContainers"]]
        # an init container is ready once it has done its work
        done = {name for name, s in init.items() if s.ended is not None and s.ended.exit_code == 0}
        status["initContainerStatuses"] = [e | {"ready": e["name"] in done} for e in entries]
    return status


def _conditions(
    pod: Manifest, init: Mapping[str, ContainerState], main: Mapping[str, ContainerState], phase: str, now: float
) -> list[Manifest]:
    initialized = all(s.ended is not None and s.ended.exit_code == 0 for s in init.values())
    unready = sorted(name for name, state in main.items() if not state.ready)
    containers_ready = _unless(unready, phase)
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    closed = [gate for gate in gates if (condition(pod, gate) or {}).get("status") != "True"]
    ready = containers_ready
    if containers_ready["status"] == "True" and closed:
        message = f"corresponding condition of pod readiness gate {closed[0]!r} is not True."
        ready = {"status": "False", "reason": "ReadinessGatesNotReady", "message": message}
    pending = [name for name, s in init.items() if s.ended is None or s.ended.exit_code != 0]
    not_initialized = {
        "status": "False",
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(pending)}]",
    }
    mine = {
        "Initialized": {"status": "True"} if initialized else not_initialized,
        "Ready": ready,
        "ContainersReady": containers_ready,
        "PodScheduled": {"status": "True"},
    }
    foreign = [c for c in (pod.get("status") or {}).get("conditions") or () if c["type"] not in mine]
    dated = [merge_condition(condition(pod, kind), {"type": kind} | value, now) for kind, value in mine.items()]
    return [*dated, *foreign]


def _unless(unready: list[str], phase: str) -> Manifest:
    if phase == "Succeeded":
        return {"status": "False", "reason": "PodCompleted", "message": ""}
    if unready:
        message = f"containers with unready status: [{' '.join(unready)}]"
        return {"status": "False", "reason": "ContainersNotReady", "message": message}
    return {"status": "True"}


def unschedulable_status(pod: Manifest, message: str, now: float) -> Manifest:
    """Return the status of a pod that no node here can run."""
    failed = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    others = [c for c in (pod.get("status") or {}).get("conditions") or () if c["type"] != "PodScheduled"]
    return {"phase": "Pending", "conditions": [*others, merge_condition(condition(pod, "PodScheduled"), failed, now)]}
